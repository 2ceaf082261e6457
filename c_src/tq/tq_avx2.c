// AVX2 (with FMA and F16C) kernels.
//
//   intrinsic              instruction  does here
//   _mm256_shuffle_epi8    vpshufb      looks 32 bytes up in a table of 16; gives 0 where bit 7 is set
//   _mm256_sad_epu8        vpsadbw      sums of eight bytes
//   _mm256_maddubs_epi16   vpmaddubsw   pairs of uint8 x int8 products, into int16 (at most 2*127*127: no overflow)
//   _mm256_madd_epi16      vpmaddwd     pairs of int16 products, into int32
//   _mm_minpos_epu16       vphminposuw  the least of eight uint16 and where it is
#include "tq_x86.h"

typedef struct {
    __m256 v[4];  // elements 0-7, 8-15, 16-23, 24-31
} f32x32;

typedef struct {
    __m256i v[4];  // as f32x32
} i32x32;

// Magnitude index and sign (0xff: negative; in the encoder bit 7 alone says it) of 32 codes, in element order.
typedef struct {
    __m256i index_u8x32;
    __m256i negative_u8x32;
} codes_x32;

#define BATCH 8  // blocks

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
// The fused multiplication is by +-1, so it rounds nothing.
INLINE __m256 butterfly(__m256 y, __m256 partner, uint32_t minus_lanes) {
    return _mm256_fmadd_ps(y, _mm256_xor_ps(_mm256_set1_ps(1.0f), sign_bits(minus_lanes)), partner);
}

INLINE __m256 walsh_hadamard_8(__m256 y) {
    y = butterfly(y, _mm256_permute_ps(y, 0xb1), 0xaa);
    y = butterfly(y, _mm256_permute_ps(y, 0x4e), 0xcc);
    return butterfly(y, _mm256_permute2f128_ps(y, y, 1), 0xf0);
}

// Not yet divided by sqrt(32).
INLINE f32x32 unscaled_walsh_hadamard(f32x32 y) {
    for (int i = 0; i < 4; i++) {
        y.v[i] = walsh_hadamard_8(y.v[i]);
    }
    const __m256 a = _mm256_add_ps(y.v[0], y.v[1]), b = _mm256_sub_ps(y.v[0], y.v[1]);
    const __m256 c = _mm256_add_ps(y.v[2], y.v[3]), d = _mm256_sub_ps(y.v[2], y.v[3]);
    return (f32x32){ { _mm256_add_ps(a, c), _mm256_add_ps(b, d), _mm256_sub_ps(a, c), _mm256_sub_ps(b, d) } };
}

INLINE f32x32 scale_by(f32x32 y, float factor) {
    for (int i = 0; i < 4; i++) {
        y.v[i] = _mm256_mul_ps(y.v[i], _mm256_set1_ps(factor));
    }
    return y;
}

INLINE f32x32 walsh_hadamard(f32x32 y) {
    return scale_by(unscaled_walsh_hadamard(y), TQ_WHT_SCALE);
}

INLINE f32x32 load_transformed(const float * x, bool sanitised) {
    f32x32 y;
    for (int i = 0; i < 4; i++) {
        y.v[i] = _mm256_loadu_ps(x + 8 * i);
        y.v[i] = sanitised ? sanitise(y.v[i]) : y.v[i];
    }
    return unscaled_walsh_hadamard(flip_signs(y));
}

INLINE f32x32 load_rotated(const float * x) {
    return scale_by(load_transformed(x, true), TQ_WHT_SCALE);
}

INLINE f32x32 abs_f32x32(f32x32 y) {
    for (int i = 0; i < 4; i++) {
        y.v[i] = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), y.v[i]);
    }
    return y;
}

