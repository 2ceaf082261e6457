// AVX-512 (F, BW, VL, DQ) kernels. Compiled twice: as avx512bw, and as avx512 with VNNI, where one instruction does
// four of a dot product's int8 products.
//
//   intrinsic                  instruction  does here
//   _mm512_shuffle_epi8        vpshufb      looks 64 bytes up in a table of 16; gives 0 where bit 7 is set
//   _mm512_sad_epu8            vpsadbw      sums of eight bytes
//   _mm512_dpbusd_epi32        vpdpbusd     quadruples of uint8 x int8 products, into int32 (VNNI)
//   _mm512_maddubs_epi16       vpmaddubsw   pairs of uint8 x int8 products, into int16 (at most 2*127*127: no overflow)
//   _mm_minpos_epu16           vphminposuw  the least of eight uint16 and where it is
#include "tq_x86.h"

#ifdef __AVX512VNNI__
#    define FN(name) name##_avx512
#else
#    define FN(name) name##_avx512bw
#endif

typedef struct {
    __m512 lo, hi;  // elements 0-15 and 16-31
} f32x32;

// Magnitude index and sign of 32 codes, in element order.
typedef struct {
    __m256i   index_u8x32;
    __mmask32 negative;
} codes_x32;

// A byte for each element of two blocks, a and b, as packing leaves them: each group of 16 holds four elements of
// a.lo, a.hi, b.lo and b.hi.
typedef __m512i bytes_x64;

typedef struct {
    bytes_x64 index, sign;  // sign: bit 7 of each byte
} codes_x64;

#define BATCH 8  // blocks

INLINE int second_of_two(int i, int n) {
    return i + 1 < n ? i + 1 : i;
}

INLINE __m512 sanitise(__m512 x) {
    const __m512 limit = _mm512_set1_ps(TQ_MAX_INPUT);
    const __m512 clean = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, x, _CMP_ORD_Q), x);
    return _mm512_max_ps(_mm512_min_ps(clean, limit), _mm512_sub_ps(_mm512_setzero_ps(), limit));
}

INLINE f32x32 flip_signs(f32x32 y) {
    const __m512 minus = _mm512_set1_ps(-0.0f);
    y.lo               = _mm512_mask_xor_ps(y.lo, (__mmask16) (TQ_SIGN_MASK & 0xffff), y.lo, minus);
    y.hi               = _mm512_mask_xor_ps(y.hi, (__mmask16) (TQ_SIGN_MASK >> 16), y.hi, minus);
    return y;
}

// (a, b) -> (a + b, a - b) between each lane and its partner; minus_lanes are the partners with the higher index.
// The fused multiplication is by +-1, so it rounds nothing.
INLINE __m512 butterfly(__m512 y, __m512 partner, __mmask16 minus_lanes) {
    const __m512 one = _mm512_set1_ps(1.0f), minus_one = _mm512_set1_ps(-1.0f);
    return _mm512_fmadd_ps(y, _mm512_mask_mov_ps(one, minus_lanes, minus_one), partner);
}

INLINE __m512 walsh_hadamard_16(__m512 y) {
    y = butterfly(y, _mm512_permute_ps(y, 0xb1), 0xaaaa);
    y = butterfly(y, _mm512_permute_ps(y, 0x4e), 0xcccc);
    y = butterfly(y, _mm512_shuffle_f32x4(y, y, 0xb1), 0xf0f0);
    return butterfly(y, _mm512_shuffle_f32x4(y, y, 0x4e), 0xff00);
}

// Not yet divided by sqrt(32).
INLINE f32x32 unscaled_walsh_hadamard(f32x32 y) {
    const __m512 a = walsh_hadamard_16(y.lo);
    const __m512 b = walsh_hadamard_16(y.hi);
    return (f32x32){ _mm512_add_ps(a, b), _mm512_sub_ps(a, b) };
}

