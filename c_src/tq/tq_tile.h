// Tile decoders of the attention core: from a cache's blocks to the two forms that tq_attn.c multiplies. A part of
// tq_attn.c, apart for its size.
#ifndef TQ_TILE_H
#define TQ_TILE_H

#include "tq_vec.h"

// Whether a cache is multiplied as it is: for a few rows it does not pay to write f16 down as float and to transpose
// keys. Where the two cost the same was measured.
INLINE bool read_in_place(tq_cache_type type, int n_rows) {
    return type == TQ_CACHE_F16 && n_rows <= 8;
}

typedef struct {
    const tq_attn * attn;
    const char *    keys;
    const char *    values;
    int             n_keys;
} tile;

// Rows of the tile; those past its end repeat the last one, so that decoders work on whole vectors and read no further.
typedef struct {
    const char * row[TQ_TILE];
    size_t       stride;
    int          n_keys;
    int          n;  // rows to decode, a multiple of what the kernels take at once
} tile_rows;

INLINE tile_rows find_rows(const char * base, size_t stride, int n_keys) {
    tile_rows t;
    t.stride = stride;
    t.n_keys = n_keys;
    t.n      = n_keys <= TQ_TILE / 2 ? TQ_TILE / 2 : TQ_TILE;
    for (int k = 0; k < t.n; k++) {
        t.row[k] = base + (size_t) (k < n_keys ? k : n_keys - 1) * stride;
    }
    return t;
}

// Asks for a block of the next tile, while this one's is decoded: a cache that is larger than the processor's own is
// read from memory, in pieces too short for the hardware to foresee. Into the second cache, whose queue is the longer.
INLINE void prefetch_next(const char * row, size_t stride, size_t offset) {
    __builtin_prefetch((const void *) ((uintptr_t) row + TQ_TILE * stride + offset), 0, 2);
}

// ---- float ----

#ifndef TQ_INT8  // which leaves f16

INLINE void scale_levels(const int8_t * level, const char * d, float * dst) {
    uint16_t bits;
    memcpy(&bits, d, sizeof(bits));
    const float scale = tq_fp16_to_float(bits);
    for (int i = 0; i < TQ_BLOCK; i++) {
        dst[i] = (float) level[i] * scale;
    }
}

// In two loops, that compilers find vectors in: nibbles to bytes, bytes to floats.
INLINE void decode_q4_0(const char * src, float * dst) {
    const uint8_t * qs = (const uint8_t *) src + 2;
    int8_t          level[TQ_BLOCK];
    for (int i = 0; i < 16; i++) {
        level[i]      = (int8_t) ((qs[i] & 15) - 8);
        level[i + 16] = (int8_t) ((qs[i] >> 4) - 8);
    }
    scale_levels(level, src, dst);
}

INLINE void decode_iq4_nl(const char * src, float * dst) {
    const uint8_t * qs = (const uint8_t *) src + 2;
    int8_t          level[TQ_BLOCK];
    for (int i = 0; i < 16; i++) {
        level[i]      = TQ_IQ4_NL_LEVELS[qs[i] & 15];
        level[i + 16] = TQ_IQ4_NL_LEVELS[qs[i] >> 4];
    }
    scale_levels(level, src, dst);
}

INLINE void decode_q8_0(const char * src, float * dst) {
    scale_levels((const int8_t *) src + 2, src, dst);
}

#endif

INLINE void decode_f16(const char * src, float * dst) {
    uint16_t x[TQ_BLOCK];
    memcpy(x, src, sizeof(x));
    for (int i = 0; i < TQ_BLOCK; i += LANES) {
        store(dst + i, load_f16(x + i));
    }
}

#define DECODE_BLOCKS(type)                                                                        \
    for (int b = 0; b < n / TQ_BLOCK; b++) {                                                       \
        decode_##type(src + (size_t) b * tq_cache_types[type_id].block_bytes, dst + b * TQ_BLOCK); \
    }                                                                                              \
    break

