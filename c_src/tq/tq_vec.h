// The vectors of the attention core: what the compiler's vector extension gives on every SIMD level, and the few
// primitives that need intrinsics. Included by tq_attn.c only, which is compiled once for each level.
//
// A vector has LANES lanes of 32 bits. Where it holds pieces of 16 bytes, it has LANES / 4 of them.
#ifndef TQ_VEC_H
#define TQ_VEC_H

#include "tq_impl.h"

#define INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__)
#    include <immintrin.h>
#    define TQ_INT8
#    ifdef __AVX512VNNI__
#        define FN(name) name##_avx512
#    else
#        define FN(name) name##_avx512bw
#    endif
#    define LANES 16
#elif defined(__AVX2__)
#    include <immintrin.h>
#    define TQ_INT8
#    define FN(name) name##_avx2
#    define LANES    8
#elif defined(__aarch64__) && !defined(TQ_ATTN_REF)
#    include <arm_neon.h>
#    ifdef __ARM_FEATURE_DOTPROD
#        define TQ_INT8
#        define FN(name) name##_dotprod
#    else
#        define FN(name) name##_neon
#    endif
#    define LANES 4
#else
#    define FN(name) name##_ref
#    define LANES    4
#endif

#define PIECES (LANES / 4)

typedef float   vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef int16_t vh __attribute__((vector_size(2 * LANES)));
typedef float   vf_unaligned __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t vi_unaligned __attribute__((vector_size(4 * LANES), aligned(1), may_alias));
typedef int16_t vh_unaligned __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

INLINE vf load(const float * p) {
    return *(const vf_unaligned *) p;
}

INLINE void store(float * p, vf x) {
    *(vf_unaligned *) p = x;
}

INLINE vi load_i32(const void * p) {
    return *(const vi_unaligned *) p;
}

INLINE void store_i32(void * p, vi x) {
    *(vi_unaligned *) p = x;
}

INLINE vf splat(float x) {
    return x - (vf) { 0 };
}

INLINE vi splat_i32(int32_t x) {
    return x - (vi) { 0 };
}

INLINE vf to_float(vi x) {
    return __builtin_convertvector(x, vf);
}

INLINE vf choose(vi condition, vf yes, vf no) {
    return (vf) ((condition & (vi) yes) | (~condition & (vi) no));
}

INLINE vf larger(vf a, vf b) {
    return choose(a > b, a, b);
}

INLINE vf magnitude(vf x) {
    return (vf) ((vi) x & INT32_MAX);
}

// (x ^ m) - m in each byte: -x where m, a word of masks 0x00 and 0xff, is set.
INLINE vi negate_bytes(vi x, int32_t m) {
    typedef int8_t vb __attribute__((vector_size(4 * LANES)));
    return (vi) ((vb) (x ^ m) - (vb) splat_i32(m));
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

// ---- what each instruction set spells in its own way ----
//
//   load_f16            LANES fp16 as floats
//   gather_pieces       16 bytes from each of row[0], row[4], row[8], ...
//   transpose_pieces    four vectors as 4 x 4 matrices of lanes, one in each piece: transposed
//   partners            x[i ^ h] in lane i, for h = 1, 2, 4, 8 below LANES

#if defined(__AVX512F__)

INLINE vf load_f16(const uint16_t * p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *) p));
}

INLINE vi gather_pieces(const char * const * row, size_t offset) {
    __m512i x = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *) (row[0] + offset)));
    x         = _mm512_inserti32x4(x, _mm_loadu_si128((const __m128i *) (row[4] + offset)), 1);
    x         = _mm512_inserti32x4(x, _mm_loadu_si128((const __m128i *) (row[8] + offset)), 2);
    return (vi) _mm512_inserti32x4(x, _mm_loadu_si128((const __m128i *) (row[12] + offset)), 3);
}

INLINE void transpose_pieces(vi * x) {
    const __m512i a = _mm512_unpacklo_epi32((__m512i) x[0], (__m512i) x[1]);
    const __m512i b = _mm512_unpackhi_epi32((__m512i) x[0], (__m512i) x[1]);
    const __m512i c = _mm512_unpacklo_epi32((__m512i) x[2], (__m512i) x[3]);
    const __m512i d = _mm512_unpackhi_epi32((__m512i) x[2], (__m512i) x[3]);
    x[0]            = (vi) _mm512_unpacklo_epi64(a, c);
    x[1]            = (vi) _mm512_unpackhi_epi64(a, c);
    x[2]            = (vi) _mm512_unpacklo_epi64(b, d);
    x[3]            = (vi) _mm512_unpackhi_epi64(b, d);
}

