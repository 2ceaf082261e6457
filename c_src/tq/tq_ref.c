// The reference codec. Every other file must give these bytes; scripts and tests compare against it.
//
// Encoding a block (docs/codec.md):
//   1. rotate: fixed signs, then a Walsh-Hadamard transform of 32;
//   2. bring the block to fixed point, its root mean square being TQ_RMS_ONE, so that all the searching is on integers
//      and gives the same codes on every CPU;
//   3. try TQ_N_CANDIDATES scales; the one whose levels have the largest (x.L)^2/(L.L) leaves the least squared error;
//   4. refit the scale by least squares, round it to fp16, and code every value with that scale.
#if defined(__AVX2__)
#    error "the reference must not be compiled for AVX2: it is what runs on CPUs without it"
#endif

#include "tq_impl.h"

typedef struct {
    int             n_levels;
    const int8_t *  levels;      // magnitudes, ascending
    const int16_t * thresholds;  // [TQ_N_CANDIDATES][n_levels - 1]
} codebook;

static const codebook TQ3 = { 4, TQ3_LEVELS, TQ3_CANDIDATE_THRESHOLDS[0] };
static const codebook TQ4 = { 8, TQ4_LEVELS, TQ4_CANDIDATE_THRESHOLDS[0] };

// A block in fixed point, or is_zero.
typedef struct {
    bool    is_zero;
    float   rms;
    float   inv_rms;  // TQ_RMS_ONE / rms
    int16_t magnitude[TQ_BLOCK];
    bool    negative[TQ_BLOCK];
} fixed_block;

typedef struct {
    uint16_t d;
    uint8_t  index[TQ_BLOCK];
} coded_block;

static void walsh_hadamard(float * y) {
    for (int h = 1; h < TQ_BLOCK; h *= 2) {
        for (int i = 0; i < TQ_BLOCK; i++) {
            if ((i & h) == 0) {
                const float a = y[i];
                const float b = y[i + h];
                y[i]          = a + b;
                y[i + h]      = a - b;
            }
        }
    }
    for (int i = 0; i < TQ_BLOCK; i++) {
        y[i] *= TQ_WHT_SCALE;
    }
}

static void flip_signs(float * y) {
    for (int i = 0; i < TQ_BLOCK; i++) {
        y[i] = (TQ_SIGN_MASK >> i) & 1 ? -y[i] : y[i];
    }
}

static float sanitise(float x) {
    if (isnan(x)) {
        return 0.0f;
    }
    return fmaxf(-TQ_MAX_INPUT, fminf(x, TQ_MAX_INPUT));
}

static void rotate(const float * x, float * y) {
    for (int i = 0; i < TQ_BLOCK; i++) {
        y[i] = sanitise(x[i]);
    }
    flip_signs(y);
    walsh_hadamard(y);
}

static void unrotate(float * y) {
    walsh_hadamard(y);
    flip_signs(y);
}

// In the order in which SIMD lanes are folded, so that all levels round alike.
static float sum_of_squares(const float * y) {
    float lanes[16];
    for (int j = 0; j < 16; j++) {
        lanes[j] = y[j] * y[j] + y[j + 16] * y[j + 16];
    }
    for (int width = 8; width >= 1; width /= 2) {
        for (int j = 0; j < width; j++) {
            lanes[j] += lanes[j + width];
        }
    }
    return lanes[0];
}

static fixed_block to_fixed_point(const float * y) {
    fixed_block b      = { 0 };
    const float sum_sq = sum_of_squares(y);
    b.is_zero          = !(sum_sq >= TQ_MIN_SUMSQ);
    if (b.is_zero) {
        return b;
    }
    b.rms     = sqrtf(sum_sq * (1.0f / TQ_BLOCK));
    b.inv_rms = TQ_RMS_ONE / b.rms;
    for (int i = 0; i < TQ_BLOCK; i++) {
        const int t    = (int) lrintf(y[i] * b.inv_rms);
        b.negative[i]  = t < 0;
        b.magnitude[i] = (int16_t) (t < 0 ? -t : t);
    }
    return b;
}

