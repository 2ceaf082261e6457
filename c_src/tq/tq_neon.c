// NEON kernels. Compiled twice: as neon, and as dotprod (Armv8.2), where one instruction does four of a dot product's
// int8 products.
//
//   intrinsic         instruction   does here
//   vcvtnq_s32_f32    fcvtns        rounds to nearest even, as lrintf does
//   vqtbl1q_*         tbl           looks 16 bytes up in a table of at most 16
//   vqtbl2q_u8        tbl           looks 16 bytes up in a table of 32
//   vpadalq_u8        uadalp        sums of two bytes, added to uint16
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
    uint32x4_t v[8];  // as f32x32
} u32x32;

typedef struct {
    int8x16_t lo, hi;  // elements 0-15 and 16-31
} i8x32;

typedef struct {
    uint8x16_t lo, hi;
} u8x32;

// Elements 0-15 and 16-31, a byte each: magnitude index, and above it (bit 2 of tq3, bit 3 of tq4) the sign. Table
// look-up is by byte, so one table holds the levels of both signs.
typedef struct {
    uint8x16_t lo, hi;
} codes_x32;

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

// Not yet divided by sqrt(32).
INLINE f32x32 unscaled_walsh_hadamard(f32x32 y) {
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
    return y;
}

INLINE f32x32 scale_by(f32x32 y, float factor) {
    for (int i = 0; i < 8; i++) {
        y.v[i] = vmulq_n_f32(y.v[i], factor);
    }
    return y;
}

INLINE f32x32 walsh_hadamard(f32x32 y) {
    return scale_by(unscaled_walsh_hadamard(y), TQ_WHT_SCALE);
}

INLINE f32x32 load_transformed(const float * x, bool sanitised) {
    f32x32 y;
    for (int i = 0; i < 8; i++) {
        y.v[i] = vld1q_f32(x + 4 * i);
        y.v[i] = sanitised ? sanitise(y.v[i]) : y.v[i];
    }
    return unscaled_walsh_hadamard(flip_signs(y));
}

INLINE f32x32 load_rotated(const float * x) {
    return scale_by(load_transformed(x, true), TQ_WHT_SCALE);
}

INLINE f32x32 abs_f32x32(f32x32 y) {
    for (int i = 0; i < 8; i++) {
        y.v[i] = vabsq_f32(y.v[i]);
    }
    return y;
}

// Of magnitudes. As integers, so that NaN is the largest.
INLINE float largest_of(f32x32 a) {
    uint32x4_t m = vreinterpretq_u32_f32(a.v[0]);
    for (int i = 1; i < 8; i++) {
        m = vmaxq_u32(m, vreinterpretq_u32_f32(a.v[i]));
    }
    return tq_bits_float(vmaxvq_u32(m));
}

INLINE u8x32 low_bytes(u32x32 t) {
    uint16x8_t h[4];
    for (int i = 0; i < 4; i++) {
        h[i] = vuzp1q_u16(vreinterpretq_u16_u32(t.v[2 * i]), vreinterpretq_u16_u32(t.v[2 * i + 1]));
    }
    return (u8x32){ vuzp1q_u8(vreinterpretq_u8_u16(h[0]), vreinterpretq_u8_u16(h[1])),
                    vuzp1q_u8(vreinterpretq_u8_u16(h[2]), vreinterpretq_u8_u16(h[3])) };
}

// Bit 7 of each is the sign.
INLINE u8x32 high_bytes(f32x32 y) {
    uint16x8_t h[4];
    for (int i = 0; i < 4; i++) {
        h[i] = vuzp2q_u16(vreinterpretq_u16_f32(y.v[2 * i]), vreinterpretq_u16_f32(y.v[2 * i + 1]));
    }
    return (u8x32){ vuzp2q_u8(vreinterpretq_u8_u16(h[0]), vreinterpretq_u8_u16(h[1])),
                    vuzp2q_u8(vreinterpretq_u8_u16(h[2]), vreinterpretq_u8_u16(h[3])) };
}