INLINE vf partners(vf x, int h) {
    switch (h) {
        case 1:
            return _mm512_permute_ps(x, 0xb1);
        case 2:
            return _mm512_permute_ps(x, 0x4e);
        case 4:
            return _mm512_shuffle_f32x4(x, x, 0xb1);
        default:
            return _mm512_shuffle_f32x4(x, x, 0x4e);
    }
}

#elif defined(__AVX2__)

INLINE vf load_f16(const uint16_t * p) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) p));
}

INLINE vi gather_pieces(const char * const * row, size_t offset) {
    const __m128i lo = _mm_loadu_si128((const __m128i *) (row[0] + offset));
    const __m128i hi = _mm_loadu_si128((const __m128i *) (row[4] + offset));
    return (vi) _mm256_set_m128i(hi, lo);
}

INLINE void transpose_pieces(vi * x) {
    const __m256i a = _mm256_unpacklo_epi32((__m256i) x[0], (__m256i) x[1]);
    const __m256i b = _mm256_unpackhi_epi32((__m256i) x[0], (__m256i) x[1]);
    const __m256i c = _mm256_unpacklo_epi32((__m256i) x[2], (__m256i) x[3]);
    const __m256i d = _mm256_unpackhi_epi32((__m256i) x[2], (__m256i) x[3]);
    x[0]            = (vi) _mm256_unpacklo_epi64(a, c);
    x[1]            = (vi) _mm256_unpackhi_epi64(a, c);
    x[2]            = (vi) _mm256_unpacklo_epi64(b, d);
    x[3]            = (vi) _mm256_unpackhi_epi64(b, d);
}

INLINE vf partners(vf x, int h) {
    return h == 1 ? _mm256_permute_ps(x, 0xb1) : h == 2 ? _mm256_permute_ps(x, 0x4e) : _mm256_permute2f128_ps(x, x, 1);
}

#elif defined(__aarch64__) && !defined(TQ_ATTN_REF)

INLINE vf load_f16(const uint16_t * p) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
}

INLINE vi gather_pieces(const char * const * row, size_t offset) {
    return load_i32(row[0] + offset);
}

INLINE void transpose_pieces(vi * x) {
    const int64x2_t a = vreinterpretq_s64_s32(vzip1q_s32(x[0], x[1]));
    const int64x2_t b = vreinterpretq_s64_s32(vzip2q_s32(x[0], x[1]));
    const int64x2_t c = vreinterpretq_s64_s32(vzip1q_s32(x[2], x[3]));
    const int64x2_t d = vreinterpretq_s64_s32(vzip2q_s32(x[2], x[3]));
    x[0]              = (vi) vzip1q_s64(a, c);
    x[1]              = (vi) vzip2q_s64(a, c);
    x[2]              = (vi) vzip1q_s64(b, d);
    x[3]              = (vi) vzip2q_s64(b, d);
}

INLINE vf partners(vf x, int h) {
    return h == 1 ? vrev64q_f32(x) : vextq_f32(x, x, 2);
}

#else

INLINE vf load_f16(const uint16_t * p) {
    return (vf) { tq_fp16_to_float(p[0]), tq_fp16_to_float(p[1]), tq_fp16_to_float(p[2]), tq_fp16_to_float(p[3]) };
}

INLINE vi gather_pieces(const char * const * row, size_t offset) {
    return load_i32(row[0] + offset);
}

INLINE void transpose_pieces(vi * x) {
    const vi a = x[0], b = x[1], c = x[2], d = x[3];
    for (int i = 0; i < 4; i++) {
        x[i] = (vi) { a[i], b[i], c[i], d[i] };
    }
}

INLINE vf partners(vf x, int h) {
    return h == 1 ? (vf) { x[1], x[0], x[3], x[2] } : (vf) { x[2], x[3], x[0], x[1] };
}

#endif

INLINE float sum_lanes(vf x) {
    for (int h = 1; h < LANES; h *= 2) {
        x += partners(x, h);
    }
    return x[0];
}