INLINE f32x32 scale_by(f32x32 y, float factor) {
    const __m512 f = _mm512_set1_ps(factor);
    return (f32x32){ _mm512_mul_ps(y.lo, f), _mm512_mul_ps(y.hi, f) };
}

INLINE f32x32 walsh_hadamard(f32x32 y) {
    return scale_by(unscaled_walsh_hadamard(y), TQ_WHT_SCALE);
}

INLINE f32x32 load_transformed(const float * x, bool sanitised) {
    f32x32 y = { _mm512_loadu_ps(x), _mm512_loadu_ps(x + 16) };
    if (sanitised) {
        y = (f32x32){ sanitise(y.lo), sanitise(y.hi) };
    }
    return unscaled_walsh_hadamard(flip_signs(y));
}

INLINE f32x32 load_rotated(const float * x) {
    return scale_by(load_transformed(x, true), TQ_WHT_SCALE);
}

INLINE f32x32 abs_f32x32(f32x32 y) {
    return (f32x32){ _mm512_abs_ps(y.lo), _mm512_abs_ps(y.hi) };
}

// Of magnitudes: a's in the lower half, b's in the upper. As integers, so that NaN is the largest.
INLINE __m512 largest_of_each(f32x32 a, f32x32 b) {
    const __m512i a16 = _mm512_max_epi32(_mm512_castps_si512(a.lo), _mm512_castps_si512(a.hi));
    const __m512i b16 = _mm512_max_epi32(_mm512_castps_si512(b.lo), _mm512_castps_si512(b.hi));
    __m512i       m   = _mm512_max_epi32(_mm512_shuffle_i64x2(a16, b16, 0x44), _mm512_shuffle_i64x2(a16, b16, 0xee));
    m                 = _mm512_max_epi32(m, _mm512_shuffle_i64x2(m, m, 0xb1));
    m                 = _mm512_max_epi32(m, _mm512_shuffle_epi32(m, 0x4e));
    return _mm512_castsi512_ps(_mm512_max_epi32(m, _mm512_shuffle_epi32(m, 0xb1)));
}

INLINE bool any_above(__m512 x, float limit) {
    return _mm512_cmp_ps_mask(x, _mm512_set1_ps(limit), _CMP_NLE_UQ) != 0;
}

INLINE bytes_x64 pack_unsigned(__m512i a_lo, __m512i a_hi, __m512i b_lo, __m512i b_hi) {
    return _mm512_packus_epi16(_mm512_packus_epi32(a_lo, a_hi), _mm512_packus_epi32(b_lo, b_hi));
}

// Bit 7 of each byte is the sign of the float.
INLINE bytes_x64 pack_signs(f32x32 a, f32x32 b) {
    const __m512i a16 = _mm512_packs_epi32(_mm512_castps_si512(a.lo), _mm512_castps_si512(a.hi));
    const __m512i b16 = _mm512_packs_epi32(_mm512_castps_si512(b.lo), _mm512_castps_si512(b.hi));
    return _mm512_packs_epi16(a16, b16);
}

INLINE bytes_x64 rounded_bytes(f32x32 a, f32x32 b) {
    return pack_unsigned(_mm512_cvtps_epi32(a.lo), _mm512_cvtps_epi32(a.hi), _mm512_cvtps_epi32(b.lo),
                         _mm512_cvtps_epi32(b.hi));
}

INLINE bytes_x64 truncated_bytes(f32x32 a, f32x32 b) {
    return pack_unsigned(_mm512_cvttps_epi32(a.lo), _mm512_cvttps_epi32(a.hi), _mm512_cvttps_epi32(b.lo),
                         _mm512_cvttps_epi32(b.hi));
}

INLINE __m512i look_up(const uint8_t * table16, __m512i index_u8x64) {
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *) table16)), index_u8x64);
}

