// NEON kernels. Compiled twice: as neon, and as dotprod (Armv8.2), where one instruction does four of a dot product's
// int8 products.
//
//   intrinsic         instruction   does here
//   vbslq_*           bsl/bit/bif   chooses bits of one of two vectors by a third
//   vcvtnq_s32_f32    fcvtns        rounds to nearest even, as lrintf does
//   vmlal_s16         smlal         int16 products, added to int32
//   vqtbl1q_*         tbl           looks 16 codes up in a table of at most 16 levels
//   vsliq_n_u8        sli           shifts one vector left and puts it above the low bits of another
//   vdotq_s32         sdot          quadruples of int8 products, added to int32 (dotprod)
//   vmlal_s8          smlal         int8 products, added to int16 (at most 2*127*128: no overflow)
#include "tq_impl.h"

#include <arm_neon.h>

#ifdef __ARM_FEATURE_DOTPROD
#    define FN(name) name##_dotprod
#else
#    define FN(name) name##_neon
#endif
#define INLINE static inline __attribute__((always_inline))

typedef struct {
    float32x4_t v[8];  // elements 0-3, 4-7, ... 28-31
} f32x32;

typedef struct {
    int16x8_t v[4];  // elements 0-7, 8-15, 16-23, 24-31
} i16x32;

typedef struct {
    int8x16_t lo, hi;  // elements 0-15 and 16-31
} i8x32;

// Elements 0-15 and 16-31, a byte each: magnitude index, and above it (bit 2 of tq3, bit 3 of tq4) the sign. Table
// look-up is by byte, so one table holds the levels of both signs.
typedef struct {
    uint8x16_t lo, hi;
} codes_x32;

INLINE codes_x32 zero_codes(void) {
    return (codes_x32){ vdupq_n_u8(0), vdupq_n_u8(0) };
}

// fmin and fmax of NEON return a NaN that they are given, so NaN goes first.
INLINE float32x4_t sanitise(float32x4_t x) {
    const uint32x4_t  is_number = vceqq_f32(x, x);
    const float32x4_t clean     = vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(x), is_number));
    return vmaxq_f32(vdupq_n_f32(-TQ_MAX_INPUT), vminq_f32(clean, vdupq_n_f32(TQ_MAX_INPUT)));
}

INLINE f32x32 flip_signs(f32x32 y) {
    for (int i = 0; i < 8; i++) {
        uint32_t sign_bits[4];
        for (int lane = 0; lane < 4; lane++) {
            sign_bits[lane] = (TQ_SIGN_MASK >> (4 * i + lane)) << 31;
        }
        y.v[i] = vreinterpretq_f32_u32(veorq_u32(vreinterpretq_u32_f32(y.v[i]), vld1q_u32(sign_bits)));
    }
    return y;
}

INLINE void butterfly(float32x4_t * a, float32x4_t * b) {
    const float32x4_t sum = vaddq_f32(*a, *b), difference = vsubq_f32(*a, *b);
    *a = sum;
    *b = difference;
}

// Transforms of four, of a's lanes and of b's. Each stage gathers the partners into two vectors.
INLINE void walsh_hadamard_2x4(float32x4_t * a, float32x4_t * b) {
    float32x4_t even = vuzp1q_f32(*a, *b), odd = vuzp2q_f32(*a, *b);  // a0 a2 b0 b2, a1 a3 b1 b3
    butterfly(&even, &odd);
    float32x4_t low = vtrn1q_f32(even, odd), high = vtrn2q_f32(even, odd);  // a0 a1 b0 b1, a2 a3 b2 b3
    butterfly(&low, &high);
    *a = vcombine_f32(vget_low_f32(low), vget_low_f32(high));
    *b = vcombine_f32(vget_high_f32(low), vget_high_f32(high));
}

INLINE f32x32 walsh_hadamard(f32x32 y) {
    for (int i = 0; i < 8; i += 2) {
        walsh_hadamard_2x4(&y.v[i], &y.v[i + 1]);
    }
    for (int h = 1; h < 8; h *= 2) {
        for (int i = 0; i < 8; i++) {
            if ((i & h) == 0) {
                butterfly(&y.v[i], &y.v[i + h]);
            }
        }
    }
    for (int i = 0; i < 8; i++) {
        y.v[i] = vmulq_n_f32(y.v[i], TQ_WHT_SCALE);
    }
    return y;
}