INLINE float max_lanes(vf x) {
    for (int h = 1; h < LANES; h *= 2) {
        x = larger(x, partners(x, h));
    }
    return x[0];
}

#ifdef TQ_INT8

// ---- int8 arithmetic ----
//
//   operand         LANES words of four int8, in the form that is multiplied
//   dot_key         += four of a key's bytes times four of a query's, in each lane
//   dot_value       += four keys' bytes of a value times the four keys' weights (two words), in each lane
//   total           of what dot_value has summed
//   split_weights   weight * ratio / 2^15 of eight keys as those words: the first of two quads, then the second
//   lookup          table[code] for codes below 16, code by code
//   gather_codes    as gather_pieces, reading no more than n_bytes (12 or 16) of each row
//   interleave_quad byte j of row[0], of row[1], of row[2], of row[3], for j = 0..15: 64 bytes
//   index_pieces    of what interleave_quad gave, pieces 0 and 1 in turn, as vector i takes them
//   sign_pieces     and piece 2 alone

#    if defined(__AVX512VNNI__)

// vpdpbusd takes one factor unsigned. A key's bytes are stored with this added, and taken off again. Weights are taken
// a byte at a time.
#        define KEY_BIAS 128

typedef struct {
    vi bytes;
} operand;

typedef struct {
    vi lo, hi;
} weighted;

INLINE operand load_operand(const void * p) {
    return (operand) { load_i32(p) };
}

INLINE vi dot_key(vi sum, operand key, const int8_t * query, const int16_t * query_i16) {
    (void) query_i16;
    int32_t word;
    memcpy(&word, query, sizeof(word));
    return (vi) _mm512_dpbusd_epi32((__m512i) sum, (__m512i) key.bytes, _mm512_set1_epi32(word));
}

INLINE weighted dot_value(weighted sum, operand value, const int32_t * words) {
    sum.lo = (vi) _mm512_dpbusd_epi32((__m512i) sum.lo, _mm512_set1_epi32(words[0]), (__m512i) value.bytes);
    sum.hi = (vi) _mm512_dpbusd_epi32((__m512i) sum.hi, _mm512_set1_epi32(words[2]), (__m512i) value.bytes);
    return sum;
}

INLINE vi total(weighted sum) {
    return sum.hi * 256 + sum.lo;
}

#        define WEIGHT_WORDS 0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15  // low bytes, then high ones

#    elif defined(__AVX2__)

// Without VNNI, in 16 bits: of four bytes the even ones, then the odd ones, as sign extension in place leaves them.
#        define KEY_BIAS 0

typedef struct {
    vi even, odd;
} operand;

typedef struct {
    vi sum;
} weighted;

#        if LANES == 16
#            define X86(name) _mm512_##name
#            define X86_INT   __m512i
#        else
#            define X86(name) _mm256_##name
#            define X86_INT   __m256i
#        endif

INLINE operand load_operand(const void * p) {
    const X86_INT x = (X86_INT) load_i32(p);
    return (operand) { (vi) X86(srai_epi16)(X86(slli_epi16)(x, 8), 8), (vi) X86(srai_epi16)(x, 8) };
}

// + x.even * words[0] + x.odd * words[step]
INLINE vi add_products(vi sum, operand x, const int32_t * words, int step) {
    const vi even = (vi) X86(madd_epi16)((X86_INT) x.even, X86(set1_epi32)(words[0]));
    const vi odd  = (vi) X86(madd_epi16)((X86_INT) x.odd, X86(set1_epi32)(words[step]));
    return sum + even + odd;
}

INLINE vi dot_key(vi sum, operand key, const int8_t * query_i8, const int16_t * query) {
    (void) query_i8;
    int32_t words[2];
    memcpy(words, query, sizeof(words));
    return add_products(sum, key, words, 1);
}

INLINE weighted dot_value(weighted sum, operand value, const int32_t * words) {
    return (weighted) { add_products(sum.sum, value, words, 2) };
}

INLINE vi total(weighted sum) {
    return sum.sum;
}

#        define WEIGHT_WORDS \
            0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15  // keys 0 and 2, 4 and 6; 1 and 3, ...

#    endif

#    if defined(__AVX512F__)

INLINE vi lookup(const int8_t * table, vi codes) {
    const __m512i t = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *) table));
    return (vi) _mm512_shuffle_epi8(t, (__m512i) codes);
}

