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
//
// and where TQ_INT8 is defined, for int8 arithmetic:
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

#if defined(TQ_ATTN_REF)

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

#elif defined(__aarch64__)
#    include "tq_vec_neon.h"
#else
#    include "tq_vec_x86.h"
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

#endif  // TQ_VEC_H