INLINE f32x32 load_rotated(const float * x) {
    f32x32 y;
    for (int i = 0; i < 8; i++) {
        y.v[i] = sanitise(vld1q_f32(x + 4 * i));
    }
    return walsh_hadamard(flip_signs(y));
}

INLINE float sum_of_squares(f32x32 y) {
    float32x4_t s[4];
    for (int i = 0; i < 4; i++) {
        s[i] = vaddq_f32(vmulq_f32(y.v[i], y.v[i]), vmulq_f32(y.v[i + 4], y.v[i + 4]));
    }
    const float32x4_t s4 = vaddq_f32(vaddq_f32(s[0], s[2]), vaddq_f32(s[1], s[3]));
    return vpadds_f32(vadd_f32(vget_low_f32(s4), vget_high_f32(s4)));
}

INLINE i16x32 to_fixed_point(f32x32 y, float inv_rms) {
    i16x32 t;
    for (int i = 0; i < 4; i++) {
        const int32x4_t lo = vcvtnq_s32_f32(vmulq_n_f32(y.v[2 * i], inv_rms));
        const int32x4_t hi = vcvtnq_s32_f32(vmulq_n_f32(y.v[2 * i + 1], inv_rms));
        t.v[i]             = vmovn_high_s32(vmovn_s32(lo), hi);
    }
    return t;
}

// What cells[] holds for each magnitude's cell. Thresholds ascend, so the last one that a magnitude exceeds decides.
INLINE i16x32 look_up_cells(i16x32 magnitude, const int16_t * thresholds, const int8_t * cells, int n) {
    i16x32 out;
    for (int i = 0; i < 4; i++) {
        out.v[i] = vdupq_n_s16(cells[0]);
        for (int j = 0; j < n - 1; j++) {
            const uint16x8_t past = vcgtq_s16(magnitude.v[i], vdupq_n_s16(thresholds[j]));
            out.v[i]              = vbslq_s16(past, vdupq_n_s16(cells[j + 1]), out.v[i]);
        }
    }
    return out;
}

INLINE int32x4_t dot_i16x32(i16x32 a, i16x32 b) {
    int32x4_t sum = vdupq_n_s32(0);
    for (int i = 0; i < 4; i++) {
        sum = vmlal_s16(sum, vget_low_s16(a.v[i]), vget_low_s16(b.v[i]));
        sum = vmlal_high_s16(sum, a.v[i], b.v[i]);
    }
    return sum;
}

// Of levels: at most 4*127*127 a lane, which uint16 holds.
INLINE int32x4_t norm_i16x32(i16x32 level) {
    uint16x8_t sum = vdupq_n_u16(0);
    for (int i = 0; i < 4; i++) {
        const uint16x8_t l = vreinterpretq_u16_s16(level.v[i]);
        sum                = vmlaq_u16(sum, l, l);
    }
    return vreinterpretq_s32_u32(vpaddlq_u16(sum));
}

INLINE int32x4_t sum_each_of_4(const int32x4_t * v) {
    return vpaddq_s32(vpaddq_s32(v[0], v[1]), vpaddq_s32(v[2], v[3]));
}

INLINE float32x4_t score_f32x4(int32x4_t dot, int32x4_t norm) {
    const float32x4_t d = vcvtq_f32_s32(dot);
    return vdivq_f32(vmulq_f32(d, d), vcvtq_f32_s32(norm));
}

INLINE int first_of_largest(float32x4_t lo, float32x4_t hi) {
    const float32x4_t largest = vdupq_n_f32(vmaxvq_f32(vmaxq_f32(lo, hi)));
    const uint16x4_t  is_lo = vmovn_u32(vceqq_f32(lo, largest)), is_hi = vmovn_u32(vceqq_f32(hi, largest));
    const uint8x8_t   is = vmovn_u16(vcombine_u16(is_lo, is_hi));
    return __builtin_ctzll(vget_lane_u64(vreinterpret_u64_u8(is), 0)) / 8;
}