static int count_exceeded(int16_t magnitude, const int16_t * thresholds, int n) {
    int count = 0;
    for (int j = 0; j < n; j++) {
        count += magnitude > thresholds[j];
    }
    return count;
}

static uint16_t search_scale(const codebook * book, const fixed_block * b) {
    float   best_score = -1.0f;
    int32_t best_dot   = 0;
    int32_t best_norm  = 1;
    for (int k = 0; k < TQ_N_CANDIDATES; k++) {
        const int16_t * thresholds = book->thresholds + k * (book->n_levels - 1);
        int32_t         dot        = 0;
        int32_t         norm       = 0;
        for (int i = 0; i < TQ_BLOCK; i++) {
            const int32_t level = book->levels[count_exceeded(b->magnitude[i], thresholds, book->n_levels - 1)];
            dot += b->magnitude[i] * level;
            norm += level * level;
        }
        const float score = ((float) dot * (float) dot) / (float) norm;
        if (score > best_score) {
            best_score = score;
            best_dot   = dot;
            best_norm  = norm;
        }
    }
    return tq_refit_scale(best_dot, best_norm, b->rms);
}

static void final_thresholds(const codebook * book, const fixed_block * b, uint16_t d, int16_t * thresholds) {
    const float ratio = tq_fp16_to_float(d) * b->inv_rms * TQ_LEVEL_STEP;
    for (int j = 0; j < book->n_levels - 1; j++) {
        const float t = ratio * (float) (book->levels[j] + book->levels[j + 1]) * 0.5f;
        thresholds[j] = (int16_t) lrintf(fminf(t, 32767.0f));
    }
}

static coded_block code_block(const codebook * book, const fixed_block * b) {
    coded_block c = { 0 };
    c.d           = b->is_zero ? 0 : search_scale(book, b);
    if (c.d == 0) {
        return c;
    }
    int16_t thresholds[7];
    final_thresholds(book, b, c.d, thresholds);
    for (int i = 0; i < TQ_BLOCK; i++) {
        c.index[i] = (uint8_t) count_exceeded(b->magnitude[i], thresholds, book->n_levels - 1);
    }
    return c;
}

void tq3_quantize_row_ref(const float * src, void * dst, int64_t n) {
    tq3_block * blocks = dst;
    for (int64_t ib = 0; ib < n / TQ_BLOCK; ib++) {
        float y[TQ_BLOCK];
        rotate(src + ib * TQ_BLOCK, y);
        const fixed_block b = to_fixed_point(y);
        const coded_block c = code_block(&TQ3, &b);
        memset(&blocks[ib], 0, sizeof(tq3_block));
        blocks[ib].d = c.d;
        for (int i = 0; i < TQ_BLOCK && c.d != 0; i++) {
            blocks[ib].qs[i % 8] |= (uint8_t) (c.index[i] << (i / 8 * 2));
            blocks[ib].signs[i % 4] |= (uint8_t) (b.negative[i] << (i / 4));
        }
    }
}

void tq4_quantize_row_ref(const float * src, void * dst, int64_t n) {
    tq4_block * blocks = dst;
    for (int64_t ib = 0; ib < n / TQ_BLOCK; ib++) {
        float y[TQ_BLOCK];
        rotate(src + ib * TQ_BLOCK, y);
        const fixed_block b = to_fixed_point(y);
        const coded_block c = code_block(&TQ4, &b);
        memset(&blocks[ib], 0, sizeof(tq4_block));
        blocks[ib].d = c.d;
        for (int i = 0; i < TQ_BLOCK && c.d != 0; i++) {
            const uint8_t code = (uint8_t) (c.index[i] | b.negative[i] << 3);
            blocks[ib].qs[i % 16] |= (uint8_t) (code << (i / 16 * 4));
        }
    }
}

static int tq3_level(const tq3_block * b, int i) {
    const int level = TQ3_LEVELS[(b->qs[i % 8] >> (i / 8 * 2)) & 3];
    return (b->signs[i % 4] >> (i / 4)) & 1 ? -level : level;
}

static int tq4_level(const tq4_block * b, int i) {
    const int code  = (b->qs[i % 16] >> (i / 16 * 4)) & 15;
    const int level = TQ4_LEVELS[code & 7];
    return code & 8 ? -level : level;
}