INLINE u8x32 rounded_bytes(f32x32 y) {
    u32x32 t;
    for (int i = 0; i < 8; i++) {
        t.v[i] = vreinterpretq_u32_s32(vcvtnq_s32_f32(y.v[i]));
    }
    return low_bytes(t);
}

INLINE u8x32 truncated_bytes(f32x32 y) {
    u32x32 t;
    for (int i = 0; i < 8; i++) {
        t.v[i] = vcvtq_u32_f32(y.v[i]);
    }
    return low_bytes(t);
}

INLINE u8x32 look_up(const uint8_t * table16, u8x32 index) {
    const uint8x16_t table = vld1q_u8(table16);
    return (u8x32){ vqtbl1q_u8(table, index.lo), vqtbl1q_u8(table, index.hi) };
}

INLINE u8x32 add(u8x32 a, u8x32 b) {
    return (u8x32){ vaddq_u8(a.lo, b.lo), vaddq_u8(a.hi, b.hi) };
}

INLINE u8x32 subtract(u8x32 a, u8x32 b) {
    return (u8x32){ vsubq_u8(a.lo, b.lo), vsubq_u8(a.hi, b.hi) };
}

INLINE u8x32 high_halves(u8x32 v) {
    return (u8x32){ vshrq_n_u8(v.lo, 4), vshrq_n_u8(v.hi, 4) };
}

INLINE i8x32 as_signed(u8x32 v) {
    return (i8x32){ vreinterpretq_s8_u8(v.lo), vreinterpretq_s8_u8(v.hi) };
}

