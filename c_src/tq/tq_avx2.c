// AVX2 (with FMA and F16C) kernels.
//
//   intrinsic              instruction  does here
//   _mm256_cmpgt_epi16     vpcmpgtw     0xffff where a value lies past a threshold
//   _mm256_madd_epi16      vpmaddwd     pairs of int16 products, into int32
//   _mm256_maddubs_epi16   vpmaddubsw   pairs of uint8 x int8 products, into int16 (at most 2*127*127: no overflow)
//   _mm256_shuffle_epi8    vpshufb      looks 32 codes up in a table of at most 16 levels
#include "tq_x86.h"

typedef struct {
    __m256 v[4];  // elements 0-7, 8-15, 16-23, 24-31
} f32x32;

typedef struct {
    __m256i lo, hi;  // elements 0-15 and 16-31
} i16x32;

// Magnitude index and sign (0xff: negative) of 32 codes, in element order.
typedef struct {
    __m256i index_u8x32;
    __m256i negative_u8x32;
} codes_x32;

INLINE __m256 sanitise(__m256 x) {
    const __m256 limit = _mm256_set1_ps(TQ_MAX_INPUT);
    const __m256 clean = _mm256_and_ps(x, _mm256_cmp_ps(x, x, _CMP_ORD_Q));
    return _mm256_max_ps(_mm256_min_ps(clean, limit), _mm256_sub_ps(_mm256_setzero_ps(), limit));
}

// Bits 0-7 of mask into the sign bits of eight lanes.
INLINE __m256 sign_bits(uint32_t mask) {
    const __m256i shifted =
        _mm256_sllv_epi32(_mm256_set1_epi32((int) mask), _mm256_set_epi32(24, 25, 26, 27, 28, 29, 30, 31));
    return _mm256_and_ps(_mm256_castsi256_ps(shifted), _mm256_set1_ps(-0.0f));
}

INLINE f32x32 flip_signs(f32x32 y) {
    for (int i = 0; i < 4; i++) {
        y.v[i] = _mm256_xor_ps(y.v[i], sign_bits(TQ_SIGN_MASK >> (8 * i)));
    }
    return y;
}

// (a, b) -> (a + b, a - b) between each lane and its partner; minus_lanes are the partners with the higher index.
INLINE __m256 butterfly(__m256 y, __m256 partner, uint32_t minus_lanes) {
    return _mm256_add_ps(partner, _mm256_xor_ps(y, sign_bits(minus_lanes)));
}

INLINE __m256 walsh_hadamard_8(__m256 y) {
    y = butterfly(y, _mm256_permute_ps(y, 0xb1), 0xaa);
    y = butterfly(y, _mm256_permute_ps(y, 0x4e), 0xcc);
    return butterfly(y, _mm256_permute2f128_ps(y, y, 1), 0xf0);
}

INLINE f32x32 walsh_hadamard(f32x32 y) {
    const __m256 scale = _mm256_set1_ps(TQ_WHT_SCALE);
    for (int i = 0; i < 4; i++) {
        y.v[i] = walsh_hadamard_8(y.v[i]);
    }
    const __m256 a = _mm256_add_ps(y.v[0], y.v[1]), b = _mm256_sub_ps(y.v[0], y.v[1]);
    const __m256 c = _mm256_add_ps(y.v[2], y.v[3]), d = _mm256_sub_ps(y.v[2], y.v[3]);
    return (f32x32){ { _mm256_mul_ps(_mm256_add_ps(a, c), scale), _mm256_mul_ps(_mm256_add_ps(b, d), scale),
                       _mm256_mul_ps(_mm256_sub_ps(a, c), scale), _mm256_mul_ps(_mm256_sub_ps(b, d), scale) } };
}

INLINE f32x32 load_rotated(const float * x) {
    f32x32 y;
    for (int i = 0; i < 4; i++) {
        y.v[i] = sanitise(_mm256_loadu_ps(x + 8 * i));
    }
    return walsh_hadamard(flip_signs(y));
}