INLINE uint16_t search_scale(i16x32 magnitude, float rms, const int8_t * levels, const int16_t * thresholds, int n) {
    int32x4_t dot_parts[TQ_N_CANDIDATES], norm_parts[TQ_N_CANDIDATES];
    for (int k = 0; k < TQ_N_CANDIDATES; k++) {
        const i16x32 level = look_up_cells(magnitude, thresholds + k * (n - 1), levels, n);
        dot_parts[k]       = dot_i16x32(magnitude, level);
        norm_parts[k]      = norm_i16x32(level);
    }
    int32_t         dot[TQ_N_CANDIDATES], norm[TQ_N_CANDIDATES];
    const int32x4_t dot_lo = sum_each_of_4(dot_parts), dot_hi = sum_each_of_4(dot_parts + 4);
    const int32x4_t norm_lo = sum_each_of_4(norm_parts), norm_hi = sum_each_of_4(norm_parts + 4);
    vst1q_s32(dot, dot_lo);
    vst1q_s32(dot + 4, dot_hi);
    vst1q_s32(norm, norm_lo);
    vst1q_s32(norm + 4, norm_hi);
    const int best = first_of_largest(score_f32x4(dot_lo, norm_lo), score_f32x4(dot_hi, norm_hi));
    return tq_refit_scale(dot[best], norm[best], rms);
}

// n is the number of levels, and as a code's bit the sign: it lies above the index.
INLINE codes_x32 to_codes(i16x32 index, i16x32 value, int n) {
    uint8x8_t code[4];
    for (int i = 0; i < 4; i++) {
        const uint16x8_t negative = vcltzq_s16(value.v[i]);
        const uint16x8_t sign     = vandq_u16(negative, vdupq_n_u16((uint16_t) n));
        code[i]                   = vmovn_u16(vorrq_u16(vreinterpretq_u16_s16(index.v[i]), sign));
    }
    return (codes_x32){ vcombine_u8(code[0], code[1]), vcombine_u8(code[2], code[3]) };
}

// The codes of a block and its scale; scale 0 means that all of the block's bytes are 0.
INLINE uint16_t encode_block(const float * x, codes_x32 * codes, const int8_t * levels, const int16_t * thresholds,
                             int n) {
    static const int8_t INDICES[8] = { 0, 1, 2, 3, 4, 5, 6, 7 };

    const f32x32 y      = load_rotated(x);
    const float  sum_sq = sum_of_squares(y);
    if (!(sum_sq >= TQ_MIN_SUMSQ)) {
        return 0;
    }
    const float  rms     = sqrtf(sum_sq * (1.0f / TQ_BLOCK));
    const float  inv_rms = TQ_RMS_ONE / rms;
    const i16x32 value   = to_fixed_point(y, inv_rms);
    i16x32       magnitude;
    for (int i = 0; i < 4; i++) {
        magnitude.v[i] = vabsq_s16(value.v[i]);
    }
    const uint16_t d     = search_scale(magnitude, rms, levels, thresholds, n);
    const float    ratio = tq_fp16_to_float(d) * inv_rms * TQ_LEVEL_STEP;

    int16_t edges[7];
    for (int j = 0; j < n - 1; j++) {
        const float t = ratio * (float) (levels[j] + levels[j + 1]) * 0.5f;
        edges[j]      = (int16_t) vcvtns_s32_f32(fminf(t, 32767.0f));
    }
    *codes = to_codes(look_up_cells(magnitude, edges, INDICES, n), value, n);
    return d;
}

// Bit j in the four bytes that hold elements 4j to 4j + 3: of elements 0-15, and of 16-31.
INLINE uint8x16_t sign_bits_lo(void) {
    return vreinterpretq_u8_u64(vcombine_u64(vdup_n_u64(0x0202020201010101), vdup_n_u64(0x0808080804040404)));
}

INLINE uint8x16_t sign_bits_hi(void) {
    return vshlq_n_u8(sign_bits_lo(), 4);
}

