// What the AVX2 and the AVX-512 kernels share: 256-bit helpers, compiled into each with its own flags.
#ifndef TQ_X86_H
#define TQ_X86_H

#include "tq_impl.h"

#include <immintrin.h>

#define INLINE static inline __attribute__((always_inline))

INLINE float sum_f32x8(__m256 v) {
    const __m128 s4 = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 s2 = _mm_add_ps(s4, _mm_movehl_ps(s4, s4));
    return _mm_cvtss_f32(_mm_add_ss(s2, _mm_movehdup_ps(s2)));
}

// The smallest of eight uint16, the first of equals.
INLINE int first_of_smallest(__m128i v_u16x8) {
    return _mm_extract_epi16(_mm_minpos_epu16(v_u16x8), 1);
}

// _mm_loadu_si32 came late to gcc
INLINE __m128i four_bytes(const void * p) {
    int32_t x;
    memcpy(&x, p, sizeof(x));
    return _mm_cvtsi32_si128(x);
}

// Magnitudes of 32 codes by their index.
INLINE __m256i tq3_lookup(__m256i index_u8x32) {
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(four_bytes(TQ3_LEVELS)), index_u8x32);
}

INLINE __m256i tq4_lookup(__m256i index_u8x32) {
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadl_epi64((const __m128i *) TQ4_LEVELS)), index_u8x32);
}

INLINE __m256i tq3_unpack_indices(const tq3_block * b) {
    int64_t planes;
    memcpy(&planes, b->qs, sizeof(planes));
    const __m256i shifted = _mm256_srlv_epi64(_mm256_set1_epi64x(planes), _mm256_set_epi64x(6, 4, 2, 0));
    return _mm256_and_si256(shifted, _mm256_set1_epi8(3));
}

// Bit j in the four bytes that hold elements 4j to 4j + 3.
INLINE __m256i tq3_sign_bits(void) {
    return _mm256_set_epi32((int) 0x80808080, 0x40404040, 0x20202020, 0x10101010, 0x08080808, 0x04040404, 0x02020202,
                            0x01010101);
}

// The four sign bytes, for each four elements.
INLINE __m256i tq3_unpack_signs(const tq3_block * b) {
    return _mm256_broadcastd_epi32(four_bytes(b->signs));
}

// A code in the low nibble of each byte; the high nibbles hold what was beside it.
INLINE __m256i tq4_unpack_codes(const tq4_block * b) {
    const __m128i packed = _mm_loadu_si128((const __m128i *) b->qs);
    return _mm256_set_m128i(_mm_srli_epi16(packed, 4), packed);
}

#endif  // TQ_X86_H