INLINE __m512i high_halves(__m512i v_u8x64) {
    return _mm512_and_si512(_mm512_srli_epi16(v_u8x64, 4), _mm512_set1_epi8(15));
}

// Of four 16-byte parts: a's sum in the lowest part, b's in the third. For uint16 too: no sum here overflows one.
INLINE __m512i add_parts(__m512i a, __m512i b) {
    const __m512i sum = _mm512_add_epi32(_mm512_shuffle_i64x2(a, b, 0x44), _mm512_shuffle_i64x2(a, b, 0xee));
    return _mm512_add_epi32(sum, _mm512_shuffle_i64x2(sum, sum, 0xb1));
}

// Of each block, the candidate scale with the least squared error.
INLINE void search_scales(bytes_x64 bucket, const tq_encoder * e, int best[2]) {
    const __m512i low     = _mm512_adds_epu8(bucket, _mm512_set1_epi8(0x70));    // bit 7 set from 16 on
    const __m512i high    = _mm512_sub_epi8(bucket, _mm512_set1_epi8(16));       // bit 7 set below 16
    __m512i       sums[2] = { _mm512_setzero_si512(), _mm512_setzero_si512() };  // four candidates in 64 bits
    for (int k = TQ_N_CANDIDATES - 1; k >= 0; k--) {
        // one of the two is 0, so their distance is the other
        const __m512i sum = _mm512_sad_epu8(look_up(e->errors[k], low), look_up(e->errors[k] + 16, high));
        sums[k / 4]       = _mm512_or_si512(_mm512_slli_epi64(sums[k / 4], 16), sum);
    }
    const __m512i a = _mm512_unpacklo_epi64(sums[0], sums[1]), b = _mm512_unpackhi_epi64(sums[0], sums[1]);
    const __m512i all = add_parts(a, b);
    best[0]           = first_of_smallest(_mm512_castsi512_si128(all));
    best[1]           = first_of_smallest(_mm512_extracti32x4_epi32(all, 2));
}

INLINE __m512i dot_i32x16(__m512i a_u8x64, __m512i b_i8x64) {
#ifdef __AVX512VNNI__
    return _mm512_dpbusd_epi32(_mm512_setzero_si512(), a_u8x64, b_i8x64);
#else
    return _mm512_madd_epi16(_mm512_maddubs_epi16(a_u8x64, b_i8x64), _mm512_set1_epi16(1));
#endif
}

// Of each block, the level index of each of its magnitudes, and of their levels residual.L and L.L (tq_fit_scale).
INLINE bytes_x64 code_steps(bytes_x64 steps, const tq_encoder * e, int32_t dot_norm[2][2]) {
    const __m512i index    = high_halves(_mm512_add_epi8(steps, look_up(e->index, high_halves(steps))));
    const __m512i level    = look_up(e->levels, index);
    const __m512i residual = _mm512_sub_epi8(_mm512_add_epi8(steps, steps), look_up(e->half_steps, index));
    const __m512i dot = dot_i32x16(level, residual), norm = dot_i32x16(level, level);
    const __m512i sums = add_parts(_mm512_unpacklo_epi32(dot, norm), _mm512_unpackhi_epi32(dot, norm));
    const __m512i sum  = _mm512_add_epi32(sums, _mm512_shuffle_epi32(sums, 0x4e));
    _mm_storel_epi64((__m128i *) dot_norm[0], _mm512_castsi512_si128(sum));
    _mm_storel_epi64((__m128i *) dot_norm[1], _mm512_extracti32x4_epi32(sum, 2));
    return index;
}

// Every step is done for all blocks of a batch before the next step: the steps of one block are a long chain of
// instructions that wait for each other, the blocks do not. After an odd number of blocks the last one comes twice.
typedef struct {
    f32x32 magnitude[BATCH];
    float  largest[BATCH], inverse[BATCH];  // inverse = 1 / largest
    int    best[BATCH];
} batch;