INLINE void tq3_pack(tq3_block * b, codes_x32 codes) {
    const uint8x16_t sign = vdupq_n_u8(4);
    const uint8x16_t lo   = vandq_u8(vtstq_u8(codes.lo, sign), sign_bits_lo());
    const uint8x16_t hi   = vandq_u8(vtstq_u8(codes.hi, sign), sign_bits_hi());
    // no two of the words that are added share a bit
    const uint32_t signs = vaddvq_u32(vreinterpretq_u32_u8(vorrq_u8(lo, hi)));
    memcpy(b->signs, &signs, sizeof(b->signs));
    // each insertion overwrites the sign bit of the one before; the last one's is shifted out
    uint8x8_t planes = vsli_n_u8(vget_low_u8(codes.lo), vget_high_u8(codes.lo), 2);
    planes           = vsli_n_u8(planes, vget_low_u8(codes.hi), 4);
    vst1_u8(b->qs, vsli_n_u8(planes, vget_high_u8(codes.hi), 6));
}

INLINE codes_x32 tq3_unpack(const tq3_block * b) {
    uint32_t signs;
    memcpy(&signs, b->signs, sizeof(signs));
    const uint8x16_t planes   = vcombine_u8(vld1_u8(b->qs), vld1_u8(b->qs));
    const uint8x16_t lo       = vshlq_u8(planes, vcombine_s8(vdup_n_s8(0), vdup_n_s8(-2)));
    const uint8x16_t hi       = vshlq_u8(planes, vcombine_s8(vdup_n_s8(-4), vdup_n_s8(-6)));
    const uint8x16_t bytes    = vreinterpretq_u8_u32(vdupq_n_u32(signs));
    const uint8x16_t sign = vdupq_n_u8(4), index = vdupq_n_u8(3);
    return (codes_x32){ vbslq_u8(sign, vtstq_u8(bytes, sign_bits_lo()), vandq_u8(lo, index)),
                        vbslq_u8(sign, vtstq_u8(bytes, sign_bits_hi()), vandq_u8(hi, index)) };
}

INLINE void tq4_pack(tq4_block * b, codes_x32 codes) {
    vst1q_u8(b->qs, vsliq_n_u8(codes.lo, codes.hi, 4));
}

INLINE codes_x32 tq4_unpack(const tq4_block * b) {
    const uint8x16_t packed = vld1q_u8(b->qs);
    return (codes_x32){ vandq_u8(packed, vdupq_n_u8(15)), vshrq_n_u8(packed, 4) };
}

INLINE i8x32 signed_levels(codes_x32 codes, const int8_t * levels, int n) {
    int8_t table[16] = { 0 };
    for (int j = 0; j < n; j++) {
        table[j]     = levels[j];
        table[j + n] = (int8_t) -levels[j];
    }
    const int8x16_t table_i8x16 = vld1q_s8(table);
    return (i8x32){ vqtbl1q_s8(table_i8x16, codes.lo), vqtbl1q_s8(table_i8x16, codes.hi) };
}

INLINE void store_values(i8x32 level, uint16_t d, bool unrotate, float * dst) {
    const float     scale   = tq_fp16_to_float(d) * TQ_LEVEL_STEP;
    const int16x8_t part[4] = { vmovl_s8(vget_low_s8(level.lo)), vmovl_high_s8(level.lo),
                                vmovl_s8(vget_low_s8(level.hi)), vmovl_high_s8(level.hi) };
    f32x32          y;
    for (int i = 0; i < 4; i++) {
        y.v[2 * i]     = vmulq_n_f32(vcvtq_f32_s32(vmovl_s16(vget_low_s16(part[i]))), scale);
        y.v[2 * i + 1] = vmulq_n_f32(vcvtq_f32_s32(vmovl_high_s16(part[i])), scale);
    }
    if (unrotate) {
        y = flip_signs(walsh_hadamard(y));
    }
    for (int i = 0; i < 8; i++) {
        vst1q_f32(dst + 4 * i, y.v[i]);
    }
}