// Of magnitudes. As integers, so that NaN is the largest.
INLINE float largest_of(f32x32 a) {
    const __m256i lo = _mm256_max_epi32(_mm256_castps_si256(a.v[0]), _mm256_castps_si256(a.v[1]));
    const __m256i hi = _mm256_max_epi32(_mm256_castps_si256(a.v[2]), _mm256_castps_si256(a.v[3]));
    const __m256i m  = _mm256_max_epi32(lo, hi);
    const __m128i m4 = _mm_max_epi32(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
    const __m128i m2 = _mm_max_epi32(m4, _mm_shuffle_epi32(m4, 0x4e));
    return _mm_cvtss_f32(_mm_castsi128_ps(_mm_max_epi32(m2, _mm_shuffle_epi32(m2, 0xb1))));
}

// Packing works on 128-bit halves: of each group of 16 bytes, four are from each of the four vectors.
INLINE __m256i in_element_order(__m256i packed_u8x32) {
    return _mm256_permutevar8x32_epi32(packed_u8x32, _mm256_set_epi32(7, 3, 6, 2, 5, 1, 4, 0));
}

INLINE __m256i pack_unsigned(i32x32 t) {
    return _mm256_packus_epi16(_mm256_packus_epi32(t.v[0], t.v[1]), _mm256_packus_epi32(t.v[2], t.v[3]));
}

INLINE __m256i pack_signed(i32x32 t) {
    return _mm256_packs_epi16(_mm256_packs_epi32(t.v[0], t.v[1]), _mm256_packs_epi32(t.v[2], t.v[3]));
}

INLINE i32x32 round_f32x32(f32x32 y) {
    i32x32 t;
    for (int i = 0; i < 4; i++) {
        t.v[i] = _mm256_cvtps_epi32(y.v[i]);
    }
    return t;
}

INLINE i32x32 truncate_f32x32(f32x32 y) {
    i32x32 t;
    for (int i = 0; i < 4; i++) {
        t.v[i] = _mm256_cvttps_epi32(y.v[i]);
    }
    return t;
}

// Bit 7 of each byte is the sign of the float.
INLINE __m256i pack_signs(f32x32 y) {
    i32x32 t;
    for (int i = 0; i < 4; i++) {
        t.v[i] = _mm256_castps_si256(y.v[i]);
    }
    return pack_signed(t);
}

INLINE __m256i look_up(const uint8_t * table16, __m256i index_u8x32) {
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *) table16)), index_u8x32);
}

INLINE __m256i high_halves(__m256i v_u8x32) {
    return _mm256_and_si256(_mm256_srli_epi16(v_u8x32, 4), _mm256_set1_epi8(15));
}

// For uint16 too: no sum here overflows one.
INLINE __m128i add_halves(__m256i a, __m256i b) {
    const __m256i sum = _mm256_add_epi32(a, b);
    return _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
}

// The candidate scale with the least squared error.
INLINE int search_scale(__m256i bucket_u8x32, const tq_encoder * e) {
    const __m256i low     = _mm256_adds_epu8(bucket_u8x32, _mm256_set1_epi8(0x70));  // bit 7 set from 16 on
    const __m256i high    = _mm256_sub_epi8(bucket_u8x32, _mm256_set1_epi8(16));     // bit 7 set below 16
    __m256i       sums[2] = { _mm256_setzero_si256(), _mm256_setzero_si256() };      // four candidates in 64 bits
    for (int k = TQ_N_CANDIDATES - 1; k >= 0; k--) {
        // one of the two is 0, so their distance is the other
        const __m256i sum = _mm256_sad_epu8(look_up(e->errors[k], low), look_up(e->errors[k] + 16, high));
        sums[k / 4]       = _mm256_or_si256(_mm256_slli_epi64(sums[k / 4], 16), sum);
    }
    return first_of_smallest(
        add_halves(_mm256_unpacklo_epi64(sums[0], sums[1]), _mm256_unpackhi_epi64(sums[0], sums[1])));
}

INLINE __m256i dot_i32x8(__m256i a_u8x32, __m256i b_i8x32) {
    return _mm256_madd_epi16(_mm256_maddubs_epi16(a_u8x32, b_i8x32), _mm256_set1_epi16(1));
}

// The level index of each magnitude, and of their levels residual.L and L.L (tq_fit_scale).
INLINE __m256i code_steps(__m256i steps_u8x32, const tq_encoder * e, int32_t dot_norm[2]) {
    const __m256i index = high_halves(_mm256_add_epi8(steps_u8x32, look_up(e->index, high_halves(steps_u8x32))));
    const __m256i level = look_up(e->levels, index);
    const __m256i twice = _mm256_add_epi8(steps_u8x32, steps_u8x32);
    const __m256i dot   = dot_i32x8(level, _mm256_sub_epi8(twice, look_up(e->half_steps, index)));
    const __m256i norm  = dot_i32x8(level, level);
    const __m128i sums  = add_halves(_mm256_unpacklo_epi32(dot, norm), _mm256_unpackhi_epi32(dot, norm));
    _mm_storel_epi64((__m128i *) dot_norm, _mm_add_epi32(sums, _mm_shuffle_epi32(sums, 0x4e)));
    return index;
}

// Every step is done for all blocks of a batch before the next step: the steps of one block are a long chain of
// instructions that wait for each other, the blocks do not.
typedef struct {
    f32x32 magnitude[BATCH];
    float  largest[BATCH], inverse[BATCH];  // inverse = 1 / largest
    int    best[BATCH];
} batch;