INLINE __m512 transform_two(const float * xa, const float * xb, bool sanitised, f32x32 * magnitude, bytes_x64 * sign) {
    const f32x32 a = load_transformed(xa, sanitised), b = load_transformed(xb, sanitised);
    *sign        = pack_signs(a, b);
    magnitude[0] = abs_f32x32(a);
    magnitude[1] = abs_f32x32(b);
    return largest_of_each(magnitude[0], magnitude[1]);
}

INLINE void transform_batch(const float * x, int n, batch * t, codes_x64 * codes) {
    for (int i = 0; i < n; i += 2) {
        const float *xa = x + i * TQ_BLOCK, *xb = x + second_of_two(i, n) * TQ_BLOCK;
        __m512       largest = transform_two(xa, xb, false, &t->magnitude[i], &codes[i / 2].sign);
        if (any_above(largest, TQ_SAFE_LARGEST)) {
            largest = transform_two(xa, xb, true, &t->magnitude[i], &codes[i / 2].sign);
        }
        t->largest[i]     = _mm512_cvtss_f32(largest);
        t->largest[i + 1] = _mm256_cvtss_f32(_mm512_extractf32x8_ps(largest, 1));
        t->inverse[i]     = 1.0f / t->largest[i];
        t->inverse[i + 1] = 1.0f / t->largest[i + 1];
    }
}

INLINE void search_batch(int n, const tq_encoder * e, batch * t) {
    for (int i = 0; i < n; i += 2) {
        const f32x32 a = scale_by(t->magnitude[i], (TQ_N_BUCKETS - 1) * t->inverse[i]);
        const f32x32 b = scale_by(t->magnitude[i + 1], (TQ_N_BUCKETS - 1) * t->inverse[i + 1]);
        search_scales(rounded_bytes(a, b), e, &t->best[i]);
    }
}

INLINE void code_batch(int n, const tq_encoder * e, const batch * t, codes_x64 * codes, uint16_t * d) {
    for (int i = 0; i < n; i += 2) {
        const f32x32 a = scale_by(t->magnitude[i], e->steps[t->best[i]] * t->inverse[i]);
        const f32x32 b = scale_by(t->magnitude[i + 1], e->steps[t->best[i + 1]] * t->inverse[i + 1]);
        int32_t      dot_norm[2][2];
        codes[i / 2].index = code_steps(truncated_bytes(a, b), e, dot_norm);
        for (int j = 0; j < 2; j++) {
            d[i + j] = tq_fit_scale(e, t->best[i + j], t->largest[i + j], dot_norm[j][0], dot_norm[j][1]);
        }
    }
}

// The codes of n blocks, two in an element, and their scales.
INLINE void encode_batch(const float * x, int n, const tq_encoder * e, codes_x64 * codes, uint16_t * d) {
    batch t;
    transform_batch(x, n, &t, codes);
    search_batch(n, e, &t);
    code_batch(n, e, &t, codes, d);
}

INLINE void tq3_pack(tq3_block * a, tq3_block * b, codes_x64 codes) {
    const __m512i order    = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    const __m512i negative = _mm512_permutexvar_epi32(order, codes.sign);
    const __m512i index    = _mm512_permutexvar_epi32(order, codes.index);
    __m512i       planes   = _mm512_sllv_epi64(index, _mm512_set_epi64(6, 4, 2, 0, 6, 4, 2, 0));
    planes                 = _mm512_or_si512(planes, _mm512_permutex_epi64(planes, 0x4e));
    planes                 = _mm512_or_si512(planes, _mm512_permutex_epi64(planes, 0xb1));
    const __m512i bits     = _mm512_broadcast_i64x4(tq3_sign_bits());
    __m512i       signs    = _mm512_maskz_mov_epi8(_mm512_movepi8_mask(negative), bits);
    signs                  = _mm512_or_si512(signs, _mm512_permutex_epi64(signs, 0x4e));
    signs                  = _mm512_or_si512(signs, _mm512_permutex_epi64(signs, 0xb1));
    signs                  = _mm512_or_si512(signs, _mm512_srli_epi64(signs, 32));
    const int signs_a      = _mm_cvtsi128_si32(_mm512_castsi512_si128(signs));
    const int signs_b      = _mm_cvtsi128_si32(_mm512_extracti32x4_epi32(signs, 2));
    _mm_storel_epi64((__m128i *) a->qs, _mm512_castsi512_si128(planes));
    _mm_storel_epi64((__m128i *) b->qs, _mm512_extracti32x4_epi32(planes, 2));
    memcpy(a->signs, &signs_a, sizeof(signs_a));
    memcpy(b->signs, &signs_b, sizeof(signs_b));
}