INLINE int32x4_t dot_i8x32(i8x32 a, i8x32 b) {
#ifdef __ARM_FEATURE_DOTPROD
    return vdotq_s32(vdotq_s32(vdupq_n_s32(0), a.lo, b.lo), a.hi, b.hi);
#else
    int16x8_t low  = vmull_s8(vget_low_s8(a.lo), vget_low_s8(b.lo));
    int16x8_t high = vmull_high_s8(a.lo, b.lo);
    low            = vmlal_s8(low, vget_low_s8(a.hi), vget_low_s8(b.hi));
    high           = vmlal_high_s8(high, a.hi, b.hi);
    return vpadalq_s16(vpaddlq_s16(low), high);
#endif
}

INLINE float32x4_t add_block_dot(float32x4_t sum, i8x32 level, uint16_t d, const tq_query_block * q) {
    const i8x32 query = { vld1q_s8(q->qs), vld1q_s8(q->qs + 16) };
    return vfmaq_n_f32(sum, vcvtq_f32_s32(dot_i8x32(level, query)), tq_fp16_to_float(d) * q->d);
}

// The three rows of a type, from its pack, unpack and tables.
#define DEFINE_TYPE(tq, TQ, n_levels)                                                                            \
    void FN(tq##_quantize_row)(const float * src, void * dst, int64_t n) {                                       \
        tq##_block * blocks = dst;                                                                               \
        for (int64_t ib = 0; ib < n / TQ_BLOCK; ib++) {                                                          \
            codes_x32      codes = zero_codes();                                                                 \
            const uint16_t d =                                                                                   \
                encode_block(src + ib * TQ_BLOCK, &codes, TQ##_LEVELS, TQ##_CANDIDATE_THRESHOLDS[0], n_levels);  \
            blocks[ib].d = d;                                                                                    \
            tq##_pack(&blocks[ib], d != 0 ? codes : zero_codes());                                               \
        }                                                                                                        \
    }                                                                                                            \
    INLINE void tq##_decode(const void * src, float * dst, int64_t n, bool unrotate) {                           \
        const tq##_block * blocks = src;                                                                         \
        for (int64_t ib = 0; ib < n / TQ_BLOCK; ib++) {                                                          \
            const i8x32 level = signed_levels(tq##_unpack(&blocks[ib]), TQ##_LEVELS, n_levels);                  \
            store_values(level, blocks[ib].d, unrotate, dst + ib * TQ_BLOCK);                                    \
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
        float32x4_t            sum    = vdupq_n_f32(0);                                                          \
        for (int ib = 0; ib < n / TQ_BLOCK; ib++) {                                                              \
            const i8x32 level = signed_levels(tq##_unpack(&blocks[ib]), TQ##_LEVELS, n_levels);                  \
            sum               = add_block_dot(sum, level, blocks[ib].d, &q[ib]);                                 \
        }                                                                                                        \
        *s = vaddvq_f32(sum) * TQ_LEVEL_STEP;                                                                    \
    }

DEFINE_TYPE(tq3, TQ3, 4)
DEFINE_TYPE(tq4, TQ4, 8)

INLINE float max_abs_f32x32(f32x32 y) {
    float32x4_t m = vdupq_n_f32(0);
    for (int i = 0; i < 8; i++) {
        m = vmaxq_f32(m, vabsq_f32(y.v[i]));
    }
    return vmaxvq_f32(m);
}

void FN(tq_query_row)(const float * src, void * dst, int64_t n) {
    tq_query_block * blocks = dst;
    for (int64_t ib = 0; ib < n / TQ_BLOCK; ib++) {
        const f32x32 y = load_rotated(src + ib * TQ_BLOCK);
        const float  d = max_abs_f32x32(y) * (1.0f / 127.0f);
        const i16x32 t = to_fixed_point(y, d >= 1e-30f ? 1.0f / d : 0.0f);
        blocks[ib].d   = d;
        vst1q_s8(blocks[ib].qs, vmovn_high_s16(vmovn_s16(t.v[0]), t.v[1]));
        vst1q_s8(blocks[ib].qs + 16, vmovn_high_s16(vmovn_s16(t.v[2]), t.v[3]));
    }
}