INLINE float sum_of_squares(f32x32 y) {
    const __m256 a = _mm256_add_ps(_mm256_mul_ps(y.v[0], y.v[0]), _mm256_mul_ps(y.v[2], y.v[2]));
    const __m256 b = _mm256_add_ps(_mm256_mul_ps(y.v[1], y.v[1]), _mm256_mul_ps(y.v[3], y.v[3]));
    return sum_f32x8(_mm256_add_ps(a, b));
}

// Packing works on 128-bit halves; 0xd8 puts the four quarters back into element order.
INLINE __m256i pack_i32_to_i16(__m256i lo, __m256i hi) {
    return _mm256_permute4x64_epi64(_mm256_packs_epi32(lo, hi), 0xd8);
}

INLINE __m256i pack_i16_to_i8(i16x32 v) {
    return _mm256_permute4x64_epi64(_mm256_packs_epi16(v.lo, v.hi), 0xd8);
}

INLINE i16x32 to_fixed_point(f32x32 y, float inv_rms) {
    const __m256 scale = _mm256_set1_ps(inv_rms);
    __m256i      t[4];
    for (int i = 0; i < 4; i++) {
        t[i] = _mm256_cvtps_epi32(_mm256_mul_ps(y.v[i], scale));
    }
    return (i16x32){ pack_i32_to_i16(t[0], t[1]), pack_i32_to_i16(t[2], t[3]) };
}

// Eight vectors of eight partial sums into one vector of eight sums.
INLINE __m256i sum_each_of_8(const __m256i * v) {
    const __m256i a = _mm256_hadd_epi32(_mm256_hadd_epi32(v[0], v[1]), _mm256_hadd_epi32(v[2], v[3]));
    const __m256i b = _mm256_hadd_epi32(_mm256_hadd_epi32(v[4], v[5]), _mm256_hadd_epi32(v[6], v[7]));
    return _mm256_add_epi32(_mm256_permute2x128_si256(a, b, 0x20), _mm256_permute2x128_si256(a, b, 0x31));
}

INLINE __m256i add_where_past(__m256i sum, __m256i magnitude, int16_t threshold, int16_t step) {
    const __m256i past = _mm256_cmpgt_epi16(magnitude, _mm256_set1_epi16(threshold));
    return _mm256_add_epi16(sum, _mm256_and_si256(past, _mm256_set1_epi16(step)));
}

INLINE uint16_t search_scale(i16x32 magnitude, float rms, const int8_t * levels, const int16_t * thresholds, int n) {
    __m256i dot_parts[TQ_N_CANDIDATES], norm_parts[TQ_N_CANDIDATES];
    for (int k = 0; k < TQ_N_CANDIDATES; k++) {
        i16x32 level = { _mm256_set1_epi16(levels[0]), _mm256_set1_epi16(levels[0]) };
        for (int j = 0; j < n - 1; j++) {
            const int16_t threshold = thresholds[k * (n - 1) + j];
            const int16_t step      = (int16_t) (levels[j + 1] - levels[j]);
            level.lo                = add_where_past(level.lo, magnitude.lo, threshold, step);
            level.hi                = add_where_past(level.hi, magnitude.hi, threshold, step);
        }
        dot_parts[k] =
            _mm256_add_epi32(_mm256_madd_epi16(magnitude.lo, level.lo), _mm256_madd_epi16(magnitude.hi, level.hi));
        norm_parts[k] = _mm256_add_epi32(_mm256_madd_epi16(level.lo, level.lo), _mm256_madd_epi16(level.hi, level.hi));
    }
    return best_scale(sum_each_of_8(dot_parts), sum_each_of_8(norm_parts), rms);
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
    const i16x32   value     = to_fixed_point(y, inv_rms);
    const i16x32   magnitude = { _mm256_abs_epi16(value.lo), _mm256_abs_epi16(value.hi) };
    const uint16_t d         = search_scale(magnitude, rms, levels, thresholds, n);
    const float    ratio     = tq_fp16_to_float(d) * inv_rms * TQ_LEVEL_STEP;

    i16x32 index = { _mm256_setzero_si256(), _mm256_setzero_si256() };
    for (int j = 0; j < n - 1; j++) {
        const float   t    = ratio * (float) (levels[j] + levels[j + 1]) * 0.5f;
        const int16_t edge = (int16_t) _mm_cvtss_si32(_mm_set_ss(fminf(t, 32767.0f)));
        index.lo           = add_where_past(index.lo, magnitude.lo, edge, 1);
        index.hi           = add_where_past(index.hi, magnitude.hi, edge, 1);
    }
    codes->index_u8x32 = pack_i16_to_i8(index);
    codes->negative_u8x32 =
        pack_i16_to_i8((i16x32){ _mm256_srai_epi16(value.lo, 15), _mm256_srai_epi16(value.hi, 15) });
    return d;
}