INLINE codes_x32 tq3_unpack(const tq3_block * b) {
    return (codes_x32){ tq3_unpack_indices(b), _mm256_test_epi8_mask(tq3_unpack_signs(b), tq3_sign_bits()) };
}

INLINE void tq4_pack(tq4_block * a, tq4_block * b, codes_x64 codes) {
    const __m512i   order    = _mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 14, 10, 6, 2, 12, 8, 4, 0);
    const __mmask64 negative = _mm512_movepi8_mask(codes.sign);
    const __m512i   code     = _mm512_mask_add_epi8(codes.index, negative, codes.index, _mm512_set1_epi8(8));
    // a.hi and b.hi, four bytes further, into the high nibbles of a.lo and b.lo
    const __m512i   pairs    = _mm512_or_si512(code, _mm512_srli_epi64(code, 28));
    const __m512i   packed   = _mm512_permutexvar_epi32(order, pairs);
    _mm_storeu_si128((__m128i *) a->qs, _mm512_castsi512_si128(packed));
    _mm_storeu_si128((__m128i *) b->qs, _mm512_extracti32x4_epi32(packed, 1));
}

INLINE codes_x32 tq4_unpack(const tq4_block * b) {
    const __m256i code = tq4_unpack_codes(b);
    return (codes_x32){ _mm256_and_si256(code, _mm256_set1_epi8(7)), _mm256_movepi8_mask(_mm256_slli_epi16(code, 4)) };
}

INLINE __m256i negate_where(__m256i x_i8x32, __mmask32 negative) {
    return _mm256_mask_sub_epi8(x_i8x32, negative, _mm256_setzero_si256(), x_i8x32);
}

INLINE void store_values(__m256i level_i8x32, uint16_t d, float * dst) {
    const __m512 scale = _mm512_set1_ps(tq_fp16_to_float(d) * TQ_LEVEL_STEP);
    const __m512 lo    = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(level_i8x32)));
    const __m512 hi    = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(level_i8x32, 1)));
    f32x32       y     = { _mm512_mul_ps(lo, scale), _mm512_mul_ps(hi, scale) };
    y                  = flip_signs(walsh_hadamard(y));
    _mm512_storeu_ps(dst, y.lo);
    _mm512_storeu_ps(dst + 16, y.hi);
}

INLINE __m256i dot_i32x8(__m256i magnitude_u8x32, __m256i query_i8x32) {
#ifdef __AVX512VNNI__
    return _mm256_dpbusd_epi32(_mm256_setzero_si256(), magnitude_u8x32, query_i8x32);
#else
    return _mm256_madd_epi16(_mm256_maddubs_epi16(magnitude_u8x32, query_i8x32), _mm256_set1_epi16(1));
#endif
}

INLINE __m256 add_block_dot(__m256 sum, __m256i magnitude, __mmask32 negative, uint16_t d, const tq_query_block * q) {
    const __m256i query = negate_where(_mm256_loadu_si256((const __m256i *) q->qs), negative);
    const __m256  scale = _mm256_set1_ps(tq_fp16_to_float(d) * q->d);
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot_i32x8(magnitude, query)), scale, sum);
}

