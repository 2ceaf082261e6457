// AVX-512 (F, BW, VL, DQ) kernels. Compiled twice: as avx512bw, and as avx512 with VNNI, where one instruction does
// four of a dot product's int8 products.
//
//   intrinsic                  instruction  does here
//   _mm512_mask_add_epi16      vpaddw       level += step where the value lies past a threshold
//   _mm512_madd_epi16          vpmaddwd     pairs of int16 products, into int32
//   _mm256_dpbusd_epi32        vpdpbusd     quadruples of uint8 x int8 products, into int32 (VNNI)
//   _mm256_maddubs_epi16       vpmaddubsw   pairs of uint8 x int8 products, into int16 (at most 2*127*127: no overflow)
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
INLINE __m512 butterfly(__m512 y, __m512 partner, __mmask16 minus_lanes) {
    return _mm512_mask_sub_ps(_mm512_add_ps(partner, y), minus_lanes, partner, y);
}

INLINE __m512 walsh_hadamard_16(__m512 y) {
    y = butterfly(y, _mm512_permute_ps(y, 0xb1), 0xaaaa);
    y = butterfly(y, _mm512_permute_ps(y, 0x4e), 0xcccc);
    y = butterfly(y, _mm512_shuffle_f32x4(y, y, 0xb1), 0xf0f0);
    return butterfly(y, _mm512_shuffle_f32x4(y, y, 0x4e), 0xff00);
}

INLINE f32x32 walsh_hadamard(f32x32 y) {
    const __m512 scale = _mm512_set1_ps(TQ_WHT_SCALE);
    const __m512 a     = walsh_hadamard_16(y.lo);
    const __m512 b     = walsh_hadamard_16(y.hi);
    return (f32x32){ _mm512_mul_ps(_mm512_add_ps(a, b), scale), _mm512_mul_ps(_mm512_sub_ps(a, b), scale) };
}

INLINE f32x32 load_rotated(const float * x) {
    const f32x32 y = { sanitise(_mm512_loadu_ps(x)), sanitise(_mm512_loadu_ps(x + 16)) };
    return walsh_hadamard(flip_signs(y));
}

INLINE float sum_of_squares(f32x32 y) {
    const __m512 s16 = _mm512_add_ps(_mm512_mul_ps(y.lo, y.lo), _mm512_mul_ps(y.hi, y.hi));
    const __m256 s8  = _mm256_add_ps(_mm512_castps512_ps256(s16), _mm512_extractf32x8_ps(s16, 1));
    const __m128 s4  = _mm_add_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
    const __m128 s2  = _mm_add_ps(s4, _mm_movehl_ps(s4, s4));
    return _mm_cvtss_f32(_mm_add_ss(s2, _mm_movehdup_ps(s2)));
}

INLINE __m512i to_fixed_point(f32x32 y, float inv_rms) {
    const __m512  scale = _mm512_set1_ps(inv_rms);
    const __m256i lo    = _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(_mm512_mul_ps(y.lo, scale)));
    const __m256i hi    = _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(_mm512_mul_ps(y.hi, scale)));
    return _mm512_inserti64x4(_mm512_castsi256_si512(lo), hi, 1);
}

// Eight vectors of 16 partial sums into one vector of eight sums.
INLINE __m256i sum_each_of_8(const __m512i * v_i32x16) {
    __m256i h[8];
    for (int k = 0; k < 8; k++) {
        h[k] = _mm256_add_epi32(_mm512_castsi512_si256(v_i32x16[k]), _mm512_extracti64x4_epi64(v_i32x16[k], 1));
    }
    const __m256i a = _mm256_hadd_epi32(_mm256_hadd_epi32(h[0], h[1]), _mm256_hadd_epi32(h[2], h[3]));
    const __m256i b = _mm256_hadd_epi32(_mm256_hadd_epi32(h[4], h[5]), _mm256_hadd_epi32(h[6], h[7]));
    return _mm256_add_epi32(_mm256_permute2x128_si256(a, b, 0x20), _mm256_permute2x128_si256(a, b, 0x31));
}

INLINE uint16_t search_scale(__m512i magnitude, float rms, const int8_t * levels, const int16_t * thresholds, int n) {
    __m512i dot_i32x16[TQ_N_CANDIDATES], norm_i32x16[TQ_N_CANDIDATES];
    for (int k = 0; k < TQ_N_CANDIDATES; k++) {
        __m512i level = _mm512_set1_epi16(levels[0]);
        for (int j = 0; j < n - 1; j++) {
            const __mmask32 past = _mm512_cmpgt_epi16_mask(magnitude, _mm512_set1_epi16(thresholds[k * (n - 1) + j]));
            const __m512i   step = _mm512_set1_epi16((int16_t) (levels[j + 1] - levels[j]));
            level                = _mm512_mask_add_epi16(level, past, level, step);
        }
        dot_i32x16[k]  = _mm512_madd_epi16(magnitude, level);
        norm_i32x16[k] = _mm512_madd_epi16(level, level);
    }
    return best_scale(sum_each_of_8(dot_i32x16), sum_each_of_8(norm_i32x16), rms);
}

