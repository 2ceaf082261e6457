// The primitives of the attention core for Arm; tq_vec.h says what they do.
#ifndef TQ_VEC_NEON_H
#define TQ_VEC_NEON_H

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

// ---- int8 arithmetic ----

#ifdef __ARM_FEATURE_DOTPROD

// sdot takes both factors signed. So a key's bytes need no bias; and of a weight's two bytes the low one is -128..127,
// and the high one rounds to make up for it, where x86's unsigned low byte is cut off. WEIGHT_ONE is the largest weight
// whose high byte stays below 128.
#    define KEY_BIAS 0

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
    out[0] = vreinterpretq_s32_s8(vzip1q_s8(ac_lo, bd_lo));
    out[1] = vreinterpretq_s32_s8(vzip2q_s8(ac_lo, bd_lo));
    out[2] = vreinterpretq_s32_s8(vzip1q_s8(ac_hi, bd_hi));
    out[3] = vreinterpretq_s32_s8(vzip2q_s8(ac_hi, bd_hi));
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

#endif

#endif  // TQ_VEC_NEON_H