// The three rows of a type, from its pack, unpack, magnitudes and tables.
#define DEFINE_TYPE(tq, TQ)                                                                                      \
    void FN(tq##_quantize_row)(const float * src, void * dst, int64_t n) {                                       \
        const int64_t n_blocks = n / TQ_BLOCK;                                                                   \
        for (int64_t ib = 0; ib < n_blocks; ib += BATCH) {                                                       \
            tq##_block * blocks = (tq##_block *) dst + ib;                                                       \
            const int    m      = n_blocks - ib < BATCH ? (int) (n_blocks - ib) : BATCH;                         \
            codes_x64    codes[BATCH / 2];                                                                       \
            uint16_t     d[BATCH];                                                                               \
            encode_batch(src + ib * TQ_BLOCK, m, &TQ##_ENCODER, codes, d);                                       \
            for (int i = 0; i < m; i += 2) {                                                                     \
                tq##_pack(&blocks[i], &blocks[second_of_two(i, m)], codes[i / 2]);                               \
            }                                                                                                    \
            for (int i = 0; i < m; i++) {                                                                        \
                tq##_set_scale(&blocks[i], d[i]);                                                                \
            }                                                                                                    \
        }                                                                                                        \
    }                                                                                                            \
    void FN(tq##_dequantize_row)(const void * src, float * dst, int64_t n) {                                     \
        const tq##_block * blocks = src;                                                                         \
        for (int64_t ib = 0; ib < n / TQ_BLOCK; ib++) {                                                          \
            const codes_x32 codes = tq##_unpack(&blocks[ib]);                                                    \
            store_values(negate_where(tq##_lookup(codes.index_u8x32), codes.negative), blocks[ib].d,             \
                         dst + ib * TQ_BLOCK);                                                                   \
        }                                                                                                        \
    }                                                                                                            \
    void FN(tq##_vec_dot)(int n, float * s, size_t bs, const void * x, size_t bx, const void * query, size_t by, \
                          int nrc) {                                                                             \
        (void) bs, (void) bx, (void) by, (void) nrc;                                                             \
        const tq##_block *     blocks = x;                                                                       \
        const tq_query_block * q      = query;                                                                   \
        __m256                 sum    = _mm256_setzero_ps();                                                     \
        for (int ib = 0; ib < n / TQ_BLOCK; ib++) {                                                              \
            const codes_x32 codes = tq##_unpack(&blocks[ib]);                                                    \
            sum = add_block_dot(sum, tq##_lookup(codes.index_u8x32), codes.negative, blocks[ib].d, &q[ib]);      \
        }                                                                                                        \
        *s = sum_f32x8(sum) * TQ_LEVEL_STEP;                                                                     \
    }

DEFINE_TYPE(tq3, TQ3)
DEFINE_TYPE(tq4, TQ4)

void FN(tq_query_row)(const float * src, void * dst, int64_t n) {
    tq_query_block * blocks = dst;
    for (int64_t ib = 0; ib < n / TQ_BLOCK; ib++) {
        const f32x32  y       = load_rotated(src + ib * TQ_BLOCK);
        const float   max_abs = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(y.lo), _mm512_abs_ps(y.hi)));
        const float   d       = max_abs * (1.0f / 127.0f);
        const __m512  id      = _mm512_set1_ps(d >= 1e-30f ? 1.0f / d : 0.0f);
        const __m512i lo      = _mm512_cvtps_epi32(_mm512_mul_ps(y.lo, id));
        const __m512i hi      = _mm512_cvtps_epi32(_mm512_mul_ps(y.hi, id));
        blocks[ib].d          = d;
        _mm_storeu_si128((__m128i *) blocks[ib].qs, _mm512_cvtepi32_epi8(lo));
        _mm_storeu_si128((__m128i *) (blocks[ib].qs + 16), _mm512_cvtepi32_epi8(hi));
    }
}