// The codes of a block and its scale; scale 0 means that all of the block's bytes are 0.
INLINE uint16_t encode_block(const float * x, codes_x32 * codes, const int8_t * levels, const int16_t * thresholds,
                             int n) {
    const f32x32 y      = load_rotated(x);
    const float  sum_sq = sum_of_squares(y);
    if (!(sum_sq >= TQ_MIN_SUMSQ)) {
        return 0;
    }
    const float    rms       = sqrtf(sum_sq * (1.0f / TQ_BLOCK));
    const float    inv_rms   = TQ_RMS_ONE / rms;
    const __m512i  value     = to_fixed_point(y, inv_rms);
    const __m512i  magnitude = _mm512_abs_epi16(value);
    const uint16_t d         = search_scale(magnitude, rms, levels, thresholds, n);
    const float    ratio     = tq_fp16_to_float(d) * inv_rms * TQ_LEVEL_STEP;

    __m512i index = _mm512_setzero_si512();
    for (int j = 0; j < n - 1; j++) {
        const float     t    = ratio * (float) (levels[j] + levels[j + 1]) * 0.5f;
        const __m512i   edge = _mm512_set1_epi16((int16_t) _mm_cvtss_si32(_mm_set_ss(fminf(t, 32767.0f))));
        const __mmask32 past = _mm512_cmpgt_epi16_mask(magnitude, edge);
        index                = _mm512_mask_add_epi16(index, past, index, _mm512_set1_epi16(1));
    }
    codes->index_u8x32 = _mm512_cvtepi16_epi8(index);
    codes->negative    = _mm512_movepi16_mask(value);
    return d;
}

INLINE void tq3_pack(tq3_block * b, codes_x32 codes) {
    tq3_pack_indices(b, codes.index_u8x32);
    tq3_pack_signs(b, _mm256_maskz_mov_epi8(codes.negative, tq3_sign_bits()));
}

INLINE codes_x32 tq3_unpack(const tq3_block * b) {
    return (codes_x32){ tq3_unpack_indices(b), _mm256_test_epi8_mask(tq3_unpack_signs(b), tq3_sign_bits()) };
}

INLINE void tq4_pack(tq4_block * b, codes_x32 codes) {
    const __m256i index = codes.index_u8x32;
    tq4_pack_codes(b, _mm256_mask_add_epi8(index, codes.negative, index, _mm256_set1_epi8(8)));
}

INLINE codes_x32 tq4_unpack(const tq4_block * b) {
    const __m256i code = tq4_unpack_codes(b);
    return (codes_x32){ _mm256_and_si256(code, _mm256_set1_epi8(7)), _mm256_movepi8_mask(_mm256_slli_epi16(code, 4)) };
}

INLINE __m256i negate_where(__m256i x_i8x32, __mmask32 negative) {
    return _mm256_mask_sub_epi8(x_i8x32, negative, _mm256_setzero_si256(), x_i8x32);
}

INLINE void store_values(__m256i level_i8x32, uint16_t d, bool unrotate, float * dst) {
    const __m512 scale = _mm512_set1_ps(tq_fp16_to_float(d) * TQ_LEVEL_STEP);
    const __m512 lo    = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(level_i8x32)));
    const __m512 hi    = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(level_i8x32, 1)));
    f32x32       y     = { _mm512_mul_ps(lo, scale), _mm512_mul_ps(hi, scale) };
    if (unrotate) {
        y = flip_signs(walsh_hadamard(y));
    }
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
#define DEFINE_TYPE(tq, TQ, n_levels)                                                                            \
    void FN(tq##_quantize_row)(const float * src, void * dst, int64_t n) {                                       \
        tq##_block * blocks = dst;                                                                               \
        for (int64_t ib = 0; ib < n / TQ_BLOCK; ib++) {                                                          \
            codes_x32      codes = { _mm256_setzero_si256(), 0 };                                                \
            const uint16_t d =                                                                                   \
                encode_block(src + ib * TQ_BLOCK, &codes, TQ##_LEVELS, TQ##_CANDIDATE_THRESHOLDS[0], n_levels);  \
            blocks[ib].d = d;                                                                                    \
            tq##_pack(&blocks[ib], d != 0 ? codes : (codes_x32){ _mm256_setzero_si256(), 0 });                   \
        }                                                                                                        \
    }                                                                                                            \
    INLINE void tq##_decode(const void * src, float * dst, int64_t n, bool unrotate) {                           \
        const tq##_block * blocks = src;                                                                         \
        for (int64_t ib = 0; ib < n / TQ_BLOCK; ib++) {                                                          \
            const codes_x32 codes = tq##_unpack(&blocks[ib]);                                                    \
            store_values(negate_where(tq##_lookup(codes.index_u8x32), codes.negative), blocks[ib].d, unrotate,   \
                         dst + ib * TQ_BLOCK);                                                                   \
        }                                                                                                        \
    }                                                                                                            \
    void FN(tq##_dequantize_row)(const void * src, float * dst, int64_t n) {                                     \
        tq##_decode(src, dst, n, true);                                                                          \
    }                                                                                                            \
    void FN(tq##_decode_rotated_row)(const void * src, float * dst, int64_t n) {                                 \
        tq##_decode(src, dst, n, false);                                                                         \
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

DEFINE_TYPE(tq3, TQ3, 4)
DEFINE_TYPE(tq4, TQ4, 8)

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
