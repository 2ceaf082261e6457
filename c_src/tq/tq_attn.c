// The attention core, compiled once for each SIMD level. Written on the compiler's vectors, so that one text serves all
// levels; only the int8 logits of AVX-512 VNNI are written in intrinsics.
//
// Two matrix products do the work, both as [rows] x [tile] with one micro-kernel: logits = query . keys, with the
// tile's keys transposed so that lanes are keys, and acc += weights . values, where lanes are the head's values.
#include "tq_attn.h"
#include "tq_impl.h"

#define INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__)
#    include <immintrin.h>
#    ifdef __AVX512VNNI__
#        define FN(name) name##_avx512
#    else
#        define FN(name) name##_avx512bw
#    endif
#    define LANES    16
#    define ROW_STEP 4  // rows per pass of the micro-kernel: ROW_STEP * 32 / LANES accumulators must fit the registers
#elif defined(__AVX2__)
#    define FN(name) name##_avx2
#    define LANES    8
#    define ROW_STEP 2
#elif defined(__aarch64__) && !defined(TQ_ATTN_REF)
#    ifdef __ARM_FEATURE_DOTPROD
#        define FN(name) name##_dotprod
#    else
#        define FN(name) name##_neon
#    endif
#    define LANES    4
#    define ROW_STEP 2
#else
#    define FN(name) name##_ref
#    define LANES    4
#    define ROW_STEP 1
#endif

typedef float   vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef float   vf_unaligned __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

INLINE vf load(const float * p) {
    return *(const vf_unaligned *) p;
}

INLINE void store(float * p, vf x) {
    *(vf_unaligned *) p = x;
}

INLINE vf splat(float x) {
    return x - (vf){ 0 };
}

INLINE vf choose(vi condition, vf yes, vf no) {
    return (vf) ((condition & (vi) yes) | (~condition & (vi) no));
}

INLINE float sum_lanes(vf x) {
    float sum = 0.0f;
    for (int i = 0; i < LANES; i++) {
        sum += x[i];
    }
    return sum;
}

INLINE float max_lanes(vf x) {
    float max = x[0];
    for (int i = 1; i < LANES; i++) {
        max = x[i] > max ? x[i] : max;
    }
    return max;
}

// e^x for x <= 0, with 2 units in the last place; exactly 0 below -87, where a weight cannot matter.
INLINE vf exp_nonpositive(vf x) {
    const float shift = 12582912.0f;  // 1.5 * 2^23: adding it leaves the rounded integer in the low bits
    const vf    t     = x * 1.44269504f + shift;
    const vf    n     = t - shift;
    const vf    r     = (x - n * 0.693145752f) - n * 1.42860677e-06f;
    vf          p     = 1.0f / 720.0f + r * (1.0f / 5040.0f);
    p                 = 1.0f / 120.0f + r * p;
    p                 = 1.0f / 24.0f + r * p;
    p                 = 1.0f / 6.0f + r * p;
    p                 = 0.5f + r * p;
    p                 = 1.0f + r * p;
    p                 = 1.0f + r * p;
    return choose(x < -87.0f, splat(0.0f), (vf) ((vi) p + ((vi) t << 23)));
}

// c[r][0..31] += a[r][k] * b[k][0..31] for r < n_rows, a compile-time constant.
INLINE void multiply_add_32(int n_rows, const float * a, int lda, const float * b, int ldb, int n_k, float * c,
                            int ldc) {
    vf sum[ROW_STEP][32 / LANES];
    for (int r = 0; r < n_rows; r++) {
        for (int v = 0; v < 32 / LANES; v++) {
            sum[r][v] = load(c + r * ldc + v * LANES);
        }
    }
    for (int k = 0; k < n_k; k++) {
        for (int v = 0; v < 32 / LANES; v++) {
            const vf bv = load(b + k * ldb + v * LANES);
            for (int r = 0; r < n_rows; r++) {
                sum[r][v] += a[r * lda + k] * bv;
            }
        }
    }
    for (int r = 0; r < n_rows; r++) {
        for (int v = 0; v < 32 / LANES; v++) {
            store(c + r * ldc + v * LANES, sum[r][v]);
        }
    }
}