void tq3_decode_rotated_row_ref(const void * src, float * dst, int64_t n) {
    const tq3_block * blocks = src;
    for (int64_t ib = 0; ib < n / TQ_BLOCK; ib++) {
        float *     y = dst + ib * TQ_BLOCK;
        const float d = tq_fp16_to_float(blocks[ib].d) * TQ_LEVEL_STEP;
        for (int i = 0; i < TQ_BLOCK; i++) {
            y[i] = (float) tq3_level(&blocks[ib], i) * d;
        }
    }
}

void tq4_decode_rotated_row_ref(const void * src, float * dst, int64_t n) {
    const tq4_block * blocks = src;
    for (int64_t ib = 0; ib < n / TQ_BLOCK; ib++) {
        float *     y = dst + ib * TQ_BLOCK;
        const float d = tq_fp16_to_float(blocks[ib].d) * TQ_LEVEL_STEP;
        for (int i = 0; i < TQ_BLOCK; i++) {
            y[i] = (float) tq4_level(&blocks[ib], i) * d;
        }
    }
}

static void unrotate_row(float * y, int64_t n) {
    for (int64_t i = 0; i < n; i += TQ_BLOCK) {
        unrotate(y + i);
    }
}

void tq3_dequantize_row_ref(const void * src, float * dst, int64_t n) {
    tq3_decode_rotated_row_ref(src, dst, n);
    unrotate_row(dst, n);
}

void tq4_dequantize_row_ref(const void * src, float * dst, int64_t n) {
    tq4_decode_rotated_row_ref(src, dst, n);
    unrotate_row(dst, n);
}

// A query is rotated once per head and then dotted with every key in the rotated domain; int8 costs 3e-5 of its energy.
void tq_query_row_ref(const float * src, void * dst, int64_t n) {
    tq_query_block * blocks = dst;
    for (int64_t ib = 0; ib < n / TQ_BLOCK; ib++) {
        float y[TQ_BLOCK];
        rotate(src + ib * TQ_BLOCK, y);
        float max_abs = 0.0f;
        for (int i = 0; i < TQ_BLOCK; i++) {
            max_abs = fmaxf(max_abs, fabsf(y[i]));
        }
        const float d  = max_abs * (1.0f / 127.0f);
        const float id = d >= 1e-30f ? 1.0f / d : 0.0f;
        blocks[ib].d   = d;
        for (int i = 0; i < TQ_BLOCK; i++) {
            blocks[ib].qs[i] = (int8_t) lrintf(y[i] * id);
        }
    }
}

void tq3_vec_dot_ref(int n, float * s, size_t bs, const void * x, size_t bx, const void * query, size_t by, int nrc) {
    (void) bs, (void) bx, (void) by, (void) nrc;
    const tq3_block *      blocks = x;
    const tq_query_block * q      = query;
    float                  sum    = 0.0f;
    for (int ib = 0; ib < n / TQ_BLOCK; ib++) {
        int32_t dot = 0;
        for (int i = 0; i < TQ_BLOCK; i++) {
            dot += tq3_level(&blocks[ib], i) * q[ib].qs[i];
        }
        sum += (float) dot * (tq_fp16_to_float(blocks[ib].d) * q[ib].d);
    }
    *s = sum * TQ_LEVEL_STEP;
}

void tq4_vec_dot_ref(int n, float * s, size_t bs, const void * x, size_t bx, const void * query, size_t by, int nrc) {
    (void) bs, (void) bx, (void) by, (void) nrc;
    const tq4_block *      blocks = x;
    const tq_query_block * q      = query;
    float                  sum    = 0.0f;
    for (int ib = 0; ib < n / TQ_BLOCK; ib++) {
        int32_t dot = 0;
        for (int i = 0; i < TQ_BLOCK; i++) {
            dot += tq4_level(&blocks[ib], i) * q[ib].qs[i];
        }
        sum += (float) dot * (tq_fp16_to_float(blocks[ib].d) * q[ib].d);
    }
    *s = sum * TQ_LEVEL_STEP;
}