INLINE __m128i load_codes(const char * p, int n_bytes) {
    return n_bytes == 16 ? _mm_loadu_si128((const __m128i *) p) : _mm_maskz_loadu_epi32(7, p);
}

INLINE vi four_codes(const char * a, const char * b, const char * c, const char * d, int n_bytes) {
    __m512i x = _mm512_castsi128_si512(load_codes(a, n_bytes));
    x         = _mm512_inserti32x4(x, load_codes(b, n_bytes), 1);
    x         = _mm512_inserti32x4(x, load_codes(c, n_bytes), 2);
    return (vi) _mm512_inserti32x4(x, load_codes(d, n_bytes), 3);
}

INLINE vi gather_codes(const char * const * row, size_t offset, int n_bytes) {
    return four_codes(row[0] + offset, row[4] + offset, row[8] + offset, row[12] + offset, n_bytes);
}

INLINE void interleave_quad(const char * const * row, size_t offset, int n_bytes, vi * out) {
    const vi      x     = four_codes(row[0] + offset, row[1] + offset, row[2] + offset, row[3] + offset, n_bytes);
    const __m512i lanes = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i bytes = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    out[0]              = (vi) _mm512_shuffle_epi8(_mm512_permutexvar_epi32(lanes, (__m512i) x), bytes);
}

INLINE vi index_pieces(const vi * x, int i) {
    (void) i;
    return (vi) _mm512_shuffle_i32x4((__m512i) x[0], (__m512i) x[0], 0x44);
}

INLINE vi sign_pieces(const vi * x) {
    return (vi) _mm512_shuffle_i32x4((__m512i) x[0], (__m512i) x[0], 0xaa);
}

INLINE void split_weights(const int16_t * weight, const int16_t * ratio, int32_t * words) {
    const __m512i order = _mm512_broadcast_i32x4(_mm_setr_epi8(WEIGHT_WORDS));
    for (int k = 0; k < TQ_TILE; k += 32) {
        const __m512i w = _mm512_mulhrs_epi16(_mm512_loadu_si512(weight + k), _mm512_loadu_si512(ratio + k));
        _mm512_storeu_si512(words + k / 2, _mm512_shuffle_epi8(w, order));
    }
}

#    elif defined(__AVX2__)

INLINE vi lookup(const int8_t * table, vi codes) {
    const __m256i t = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *) table));
    return (vi) _mm256_shuffle_epi8(t, (__m256i) codes);
}

INLINE __m128i load_codes(const char * p, int n_bytes) {
    return n_bytes == 16 ? _mm_loadu_si128((const __m128i *) p)
                         : _mm_maskload_epi32((const int *) (const void *) p, _mm_setr_epi32(-1, -1, -1, 0));
}

INLINE vi gather_codes(const char * const * row, size_t offset, int n_bytes) {
    return (vi) _mm256_set_m128i(load_codes(row[4] + offset, n_bytes), load_codes(row[0] + offset, n_bytes));
}

INLINE void interleave_quad(const char * const * row, size_t offset, int n_bytes, vi * out) {
    const __m128i a = load_codes(row[0] + offset, n_bytes), b = load_codes(row[1] + offset, n_bytes);
    const __m128i c = load_codes(row[2] + offset, n_bytes), d = load_codes(row[3] + offset, n_bytes);
    const __m128i ab_lo = _mm_unpacklo_epi8(a, b), ab_hi = _mm_unpackhi_epi8(a, b);
    const __m128i cd_lo = _mm_unpacklo_epi8(c, d), cd_hi = _mm_unpackhi_epi8(c, d);
    out[0] = (vi) _mm256_set_m128i(_mm_unpackhi_epi16(ab_lo, cd_lo), _mm_unpacklo_epi16(ab_lo, cd_lo));
    out[1] = (vi) _mm256_set_m128i(_mm_unpackhi_epi16(ab_hi, cd_hi), _mm_unpacklo_epi16(ab_hi, cd_hi));
}

INLINE vi index_pieces(const vi * x, int i) {
    (void) i;
    return x[0];
}

INLINE vi sign_pieces(const vi * x) {
    return (vi) _mm256_permute2x128_si256((__m256i) x[1], (__m256i) x[1], 0);
}