static void decode_row(tq_cache_type type_id, const char * src, size_t stride, float * dst, int n) {
    for (int b = 0; b < n / TQ_BLOCK; b++) {
        prefetch_next(src, stride, (size_t) b * tq_cache_types[type_id].block_bytes);
    }
    switch (type_id) {
#ifndef TQ_INT8
        case TQ_CACHE_TQ3:
            FN(tq3_decode_rotated_row)(src, dst, n);
            break;
        case TQ_CACHE_TQ4:
            FN(tq4_decode_rotated_row)(src, dst, n);
            break;
        case TQ_CACHE_Q4_0:
            DECODE_BLOCKS(q4_0);
        case TQ_CACHE_IQ4_NL:
            DECODE_BLOCKS(iq4_nl);
        case TQ_CACHE_Q8_0:
            DECODE_BLOCKS(q8_0);
#endif
        default:
            DECODE_BLOCKS(f16);
    }
}

// LANES keys at a time are decoded and transposed to keys[i][key].
static void decode_float_keys(const tq_attn * a, tq_attn_rows * rows, const tile_rows * t) {
    float        key[LANES][TQ_MAX_HEAD];
    const char * row[LANES];
    for (int k = 0; k < t->n; k += LANES) {
        for (int j = 0; j < LANES; j++) {
            decode_row(a->type_k, t->row[k + j], t->stride, key[j], a->head_k);
            row[j] = (const char *) key[j];
        }
        for (int i = 0; i < a->head_k; i += 4) {
            vi x[4];
            for (int j = 0; j < 4; j++) {
                x[j] = gather_pieces(row + j, (size_t) i * sizeof(float));
            }
            transpose_pieces(x);
            for (int j = 0; j < 4; j++) {
                store(rows->keys + (i + j) * TQ_TILE + k, (vf) x[j]);
            }
        }
    }
}

static void decode_float_values(const tq_attn * a, tq_attn_rows * rows, const tile_rows * t) {
    for (int k = 0; k < t->n_keys; k++) {
        decode_row(a->type_v, t->row[k], t->stride, rows->values + k * a->head_v, a->head_v);
    }
}

// ---- int8 ----

#ifdef TQ_INT8

#    define RATIO_ONE  32767.0f  // a value_ratio of 1
#    define WEIGHT_ONE 32639.0f  // 127 * 257: Arm takes both bytes signed, and the high one rounded

INLINE bool is_int8(tq_cache_type type) {
    return type != TQ_CACHE_F16;
}

INLINE void store_narrow(int16_t * p, vf x) {
    *(vh_unaligned *) p = __builtin_convertvector(__builtin_convertvector(x, vi), vh);
}

// The level of each code, plus a bias.
INLINE void make_table(tq_cache_type type, int bias, int8_t * table) {
    for (int i = 0; i < 16; i++) {
        const int level = type == TQ_CACHE_TQ3      ? TQ3_LEVELS[i & 3] * (i & 4 ? -1 : 1)
                          : type == TQ_CACHE_TQ4    ? TQ4_LEVELS[i & 7] * (i & 8 ? -1 : 1)
                          : type == TQ_CACHE_IQ4_NL ? TQ_IQ4_NL_LEVELS[i]
                                                    : i - 8;
        table[i]        = (int8_t) (level + bias);
    }
}

// Codes j of tq3, for elements 4j to 4j+3.
INLINE vi tq3_codes(vi index, vi signs, vi j) {
    return ((index >> (j & 6)) & 0x03030303) | ((signs >> j << 2) & 0x04040404);
}