// The candidate scale with the least squared error, the first of equals.
INLINE int search_scale(u8x32 bucket, const tq_encoder * e) {
    static const uint16_t NUMBERS[TQ_N_CANDIDATES] = { 0, 1, 2, 3, 4, 5, 6, 7 };

    uint16x8_t sums[TQ_N_CANDIDATES];
    for (int k = 0; k < TQ_N_CANDIDATES; k++) {
        const uint8x16x2_t errors = vld1q_u8_x2(e->errors[k]);
        sums[k] = vpadalq_u8(vpaddlq_u8(vqtbl2q_u8(errors, bucket.lo)), vqtbl2q_u8(errors, bucket.hi));
    }
    for (int count = TQ_N_CANDIDATES / 2; count >= 1; count /= 2) {
        for (int k = 0; k < count; k++) {
            sums[k] = vpaddq_u16(sums[2 * k], sums[2 * k + 1]);
        }
    }
    // a sum is at most 32*255, so a candidate's number fits below it
    return vminvq_u16(vorrq_u16(vshlq_n_u16(sums[0], 3), vld1q_u16(NUMBERS))) % TQ_N_CANDIDATES;
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

// The codes of a block and its scale. sign is a code's bit for it.
INLINE uint16_t encode_block(const float * x, codes_x32 * codes, const tq_encoder * e, uint8_t sign) {
    f32x32 y = load_transformed(x, false), a = abs_f32x32(y);
    float  largest = largest_of(a);
    if (!(largest <= TQ_SAFE_LARGEST)) {
        y       = load_transformed(x, true);
        a       = abs_f32x32(y);
        largest = largest_of(a);
    }
    const float inverse = 1.0f / largest;
    const int   k       = search_scale(rounded_bytes(scale_by(a, (TQ_N_BUCKETS - 1) * inverse)), e);

    const u8x32     steps    = truncated_bytes(scale_by(a, e->steps[k] * inverse));
    const u8x32     index    = high_halves(add(steps, look_up(e->index, high_halves(steps))));
    const u8x32     level    = look_up(e->levels, index);
    const u8x32     residual = subtract(add(steps, steps), look_up(e->half_steps, index));
    const int32x4_t dot      = dot_i8x32(as_signed(level), as_signed(residual));
    const int32x4_t norm     = dot_i8x32(as_signed(level), as_signed(level));

    const i8x32      negative = as_signed(high_bytes(y));
    const uint8x16_t bit      = vdupq_n_u8(sign);
    codes->lo                 = vorrq_u8(index.lo, vandq_u8(vcltzq_s8(negative.lo), bit));
    codes->hi                 = vorrq_u8(index.hi, vandq_u8(vcltzq_s8(negative.hi), bit));
    return tq_fit_scale(e, k, largest, vaddvq_s32(dot), vaddvq_s32(norm));
}

// Bit j in the four bytes that hold elements 4j to 4j + 3: of elements 0-15, and of 16-31.
INLINE uint8x16_t sign_bits_lo(void) {
    return vreinterpretq_u8_u64(vcombine_u64(vdup_n_u64(0x0202020201010101), vdup_n_u64(0x0808080804040404)));
}

INLINE uint8x16_t sign_bits_hi(void) {
    return vshlq_n_u8(sign_bits_lo(), 4);
}

INLINE void tq3_pack(tq3_block * b, codes_x32 codes) {
    const uint8x16_t sign  = vdupq_n_u8(4);
    const uint8x16_t lo    = vandq_u8(vtstq_u8(codes.lo, sign), sign_bits_lo());
    const uint8x16_t hi    = vandq_u8(vtstq_u8(codes.hi, sign), sign_bits_hi());
    // no two of the words that are added share a bit
    const uint32_t   signs = vaddvq_u32(vreinterpretq_u32_u8(vorrq_u8(lo, hi)));
    memcpy(b->signs, &signs, sizeof(b->signs));
    // each insertion overwrites the sign bit of the one before; the last one's is shifted out
    uint8x8_t planes = vsli_n_u8(vget_low_u8(codes.lo), vget_high_u8(codes.lo), 2);
    planes           = vsli_n_u8(planes, vget_low_u8(codes.hi), 4);
    vst1_u8(b->qs, vsli_n_u8(planes, vget_high_u8(codes.hi), 6));
}

INLINE codes_x32 tq3_unpack(const tq3_block * b) {
    uint32_t signs;
    memcpy(&signs, b->signs, sizeof(signs));
    const uint8x16_t planes = vcombine_u8(vld1_u8(b->qs), vld1_u8(b->qs));
    const uint8x16_t lo     = vshlq_u8(planes, vcombine_s8(vdup_n_s8(0), vdup_n_s8(-2)));
    const uint8x16_t hi     = vshlq_u8(planes, vcombine_s8(vdup_n_s8(-4), vdup_n_s8(-6)));
    const uint8x16_t bytes  = vreinterpretq_u8_u32(vdupq_n_u32(signs));
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

INLINE float32x4_t add_block_dot(float32x4_t sum, i8x32 level, uint16_t d, const tq_query_block * q) {
    const i8x32 query = { vld1q_s8(q->qs), vld1q_s8(q->qs + 16) };
    return vfmaq_n_f32(sum, vcvtq_f32_s32(dot_i8x32(level, query)), tq_fp16_to_float(d) * q->d);
}

// The three rows of a type, from its pack, unpack and tables.
#define DEFINE_TYPE(tq, TQ, n_levels)                                                                            \
    void FN(tq##_quantize_row)(const float * src, void * dst, int64_t n) {                                       \
        tq##_block * blocks = dst;                                                                               \
        for (int64_t ib = 0; ib < n / TQ_BLOCK; ib++) {                                                          \
            codes_x32      codes;                                                                                \
            const uint16_t d = encode_block(src + ib * TQ_BLOCK, &codes, &TQ##_ENCODER, n_levels);               \
            tq##_pack(&blocks[ib], codes);                                                                       \
            tq##_set_scale(&blocks[ib], d);                                                                      \
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

void FN(tq_query_row)(const float * src, void * dst, int64_t n) {
    tq_query_block * blocks = dst;
    for (int64_t ib = 0; ib < n / TQ_BLOCK; ib++) {
        const f32x32 y = load_rotated(src + ib * TQ_BLOCK);
        const float  d = largest_of(abs_f32x32(y)) * (1.0f / 127.0f);
        const u8x32  t = rounded_bytes(scale_by(y, d >= 1e-30f ? 1.0f / d : 0.0f));
        blocks[ib].d   = d;
        vst1q_u8((uint8_t *) blocks[ib].qs, t.lo);
        vst1q_u8((uint8_t *) blocks[ib].qs + 16, t.hi);
    }
}
