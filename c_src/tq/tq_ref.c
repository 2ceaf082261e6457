// The reference codec. Every other file must give these bytes; scripts and tests compare against it.
//
// Encoding a block (docs/codec.md):
//   1. transform: fixed signs, then a Walsh-Hadamard transform of 32, not yet divided by sqrt(32);
//   2. for TQ_N_CANDIDATES scales add up the squared errors, which are tables of the magnitudes in 31sts of the
//   largest;
//   3. code every value with the best of these scales;
//   4. correct the scale to the least-squares one of the codes, and round it to fp16.
#if defined(__AVX2__)
#    error "the reference must not be compiled for AVX2: it is what runs on CPUs without it"
#endif

#include "tq_impl.h"

#define MIN_LARGEST 1e-8f  // smaller blocks, as transformed, are zeros: fp16 has no such scale

typedef struct {
    uint16_t d;
    uint8_t  index[TQ_BLOCK];
    bool     negative[TQ_BLOCK];
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
}

static void scale_by(float * y, float factor) {
    for (int i = 0; i < TQ_BLOCK; i++) {
        y[i] *= factor;
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

static void transform(const float * x, float * y) {
    for (int i = 0; i < TQ_BLOCK; i++) {
        y[i] = sanitise(x[i]);
    }
    flip_signs(y);
    walsh_hadamard(y);
}

static void rotate(const float * x, float * y) {
    transform(x, y);
    scale_by(y, TQ_WHT_SCALE);
}

static void unrotate(float * y) {
    walsh_hadamard(y);
    scale_by(y, TQ_WHT_SCALE);
    flip_signs(y);
}

static float max_abs(const float * y) {
    float largest = 0.0f;
    for (int i = 0; i < TQ_BLOCK; i++) {
        largest = fmaxf(largest, fabsf(y[i]));
    }
    return largest;
}

// The candidate scale with the least squared error, the first of equals.
static int best_candidate(const tq_encoder * e, const float * y, float inverse) {
    int best = 0, best_sum = INT32_MAX;
    for (int k = 0; k < TQ_N_CANDIDATES; k++) {
        int sum = 0;
        for (int i = 0; i < TQ_BLOCK; i++) {
            sum += e->errors[k][lrintf(fabsf(y[i]) * ((TQ_N_BUCKETS - 1) * inverse))];
        }
        if (sum < best_sum) {
            best     = k;
            best_sum = sum;
        }
    }
    return best;
}

static coded_block code_block(const tq_encoder * e, const float * x) {
    coded_block c = { 0 };
    float       y[TQ_BLOCK];
    transform(x, y);
    const float largest = max_abs(y);
    if (largest < MIN_LARGEST) {
        return c;
    }
    const float inverse = 1.0f / largest;
    const int   k       = best_candidate(e, y, inverse);
    int32_t     dot = 0, norm = 0;
    for (int i = 0; i < TQ_BLOCK; i++) {
        const uint8_t steps = (uint8_t) (fabsf(y[i]) * (e->steps[k] * inverse));
        c.index[i]          = (uint8_t) (steps + e->index[steps / 16]) / 16;
        c.negative[i]       = signbit(y[i]) != 0;
        const int level     = e->levels[c.index[i]];
        dot += level * (int8_t) (2 * steps - e->half_steps[c.index[i]]);
        norm += level * level;
    }
    c.d = tq_fit_scale(e, k, largest, dot, norm);
    return c;
}

void tq3_quantize_row_ref(const float * src, void * dst, int64_t n) {
    tq3_block * blocks = dst;
    for (int64_t ib = 0; ib < n / TQ_BLOCK; ib++) {
        const coded_block c = code_block(&TQ3_ENCODER, src + ib * TQ_BLOCK);
        memset(&blocks[ib], 0, sizeof(tq3_block));
        blocks[ib].d = c.d;
        for (int i = 0; i < TQ_BLOCK && c.d != 0; i++) {
            blocks[ib].qs[i % 8] |= (uint8_t) (c.index[i] << (i / 8 * 2));
            blocks[ib].signs[i % 4] |= (uint8_t) (c.negative[i] << (i / 4));
        }
    }
}

void tq4_quantize_row_ref(const float * src, void * dst, int64_t n) {
    tq4_block * blocks = dst;
    for (int64_t ib = 0; ib < n / TQ_BLOCK; ib++) {
        const coded_block c = code_block(&TQ4_ENCODER, src + ib * TQ_BLOCK);
        memset(&blocks[ib], 0, sizeof(tq4_block));
        blocks[ib].d = c.d;
        for (int i = 0; i < TQ_BLOCK && c.d != 0; i++) {
            const uint8_t code = (uint8_t) (c.index[i] | c.negative[i] << 3);
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
        const float d  = max_abs(y) * (1.0f / 127.0f);
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