// The eight words of a block, in LANES keys.
INLINE void key_words(tq_cache_type type, const int8_t * table, const char * const * row, size_t offset, vi * w) {
    vi p[4];
    for (int i = 0; i < 4; i++) {
        p[i] = gather_codes(row + i, offset, type == TQ_CACHE_TQ3 ? 12 : 16);
    }
    transpose_pieces(p);
    if (type == TQ_CACHE_TQ3) {
        for (int j = 0; j < 8; j++) {
            w[j] = lookup(table, tq3_codes(p[j & 1], p[2], splat_i32(j)));
        }
        return;
    }
    if (type != TQ_CACHE_Q8_0) {
        for (int j = 0; j < 4; j++) {
            w[j]     = lookup(table, p[j] & 0x0f0f0f0f);
            w[j + 4] = lookup(table, p[j] >> 4 & 0x0f0f0f0f);
        }
        return;
    }
    for (int i = 0; i < 4; i++) {
        w[i]     = p[i];
        w[i + 4] = gather_codes(row + i, offset + 16, 16);
    }
    transpose_pieces(w + 4);
    for (int j = 0; j < 8; j++) {
        w[j] ^= (int32_t) (KEY_BIAS * 0x01010101u);
    }
}

typedef uint16_t tile_scales[TQ_MAX_HEAD / TQ_BLOCK][TQ_TILE];

static void gather_scales(const tile_rows * t, size_t block_bytes, int n_blocks, tile_scales scales) {
    for (int b = 0; b < n_blocks; b++) {
        const size_t offset = (size_t) b * block_bytes;
#    pragma GCC unroll 8
        for (int k = 0; k < t->n; k++) {
            memcpy(&scales[b][k], t->row[k] + offset, sizeof(scales[b][k]));
        }
    }
}

INLINE void decode_int8_keys(tq_cache_type type, const tq_attn * a, tq_attn_rows * rows, const tile_rows * t) {
    const tq_cache_type_info * info     = &tq_cache_types[type];
    const int                  n_blocks = a->head_k / TQ_BLOCK;
    int8_t                     table[16];
    tile_scales                scales;
    make_table(type, KEY_BIAS, table);
    gather_scales(t, info->block_bytes, n_blocks, scales);
    for (int b = 0; b < n_blocks; b++) {
        const size_t offset = (size_t) b * info->block_bytes;
        for (int k = 0; k < t->n; k += LANES) {
            vi     w[8];
            char * out = (char *) rows->keys + (b * TQ_BLOCK * TQ_TILE + k * 4);
            for (int j = 0; j < LANES; j++) {
                prefetch_next(t->row[k + j], t->stride, offset);
            }
            key_words(type, table, t->row + k, offset + 2, w);
            for (int j = 0; j < 8; j++) {
                store_i32(out + j * TQ_TILE * 4, w[j]);
            }
            store(rows->key_scale + b * TQ_TILE + k, load_f16(scales[b] + k) * info->unit);
        }
    }
}

// A key's largest scale, and each block's share of it.
static void decode_value_scales(const tq_attn * a, tq_attn_rows * rows, const tile_rows * t) {
    const tq_cache_type_info * info     = &tq_cache_types[a->type_v];
    const int                  n_blocks = a->head_v / TQ_BLOCK;
    tile_scales                scales;
    gather_scales(t, info->block_bytes, n_blocks, scales);
    for (int k = 0; k < t->n; k += LANES) {
        vf max = splat(0.0f);
        for (int b = 0; b < n_blocks; b++) {
            max = larger(magnitude(load_f16(scales[b] + k)), max);
        }
        store(rows->value_scale + k, max * info->unit);
        const vf inv = choose(max > 0.0f, RATIO_ONE / max, splat(0.0f));
        for (int b = 0; b < n_blocks; b++) {
            store_narrow(rows->value_ratio + b * TQ_TILE + k, magnitude(load_f16(scales[b] + k)) * inv + 0.5f);
        }
    }
    for (int k = t->n; k < TQ_TILE; k++) {
        rows->value_scale[k] = 0.0f;
    }
}

// 0xff in the byte of each of four keys whose scale is negative. ggml's encoders make such scales; ours do not.
INLINE int32_t negative_keys(const char * const * row, size_t offset) {
    uint32_t mask = 0;
    for (int i = 0; i < 4; i++) {
        mask |= (uint32_t) ((uint8_t) row[i][offset + 1] >> 7) << (8 * i);
    }
    return (int32_t) (mask * 0xff);
}

