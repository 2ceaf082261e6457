// The primitives of the attention core for x86; tq_vec.h says what they do.
#ifndef TQ_VEC_X86_H
#define TQ_VEC_X86_H

#ifdef __AVX512F__

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

#else  // AVX2

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

#endif

// ---- int8 arithmetic ----

#ifdef __AVX512VNNI__

// vpdpbusd takes one factor unsigned. A key's bytes are stored with this added, and taken off again. Weights are taken
// a byte at a time.
#    define KEY_BIAS 128

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

#    define WEIGHT_WORDS 0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15  // low bytes, then high ones

#else

// Without VNNI, in 16 bits: of four bytes the even ones, then the odd ones, as sign extension in place leaves them.
#    define KEY_BIAS 0

typedef struct {
    vi even, odd;
} operand;

typedef struct {
    vi sum;
} weighted;

#    if LANES == 16
#        define X86(name) _mm512_##name
#        define X86_INT   __m512i
#    else
#        define X86(name) _mm256_##name
#        define X86_INT   __m256i
#    endif

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

#    define WEIGHT_WORDS 0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15  // keys 0 and 2, 4 and 6; 1 and 3, ...

#endif

#ifdef __AVX512F__

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

#else  // AVX2

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

#endif

#endif  // TQ_VEC_X86_H
