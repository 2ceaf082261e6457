// Shared by the reference, the ISA files and the dispatcher; not installed.
#ifndef TQ_IMPL_H
#define TQ_IMPL_H

#include "tq.h"
#include "tq_attn.h"
#include "tq_codebook.h"

#include <assert.h>
#if defined(__F16C__)
#    include <immintrin.h>
#endif
#include <math.h>
#include <string.h>

static_assert(sizeof(tq3_block) == 14, "tq3 is 14 bytes per 32 values");
static_assert(sizeof(tq4_block) == 18, "tq4 is 18 bytes per 32 values");
static_assert(sizeof(tq_query_block) == 36, "a query block is a float and 32 int8");

#define TQ_MAX_INPUT    65504.0f  // the largest fp16, for inputs and for the block scale
#define TQ_SAFE_LARGEST 65000.0f  // largest unscaled transformed value that proves all inputs within TQ_MAX_INPUT
#define TQ_WHT_SCALE    0.17677669529663687f  // 1/sqrt(32)
#define TQ_LEVEL_STEP   0.03125f              // value = d * level / 32: centres fp16's range on the scales that occur

// One row per SIMD level; the dispatcher picks the first that runs here.
typedef struct {
    void (*quantize_row)(const float * src, void * dst, int64_t n);
    void (*dequantize_row)(const void * src, float * dst, int64_t n);
    void (*vec_dot)(int n, float * s, size_t bs, const void * x, size_t bx, const void * query, size_t by, int nrc);
} tq_type_kernels;

typedef struct {
    const char * name;
    bool (*runs_here)(void);
    tq_type_kernels type[TQ_TYPE_COUNT];
    void (*query_row)(const float * src, void * dst, int64_t n);
    void (*attn_tile)(const tq_attn * a, tq_attn_rows * rows, const char * keys, const char * values, int n_keys);
    void (*attn_finish)(const tq_attn * a, float sum, const float * acc, float * dst);
} tq_kernels;

// What attention must know of a cache type; a scaled type's block starts with its fp16 scale.
typedef struct {
    size_t block_bytes;
    float  unit;     // value = scale * level * unit
    bool   rotates;  // values are stored rotated
} tq_cache_type_info;

extern const tq_cache_type_info tq_cache_types[TQ_CACHE_COUNT];

// ggml's iq4_nl codebook (kvalues_iq4nl).
static const int8_t TQ_IQ4_NL_LEVELS[16] = { -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113 };

#define TQ_DECLARE_KERNELS(suffix)                                                                               \
    void tq3_quantize_row_##suffix(const float * src, void * dst, int64_t n);                                    \
    void tq4_quantize_row_##suffix(const float * src, void * dst, int64_t n);                                    \
    void tq3_dequantize_row_##suffix(const void * src, float * dst, int64_t n);                                  \
    void tq4_dequantize_row_##suffix(const void * src, float * dst, int64_t n);                                  \
    void tq3_vec_dot_##suffix(int n, float * s, size_t bs, const void * x, size_t bx, const void * q, size_t by, \
                              int nrc);                                                                          \
    void tq4_vec_dot_##suffix(int n, float * s, size_t bs, const void * x, size_t bx, const void * q, size_t by, \
                              int nrc);                                                                          \
    void tq_query_row_##suffix(const float * src, void * dst, int64_t n);                                        \
    void tq_attn_tile_##suffix(const tq_attn * a, tq_attn_rows * rows, const char * keys, const char * values,   \
                               int n_keys);                                                                      \
    void tq_attn_finish_##suffix(const tq_attn * a, float sum, const float * acc, float * dst)

TQ_DECLARE_KERNELS(ref);
TQ_DECLARE_KERNELS(avx2);
TQ_DECLARE_KERNELS(avx512bw);
TQ_DECLARE_KERNELS(avx512);
TQ_DECLARE_KERNELS(neon);
TQ_DECLARE_KERNELS(dotprod);

// dequantize_row without rotating back, for attention in float32.
#define TQ_DECLARE_DECODERS(suffix)                                                 \
    void tq3_decode_rotated_row_##suffix(const void * src, float * dst, int64_t n); \
    void tq4_decode_rotated_row_##suffix(const void * src, float * dst, int64_t n)

TQ_DECLARE_DECODERS(ref);
TQ_DECLARE_DECODERS(neon);

// Channels of the pairs that turn window by window, with their padding.
static inline int tq_mean_slow(const tq_key_mean * m) {
    return (m->n_rot - 2 * m->n_fast + TQ_MEAN_PAD - 1) / TQ_MEAN_PAD * TQ_MEAN_PAD;
}

static inline uint32_t tq_float_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof(bits));
    return bits;
}

static inline float tq_bits_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof(x));
    return x;
}

// fp16 of 0 <= x <= 65504, to nearest even. Written out so that a CPU without fp16 instructions gives the same bits.
static inline uint16_t tq_scale_to_fp16(float x) {
#if defined(__F16C__)
    return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__aarch64__)
    const __fp16 h = (__fp16) x;
    uint16_t bits;
    memcpy(&bits, &h, sizeof(bits));
    return bits;
#else
    if (x < 6.103515625e-05f) {
        return (uint16_t) lrintf(x * 16777216.0f);  // subnormal: a multiple of 2^-24
    }
    const uint32_t bits = tq_float_bits(x);
    return (uint16_t) ((bits + 0xfff + ((bits >> 13) & 1) - (112u << 23)) >> 13);
#endif
}

static inline float tq_fp16_to_float(uint16_t h) {
#if defined(__F16C__)
    return _cvtsh_ss(h);
#elif defined(__aarch64__)
    __fp16 x;
    memcpy(&x, &h, sizeof(x));
    return (float) x;
#else
    const uint32_t sign     = (uint32_t) (h & 0x8000) << 16;
    const uint32_t exponent = (h >> 10) & 0x1f;
    const uint32_t mantissa = h & 0x3ff;
    if (exponent == 0) {
        const float magnitude = (float) mantissa * 5.9604644775390625e-08f;
        return sign ? -magnitude : magnitude;
    }
    const uint32_t biased = exponent == 31 ? 255 : exponent + 112;
    return tq_bits_float(sign | (biased << 23) | (mantissa << 13));
#endif
}

// Candidate k's scale, corrected to the least-squares one of its codes: x.L / L.L is the candidate times
// 1 + residual.L / L.L, the residual being what the levels leave of x in units of the candidate.
static inline uint16_t tq_fit_scale(const tq_encoder * e, int k, float largest, int32_t residual_dot, int32_t norm) {
    const float correction = (float) residual_dot / (float) norm * e->half_step;
    const float scale      = largest * e->scale[k] * (1.0f + correction);
    return tq_scale_to_fp16(scale < TQ_MAX_INPUT ? scale : TQ_MAX_INPUT);  // fminf would be a call
}

static inline void tq3_set_scale(tq3_block * b, uint16_t d) {
    b->d = d;
    if (d == 0) {
        memset(b, 0, sizeof(*b));
    }
}

static inline void tq4_set_scale(tq4_block * b, uint16_t d) {
    b->d = d;
    if (d == 0) {
        memset(b, 0, sizeof(*b));
    }
}

#endif  // TQ_IMPL_H