INLINE void tq3_pack(tq3_block * b, codes_x32 codes) {
    tq3_pack_indices(b, codes.index_u8x32);
    tq3_pack_signs(b, _mm256_and_si256(codes.negative_u8x32, tq3_sign_bits()));
}

INLINE codes_x32 tq3_unpack(const tq3_block * b) {
    const __m256i bit = tq3_sign_bits();
    return (codes_x32){ tq3_unpack_indices(b), _mm256_cmpeq_epi8(_mm256_and_si256(tq3_unpack_signs(b), bit), bit) };
}

INLINE void tq4_pack(tq4_block * b, codes_x32 codes) {
    const __m256i sign = _mm256_and_si256(codes.negative_u8x32, _mm256_set1_epi8(8));
    tq4_pack_codes(b, _mm256_or_si256(codes.index_u8x32, sign));
}

INLINE codes_x32 tq4_unpack(const tq4_block * b) {
    const __m256i code = tq4_unpack_codes(b);
    const __m256i sign = _mm256_and_si256(code, _mm256_set1_epi8(8));
    return (codes_x32){ _mm256_and_si256(code, _mm256_set1_epi8(7)), _mm256_cmpeq_epi8(sign, _mm256_set1_epi8(8)) };
}

INLINE __m256i negate_where(__m256i x_i8x32, __m256i negative_u8x32) {
    return _mm256_sub_epi8(_mm256_xor_si256(x_i8x32, negative_u8x32), negative_u8x32);
}

INLINE void store_values(__m256i level_i8x32, uint16_t d, bool unrotate, float * dst) {
    const __m256  scale = _mm256_set1_ps(tq_fp16_to_float(d) * TQ_LEVEL_STEP);
    const __m128i lo = _mm256_castsi256_si128(level_i8x32), hi = _mm256_extracti128_si256(level_i8x32, 1);
    const __m128i part[4] = { lo, _mm_srli_si128(lo, 8), hi, _mm_srli_si128(hi, 8) };
    f32x32        y;
    for (int i = 0; i < 4; i++) {
        y.v[i] = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(part[i])), scale);
    }
    if (unrotate) {
        y = flip_signs(walsh_hadamard(y));
    }
    for (int i = 0; i < 4; i++) {
        _mm256_storeu_ps(dst + 8 * i, y.v[i]);
    }
}

INLINE __m256 add_block_dot(__m256 sum, __m256i magnitude, __m256i negative, uint16_t d, const tq_query_block * q) {
    const __m256i query = negate_where(_mm256_loadu_si256((const __m256i *) q->qs), negative);
    const __m256i dot   = _mm256_madd_epi16(_mm256_maddubs_epi16(magnitude, query), _mm256_set1_epi16(1));
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), _mm256_set1_ps(tq_fp16_to_float(d) * q->d), sum);
}