INLINE void split_weights(const int16_t * weight, const int16_t * ratio, int32_t * words) {
    const __m256i order = _mm256_broadcastsi128_si256(_mm_setr_epi8(WEIGHT_WORDS));
    for (int k = 0; k < TQ_TILE; k += 16) {
        const __m256i w = _mm256_mulhrs_epi16(_mm256_loadu_si256((const __m256i *) (weight + k)),
                                              _mm256_loadu_si256((const __m256i *) (ratio + k)));
        _mm256_storeu_si256((__m256i *) (words + k / 2), _mm256_shuffle_epi8(w, order));
    }
}

#    elif defined(__ARM_FEATURE_DOTPROD)

// sdot takes both factors signed. So a key's bytes need no bias; and of a weight's two bytes the low one is -128..127,
// and the high one rounds to make up for it, where x86's unsigned low byte is cut off. WEIGHT_ONE is the largest weight
// whose high byte stays below 128.
#        define KEY_BIAS 0

typedef struct {
    vi bytes;
} operand;

typedef struct {
    vi lo, hi;
} weighted;

INLINE operand load_operand(const void * p) {
    return (operand) { load_i32(p) };
}

// A word is taken from the lane it was loaded to: spread over a vector, words drive sums out of the registers.
INLINE vi add_dot(vi sum, vi x, const void * p) {
    uint32_t word;
    memcpy(&word, p, sizeof(word));
    return vdotq_lane_s32(sum, vreinterpretq_s8_s32(x), vcreate_s8(word), 0);
}

INLINE vi dot_key(vi sum, operand key, const int8_t * query, const int16_t * query_i16) {
    (void) query_i16;
    return add_dot(sum, key.bytes, query);
}

INLINE weighted dot_value(weighted sum, operand value, const int32_t * words) {
    sum.lo = add_dot(sum.lo, value.bytes, words);
    sum.hi = add_dot(sum.hi, value.bytes, words + 2);
    return sum;
}

INLINE vi total(weighted sum) {
    return sum.hi * 256 + sum.lo;
}

INLINE vi lookup(const int8_t * table, vi codes) {
    return vreinterpretq_s32_s8(vqtbl1q_s8(vld1q_s8(table), vreinterpretq_u8_s32(codes)));
}

INLINE vi load_codes(const char * p, int n_bytes) {
    if (n_bytes == 16) {
        return load_i32(p);
    }
    int32_t last;
    memcpy(&last, p + 8, sizeof(last));
    return vcombine_s32(vreinterpret_s32_s8(vld1_s8((const int8_t *) p)), vdup_n_s32(last));
}

INLINE vi gather_codes(const char * const * row, size_t offset, int n_bytes) {
    return load_codes(row[0] + offset, n_bytes);
}

INLINE void interleave_quad(const char * const * row, size_t offset, int n_bytes, vi * out) {
    int8x16_t x[4];
    for (int i = 0; i < 4; i++) {
        x[i] = vreinterpretq_s8_s32(load_codes(row[i] + offset, n_bytes));
    }
    const int8x16_t ac_lo = vzip1q_s8(x[0], x[2]), ac_hi = vzip2q_s8(x[0], x[2]);
    const int8x16_t bd_lo = vzip1q_s8(x[1], x[3]), bd_hi = vzip2q_s8(x[1], x[3]);
    out[0]                = vreinterpretq_s32_s8(vzip1q_s8(ac_lo, bd_lo));
    out[1]                = vreinterpretq_s32_s8(vzip2q_s8(ac_lo, bd_lo));
    out[2]                = vreinterpretq_s32_s8(vzip1q_s8(ac_hi, bd_hi));
    out[3]                = vreinterpretq_s32_s8(vzip2q_s8(ac_hi, bd_hi));
}

INLINE vi index_pieces(const vi * x, int i) {
    return x[i & 1];
}

INLINE vi sign_pieces(const vi * x) {
    return x[2];
}

INLINE void split_weights(const int16_t * weight, const int16_t * ratio, int32_t * words) {
    for (int k = 0; k < TQ_TILE; k += 8) {
        const int16x8_t w = vqrdmulhq_s16(vld1q_s16(weight + k), vld1q_s16(ratio + k));
        vst1q_s32(words + k / 2, vreinterpretq_s32_s8(vcombine_s8(vmovn_s16(w), vrshrn_n_s16(w, 8))));
    }
}

#    endif
#endif

#endif  // TQ_VEC_H