// The values of a block of four keys: 32 x 4 bytes. Weights must not be negative, so a scale's sign goes to the bytes.
INLINE void value_quads(tq_cache_type type, const int8_t * table, const char * const * row, size_t offset, vi * out) {
    enum { N = 16 / LANES };  // vectors of 16 words
    if (type == TQ_CACHE_Q8_0) {
        interleave_quad(row, offset + 2, 16, out);
        interleave_quad(row, offset + 18, 16, out + N);
        return;
    }
    vi p[N];
    interleave_quad(row, offset + 2, type == TQ_CACHE_TQ3 ? 12 : 16, p);
    if (type == TQ_CACHE_TQ3) {
        vi piece;
        for (int l = 0; l < LANES; l++) {
            piece[l] = l / 4;
        }
        for (int i = 0; i < 2 * N; i++) {
            out[i] = lookup(table, tq3_codes(index_pieces(p, i), sign_pieces(p), piece + PIECES * i));
        }
        return;
    }
    const int32_t flip = type == TQ_CACHE_TQ4 ? 0 : negative_keys(row, offset);
    for (int i = 0; i < N; i++) {
        out[i]     = negate_bytes(lookup(table, p[i] & 0x0f0f0f0f), flip);
        out[i + N] = negate_bytes(lookup(table, p[i] >> 4 & 0x0f0f0f0f), flip);
    }
}

INLINE void decode_int8_values(tq_cache_type type, const tq_attn * a, tq_attn_rows * rows, const tile_rows * t) {
    int8_t table[16];
    make_table(type, 0, table);
    for (int k = 0; k < t->n_keys; k += 4) {
        const char * const row[4] = { t->row[k], t->row[k + 1], t->row[k + 2], t->row[k + 3] };
        for (int b = 0; b < a->head_v / TQ_BLOCK; b++) {
            const size_t offset = (size_t) b * tq_cache_types[type].block_bytes;
            char *       out    = (char *) rows->values + (b * TQ_TILE + k) * TQ_BLOCK;
            vi           quads[TQ_BLOCK / LANES];
            for (int j = 0; j < 4; j++) {
                prefetch_next(row[j], t->stride, offset);
            }
            value_quads(type, table, row, offset, quads);
            for (int i = 0; i < TQ_BLOCK / LANES; i++) {
                store_i32(out + i * LANES * 4, quads[i]);
            }
        }
    }
}

// The type as a constant: each is a loop without branches.
#    define FOR_EACH_INT8_TYPE(type, ROW) \
        switch (type) {                   \
            ROW(TQ_CACHE_TQ3);            \
            ROW(TQ_CACHE_TQ4);            \
            ROW(TQ_CACHE_Q4_0);           \
            ROW(TQ_CACHE_IQ4_NL);         \
            ROW(TQ_CACHE_Q8_0);           \
            default:                      \
                break;                    \
        }

#endif

static void decode_keys(const tile * tile, tq_attn_rows * rows) {
    const tq_attn * a = tile->attn;
    const tile_rows t = find_rows(tile->keys, a->stride_k, tile->n_keys);
#ifdef TQ_INT8
#    define ROW(type)                            \
        case type:                               \
            decode_int8_keys(type, a, rows, &t); \
            return
    FOR_EACH_INT8_TYPE(a->type_k, ROW)
#    undef ROW
#endif
    if (!read_in_place(a->type_k, rows->n)) {
        decode_float_keys(a, rows, &t);
    }
}

static void decode_values(const tile * tile, tq_attn_rows * rows) {
    const tq_attn * a = tile->attn;
    const tile_rows t = find_rows(tile->values, a->stride_v, tile->n_keys);
#ifdef TQ_INT8
    if (is_int8(a->type_v)) {
        decode_value_scales(a, rows, &t);
    }
#    define ROW(type)                              \
        case type:                                 \
            decode_int8_values(type, a, rows, &t); \
            return
    FOR_EACH_INT8_TYPE(a->type_v, ROW)
#    undef ROW
#endif
    if (!read_in_place(a->type_v, rows->n)) {
        decode_float_values(a, rows, &t);
    }
}

#endif  // TQ_TILE_H