// The three rows of a type, from its pack, unpack, magnitudes and tables.
#define DEFINE_TYPE(tq, TQ, n_levels)                                                                                \
    void tq##_quantize_row_avx2(const float * src, void * dst, int64_t n) {                                          \
        tq##_block * blocks = dst;                                                                                   \
        for (int64_t ib = 0; ib < n / TQ_BLOCK; ib++) {                                                              \
            const codes_x32 zeros = { _mm256_setzero_si256(), _mm256_setzero_si256() };                              \
            codes_x32       codes = zeros;                                                                           \
            const uint16_t  d =                                                                                      \
                encode_block(src + ib * TQ_BLOCK, &codes, TQ##_LEVELS, TQ##_CANDIDATE_THRESHOLDS[0], n_levels);      \
            blocks[ib].d = d;                                                                                        \
            tq##_pack(&blocks[ib], d != 0 ? codes : zeros);                                                          \
        }                                                                                                            \
    }                                                                                                                \
    INLINE void tq##_decode(const void * src, float * dst, int64_t n, bool unrotate) {                               \
        const tq##_block * blocks = src;                                                                             \
        for (int64_t ib = 0; ib < n / TQ_BLOCK; ib++) {                                                              \
            const codes_x32 codes = tq##_unpack(&blocks[ib]);                                                        \
            store_values(negate_where(tq##_lookup(codes.index_u8x32), codes.negative_u8x32), blocks[ib].d, unrotate, \
                         dst + ib * TQ_BLOCK);                                                                       \
        }                                                                                                            \
    }                                                                                                                \
    void tq##_dequantize_row_avx2(const void * src, float * dst, int64_t n) {                                        \
        tq##_decode(src, dst, n, true);                                                                              \
    }                                                                                                                \
    void tq##_decode_rotated_row_avx2(const void * src, float * dst, int64_t n) {                                    \
        tq##_decode(src, dst, n, false);                                                                             \
    }                                                                                                                \
    void tq##_vec_dot_avx2(int n, float * s, size_t bs, const void * x, size_t bx, const void * query, size_t by,    \
                           int nrc) {                                                                                \
        (void) bs, (void) bx, (void) by, (void) nrc;                                                                 \
        const tq##_block *     blocks = x;                                                                           \
        const tq_query_block * q      = query;                                                                       \
        __m256                 sum    = _mm256_setzero_ps();                                                         \
        for (int ib = 0; ib < n / TQ_BLOCK; ib++) {                                                                  \
            const codes_x32 codes = tq##_unpack(&blocks[ib]);                                                        \
            sum = add_block_dot(sum, tq##_lookup(codes.index_u8x32), codes.negative_u8x32, blocks[ib].d, &q[ib]);    \
        }                                                                                                            \
        *s = sum_f32x8(sum) * TQ_LEVEL_STEP;                                                                         \
    }

DEFINE_TYPE(tq3, TQ3, 4)
DEFINE_TYPE(tq4, TQ4, 8)

INLINE float max_abs_f32x32(f32x32 y) {
    const __m256 clear_sign = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    __m256       m          = _mm256_setzero_ps();
    for (int i = 0; i < 4; i++) {
        m = _mm256_max_ps(m, _mm256_and_ps(y.v[i], clear_sign));
    }
    const __m128 m4 = _mm_max_ps(_mm256_castps256_ps128(m), _mm256_extractf128_ps(m, 1));
    const __m128 m2 = _mm_max_ps(m4, _mm_movehl_ps(m4, m4));
    return _mm_cvtss_f32(_mm_max_ss(m2, _mm_movehdup_ps(m2)));
}

void tq_query_row_avx2(const float * src, void * dst, int64_t n) {
    tq_query_block * blocks = dst;
    for (int64_t ib = 0; ib < n / TQ_BLOCK; ib++) {
        const f32x32 y = load_rotated(src + ib * TQ_BLOCK);
        const float  d = max_abs_f32x32(y) * (1.0f / 127.0f);
        const i16x32 t = to_fixed_point(y, d >= 1e-30f ? 1.0f / d : 0.0f);
        blocks[ib].d   = d;
        _mm256_storeu_si256((__m256i *) blocks[ib].qs, pack_i16_to_i8(t));
    }
}