// c[r][j] += a[r][k] * b[k][j], with n a multiple of 32. Columns are outermost: a strip of b stays in the first cache.
static void multiply_add(int rows, const float * a, int lda, const float * b, int ldb, int n_k, float * c, int ldc,
                         int n) {
    for (int j = 0; j < n; j += 32) {
        int r = 0;
        for (; r + ROW_STEP <= rows; r += ROW_STEP) {
            multiply_add_32(ROW_STEP, a + r * lda, lda, b + j, ldb, n_k, c + r * ldc + j, ldc);
        }
        for (; r < rows; r++) {
            multiply_add_32(1, a + r * lda, lda, b + j, ldb, n_k, c + r * ldc + j, ldc);
        }
    }
}

INLINE void decode_rotated(int type, const char * src, float * dst, int n) {
    (type == TQ_TYPE_TQ3 ? FN(tq3_decode_rotated_row) : FN(tq4_decode_rotated_row))(src, dst, n);
}

#ifdef __AVX512VNNI__

// 16 rows of 32 bytes to 8 vectors of 16 rows x 4 bytes: what vpdpbusd multiplies by four bytes of a query.
INLINE void transpose_16x32(const uint8_t * rows, int stride, __m512i * t) {
    __m512i a[8], b[8], c[8];
    for (int i = 0; i < 8; i++) {
        const __m256i lo = _mm256_loadu_si256((const __m256i *) (rows + i * stride));
        const __m256i hi = _mm256_loadu_si256((const __m256i *) (rows + (i + 8) * stride));
        a[i]             = _mm512_inserti64x4(_mm512_castsi256_si512(lo), hi, 1);
    }
    for (int i = 0; i < 8; i += 2) {
        b[i]     = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        c[i]     = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        c[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        c[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        c[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    // c[i] holds columns i (even 128-bit quarters) and i + 4 (odd ones), of rows 0-3 and of rows 4-7 in c[i + 4]
    const __m512i even = _mm512_set_epi64(13, 12, 5, 4, 9, 8, 1, 0);
    const __m512i odd  = _mm512_set_epi64(15, 14, 7, 6, 11, 10, 3, 2);
    for (int i = 0; i < 4; i++) {
        t[i]     = _mm512_permutex2var_epi64(c[i], even, c[i + 4]);
        t[i + 4] = _mm512_permutex2var_epi64(c[i], odd, c[i + 4]);
    }
}

// One block of 16 keys with every row. Keys are unsigned (level + 128), so 128 times the query's sum comes off.
INLINE void add_block_logits(tq_attn_rows * rows, const tq_query_block * q, const int32_t * q_sum, int q_stride,
                             const __m512i * t, __m512 key_scale, float * logits) {
    for (int r = 0; r < rows->n; r++) {
        const int32_t * bytes = (const int32_t *) (const void *) q[r * q_stride].qs;
        __m512i         dot   = _mm512_set1_epi32(-128 * q_sum[r * q_stride]);
        for (int j = 0; j < 8; j++) {
            dot = _mm512_dpbusd_epi32(dot, t[j], _mm512_set1_epi32(bytes[j]));
        }
        const __m512 scale = _mm512_mul_ps(key_scale, _mm512_set1_ps(q[r * q_stride].d));
        float *      out   = logits + r * TQ_TILE;
        _mm512_storeu_ps(out, _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), scale, _mm512_loadu_ps(out)));
    }
}

static void raw_logits(const tq_attn * a, tq_attn_rows * rows, const char * keys, int n_keys) {
    const int n_blocks = a->head_k / TQ_BLOCK;
    for (int k = 0; k < n_keys; k++) {
        (a->type_k == TQ_TYPE_TQ3 ? tq3_decode_levels_avx512 : tq4_decode_levels_avx512)(
            keys + k * a->stride_k, rows->levels + k * a->head_k, rows->scales + k, TQ_TILE, a->head_k);
    }
    memset(rows->logits, 0, (size_t) rows->n * TQ_TILE * sizeof(float));
    for (int g = 0; g < n_keys; g += 16) {
        for (int ib = 0; ib < n_blocks; ib++) {
            __m512i t[8];
            transpose_16x32(rows->levels + g * a->head_k + ib * TQ_BLOCK, a->head_k, t);
            add_block_logits(rows, rows->query_i8 + ib, rows->query_sum + ib, n_blocks, t,
                             _mm512_loadu_ps(rows->scales + ib * TQ_TILE + g), rows->logits + g);
        }
    }
}

#else

static void raw_logits(const tq_attn * a, tq_attn_rows * rows, const char * keys, int n_keys) {
    float key[TQ_MAX_HEAD];
    for (int k = 0; k < n_keys; k++) {
        decode_rotated(a->type_k, keys + k * a->stride_k, key, a->head_k);
        for (int i = 0; i < a->head_k; i++) {
            rows->tile[i * TQ_TILE + k] = key[i];
        }
    }
    memset(rows->logits, 0, (size_t) rows->n * TQ_TILE * sizeof(float));
    multiply_add(rows->n, rows->query, a->head_k, rows->tile, TQ_TILE, a->head_k, rows->logits, TQ_TILE, TQ_TILE);
}

#endif

static void cap_and_mask(const tq_attn * a, float * x, const float * mask, int n_keys) {
    for (int k = 0; k < TQ_TILE; k++) {
        x[k] *= a->scale;
    }
    for (int k = 0; k < n_keys && a->softcap != 0.0f; k++) {
        x[k] = a->softcap * tanhf(x[k] / a->softcap);
    }
    for (int k = 0; k < n_keys && mask != NULL; k++) {
        x[k] += mask[k];
    }
    for (int k = n_keys; k < TQ_TILE; k++) {
        x[k] = -INFINITY;
    }
}

// Turns a row's logits into weights and brings its state to the new maximum.
static void softmax_row(const tq_attn * a, tq_attn_rows * rows, int r, int n_keys) {
    float * x = rows->logits + r * TQ_TILE;
    cap_and_mask(a, x, rows->mask[r], n_keys);
    vf top = load(x);
    for (int k = LANES; k < TQ_TILE; k += LANES) {
        const vf other = load(x + k);
        top            = choose(other > top, other, top);
    }
    const float max = fmaxf(rows->max[r], max_lanes(top));
    if (max == -INFINITY) {
        memset(x, 0, TQ_TILE * sizeof(float));
        return;
    }
    if (max > rows->max[r]) {
        const float factor = expf(rows->max[r] - max);
        float *     acc    = rows->acc + r * a->head_v;
        for (int i = 0; i < a->head_v; i += LANES) {
            store(acc + i, load(acc + i) * factor);
        }
        rows->sum[r] *= factor;
        rows->max[r] = max;
    }
    vf sum = splat(0.0f);
    for (int k = 0; k < TQ_TILE; k += LANES) {
        const vf weight = exp_nonpositive(load(x + k) - max);
        store(x + k, weight);
        sum += weight;
    }
    rows->sum[r] += sum_lanes(sum);
}

void FN(tq_attn_tile)(const tq_attn * a, tq_attn_rows * rows, const char * keys, const char * values, int n_keys) {
    raw_logits(a, rows, keys, n_keys);
    for (int r = 0; r < rows->n; r++) {
        softmax_row(a, rows, r, n_keys);
    }
    for (int k = 0; k < n_keys; k++) {
        decode_rotated(a->type_v, values + k * a->stride_v, rows->tile + k * a->head_v, a->head_v);
    }
    multiply_add(rows->n, rows->logits, TQ_TILE, rows->tile, a->head_v, n_keys, rows->acc, a->head_v, a->head_v);
}