INLINE void transform_batch(const float * x, int n, batch * t, codes_x32 * codes) {
    for (int i = 0; i < n; i++) {
        f32x32 y        = load_transformed(x + i * TQ_BLOCK, false);
        t->magnitude[i] = abs_f32x32(y);
        t->largest[i]   = largest_of(t->magnitude[i]);
        if (!(t->largest[i] <= TQ_SAFE_LARGEST)) {
            y               = load_transformed(x + i * TQ_BLOCK, true);
            t->magnitude[i] = abs_f32x32(y);
            t->largest[i]   = largest_of(t->magnitude[i]);
        }
        t->inverse[i]           = 1.0f / t->largest[i];
        codes[i].negative_u8x32 = in_element_order(pack_signs(y));
    }
}

INLINE void search_batch(int n, const tq_encoder * e, batch * t) {
    for (int i = 0; i < n; i++) {
        const f32x32 y = scale_by(t->magnitude[i], (TQ_N_BUCKETS - 1) * t->inverse[i]);
        t->best[i]     = search_scale(pack_unsigned(round_f32x32(y)), e);
    }
}

INLINE void code_batch(int n, const tq_encoder * e, const batch * t, codes_x32 * codes, uint16_t * d) {
    for (int i = 0; i < n; i++) {
        const f32x32  y     = scale_by(t->magnitude[i], e->steps[t->best[i]] * t->inverse[i]);
        const __m256i steps = pack_unsigned(truncate_f32x32(y));
        int32_t       dot_norm[2];
        codes[i].index_u8x32 = in_element_order(code_steps(steps, e, dot_norm));
        d[i]                 = tq_fit_scale(e, t->best[i], t->largest[i], dot_norm[0], dot_norm[1]);
    }
}

// The codes of n blocks and their scales.
INLINE void encode_batch(const float * x, int n, const tq_encoder * e, codes_x32 * codes, uint16_t * d) {
    batch t;
    transform_batch(x, n, &t, codes);
    search_batch(n, e, &t);
    code_batch(n, e, &t, codes, d);
}

INLINE void tq3_pack(tq3_block * b, codes_x32 codes) {
    const __m256i negative = _mm256_cmpgt_epi8(_mm256_setzero_si256(), codes.negative_u8x32);
    __m256i       signs    = _mm256_and_si256(negative, tq3_sign_bits());
    signs                  = _mm256_or_si256(signs, _mm256_permute4x64_epi64(signs, 0x4e));
    signs                  = _mm256_or_si256(signs, _mm256_shuffle_epi32(signs, 0x4e));
    signs                  = _mm256_or_si256(signs, _mm256_shuffle_epi32(signs, 0xb1));
    const int     bytes    = _mm256_cvtsi256_si32(signs);
    const __m256i shifted  = _mm256_sllv_epi64(codes.index_u8x32, _mm256_set_epi64x(6, 4, 2, 0));
    const __m128i half     = _mm_or_si128(_mm256_castsi256_si128(shifted), _mm256_extracti128_si256(shifted, 1));
    _mm_storel_epi64((__m128i *) b->qs, _mm_or_si128(half, _mm_unpackhi_epi64(half, half)));
    memcpy(b->signs, &bytes, sizeof(b->signs));
}

INLINE codes_x32 tq3_unpack(const tq3_block * b) {
    const __m256i bit = tq3_sign_bits();
    return (codes_x32){ tq3_unpack_indices(b), _mm256_cmpeq_epi8(_mm256_and_si256(tq3_unpack_signs(b), bit), bit) };
}

INLINE void tq4_pack(tq4_block * b, codes_x32 codes) {
    const __m256i sign = _mm256_and_si256(_mm256_srli_epi16(codes.negative_u8x32, 4), _mm256_set1_epi8(8));
    const __m256i code = _mm256_or_si256(codes.index_u8x32, sign);
    const __m128i high = _mm_slli_epi16(_mm256_extracti128_si256(code, 1), 4);
    _mm_storeu_si128((__m128i *) b->qs, _mm_or_si128(_mm256_castsi256_si128(code), high));
}

INLINE codes_x32 tq4_unpack(const tq4_block * b) {
    const __m256i code = tq4_unpack_codes(b);
    const __m256i sign = _mm256_and_si256(code, _mm256_set1_epi8(8));
    return (codes_x32){ _mm256_and_si256(code, _mm256_set1_epi8(7)), _mm256_cmpeq_epi8(sign, _mm256_set1_epi8(8)) };
}

INLINE __m256i negate_where(__m256i x_i8x32, __m256i negative_u8x32) {
    return _mm256_sub_epi8(_mm256_xor_si256(x_i8x32, negative_u8x32), negative_u8x32);
}

INLINE void store_values(__m256i level_i8x32, uint16_t d, float * dst) {
    const __m256  scale = _mm256_set1_ps(tq_fp16_to_float(d) * TQ_LEVEL_STEP);
    const __m128i lo = _mm256_castsi256_si128(level_i8x32), hi = _mm256_extracti128_si256(level_i8x32, 1);
    const __m128i part[4] = { lo, _mm_srli_si128(lo, 8), hi, _mm_srli_si128(hi, 8) };
    f32x32        y;
    for (int i = 0; i < 4; i++) {
        y.v[i] = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(part[i])), scale);
    }
    y = flip_signs(walsh_hadamard(y));
    for (int i = 0; i < 4; i++) {
        _mm256_storeu_ps(dst + 8 * i, y.v[i]);
    }
}

INLINE __m256 add_block_dot(__m256 sum, __m256i magnitude, __m256i negative, uint16_t d, const tq_query_block * q) {
    const __m256i query = negate_where(_mm256_loadu_si256((const __m256i *) q->qs), negative);
    const __m256  dot   = _mm256_cvtepi32_ps(dot_i32x8(magnitude, query));
    return _mm256_fmadd_ps(dot, _mm256_set1_ps(tq_fp16_to_float(d) * q->d), sum);
}

// The three rows of a type, from its pack, unpack, magnitudes and tables.
#define DEFINE_TYPE(tq, TQ)                                                                                       \
    void tq##_quantize_row_avx2(const float * src, void * dst, int64_t n) {                                       \
        const int64_t n_blocks = n / TQ_BLOCK;                                                                    \
        for (int64_t ib = 0; ib < n_blocks; ib += BATCH) {                                                        \
            tq##_block * blocks = (tq##_block *) dst + ib;                                                        \
            const int    m      = n_blocks - ib < BATCH ? (int) (n_blocks - ib) : BATCH;                          \
            codes_x32    codes[BATCH];                                                                            \
            uint16_t     d[BATCH];                                                                                \
            encode_batch(src + ib * TQ_BLOCK, m, &TQ##_ENCODER, codes, d);                                        \
            for (int i = 0; i < m; i++) {                                                                         \
                tq##_pack(&blocks[i], codes[i]);                                                                  \
                tq##_set_scale(&blocks[i], d[i]);                                                                 \
            }                                                                                                     \
        }                                                                                                         \
    }                                                                                                             \
    void tq##_dequantize_row_avx2(const void * src, float * dst, int64_t n) {                                     \
        const tq##_block * blocks = src;                                                                          \
        for (int64_t ib = 0; ib < n / TQ_BLOCK; ib++) {                                                           \
            const codes_x32 codes = tq##_unpack(&blocks[ib]);                                                     \
            store_values(negate_where(tq##_lookup(codes.index_u8x32), codes.negative_u8x32), blocks[ib].d,        \
                         dst + ib * TQ_BLOCK);                                                                    \
        }                                                                                                         \
    }                                                                                                             \
    void tq##_vec_dot_avx2(int n, float * s, size_t bs, const void * x, size_t bx, const void * query, size_t by, \
                           int nrc) {                                                                             \
        (void) bs, (void) bx, (void) by, (void) nrc;                                                              \
        const tq##_block *     blocks = x;                                                                        \
        const tq_query_block * q      = query;                                                                    \
        __m256                 sum    = _mm256_setzero_ps();                                                      \
        for (int ib = 0; ib < n / TQ_BLOCK; ib++) {                                                               \
            const codes_x32 codes = tq##_unpack(&blocks[ib]);                                                     \
            sum = add_block_dot(sum, tq##_lookup(codes.index_u8x32), codes.negative_u8x32, blocks[ib].d, &q[ib]); \
        }                                                                                                         \
        *s = sum_f32x8(sum) * TQ_LEVEL_STEP;                                                                      \
    }

DEFINE_TYPE(tq3, TQ3)
DEFINE_TYPE(tq4, TQ4)

void tq_query_row_avx2(const float * src, void * dst, int64_t n) {
    tq_query_block * blocks = dst;
    for (int64_t ib = 0; ib < n / TQ_BLOCK; ib++) {
        const f32x32 y = load_rotated(src + ib * TQ_BLOCK);
        const float  d = largest_of(abs_f32x32(y)) * (1.0f / 127.0f);
        const i32x32 t = round_f32x32(scale_by(y, d >= 1e-30f ? 1.0f / d : 0.0f));
        blocks[ib].d   = d;
        _mm256_storeu_si256((__m256i *) blocks[ib].qs, in_element_order(pack_signed(t)));
    }
}
