// The attention core, compiled once for each SIMD level. Written on the compiler's vectors, so that one text serves all
// levels; tq_vec.h has the few primitives that do not fit into that.
//
// Keys and values of a tile are each decoded in one of two forms, by type and level (is_int8).
//
// float: keys[i][key] and values[key][i], multiplied in float32. For few rows, f16 is read from the cache itself.
//
// int8: Keys as words of four bytes, keys[block][word][key], with key_scale[block][key]; multiplied by the query's
// int8. Values as quads of four keys, values[block][quad][i][key], with value_scale[key] and value_ratio[block][key],
// the block's share of it in 1/2^15; multiplied by weights of 15 bits. What is lost lies below 1e-8 of the whole row's
// energy, because weights are scaled for each row and tile.
//
// Rows are attended STEP at a time, from logits to values, while the tile is in the first cache.
#include "tq_attn.h"

#include "tq_tile.h"

#define STEP         4  // rows per pass; STEP * WIDTH accumulators and as many partners fit the registers
#define WIDTH        2  // vectors per pass
#define FOR_ROWS(r)  for (int r = 0; r < n_rows; r++)
#define FOR_WIDTH(v) for (int v = 0; v < WIDTH; v++)

// Vectors of floats per pass: Arm has 32 registers, and its vectors are short.
#ifdef __aarch64__
#    define FLOAT_WIDTH 4
#else
#    define FLOAT_WIDTH WIDTH
#endif
#define FOR_FLOAT_WIDTH(v) for (int v = 0; v < FLOAT_WIDTH; v++)

// Rows of floats, or of the cache's fp16.
typedef struct {
    const char * base;
    size_t       stride;
    bool         is_f16;
} float_rows;

INLINE vf load_from(float_rows b, int row, int i) {
    const char * p = b.base + (size_t) row * b.stride;
    if (b.is_f16 && i % TQ_BLOCK == 0) {  // a cache line
        prefetch_next(p, b.stride, (size_t) i * sizeof(uint16_t));
    }
    return b.is_f16 ? load_f16((const uint16_t *) (const void *) p + i) : load((const float *) (const void *) p + i);
}

// c[r][j] += a[r][k] * b[k][j] for FLOAT_WIDTH vectors of columns, from j on.
INLINE void multiply_add(int n_rows, const float * a, int lda, float_rows b, int j, int n_k, float * c, int ldc) {
    vf sum[STEP][FLOAT_WIDTH];
    FOR_ROWS(r) {
        FOR_FLOAT_WIDTH(v) {
            sum[r][v] = load(c + r * ldc + j + v * LANES);
        }
    }
    for (int k = 0; k < n_k; k++) {
        vf bv[FLOAT_WIDTH];
        FOR_FLOAT_WIDTH(v) {
            bv[v] = load_from(b, k, j + v * LANES);
        }
        FOR_ROWS(r) {
            FOR_FLOAT_WIDTH(v) {
                sum[r][v] += a[r * lda + k] * bv[v];
            }
        }
    }
    FOR_ROWS(r) {
        FOR_FLOAT_WIDTH(v) {
            store(c + r * ldc + j + v * LANES, sum[r][v]);
        }
    }
}

// ---- logits: query . key ----

INLINE void float_logits(const tq_attn * a, const tq_attn_rows * rows, int first, int n_rows, int n_keys,
                         float (*x)[TQ_TILE]) {
    const float_rows keys = { (const char *) rows->keys, TQ_TILE * sizeof(float), false };
    memset(x, 0, (size_t) n_rows * sizeof(*x));
    for (int k = 0; k < n_keys; k += FLOAT_WIDTH * LANES) {
        multiply_add(n_rows, rows->query + first * a->head_k, a->head_k, keys, k, a->head_k, x[0], TQ_TILE);
    }
}

// Of fp16 keys in the cache: lanes are the head's values.
INLINE void f16_logits(const tq_attn * a, const tq_attn_rows * rows, int first, int n_rows, int n_keys,
                       const char * base, float (*x)[TQ_TILE]) {
    const float_rows keys  = { base, a->stride_k, true };
    const float *    query = rows->query + first * a->head_k;
    for (int k = 0; k < n_keys; k++) {
        vf sum[STEP] = { 0 };
        for (int i = 0; i < a->head_k; i += LANES) {
            const vf key = load_from(keys, k, i);
            FOR_ROWS(r) {
                sum[r] += load(query + r * a->head_k + i) * key;
            }
        }
        FOR_ROWS(r) {
            x[r][k] = sum_lanes(sum[r]);
        }
    }
}

#ifdef TQ_INT8
// WIDTH vectors of keys with one block of the queries, added to sum.
INLINE void add_block_logits(const tq_attn * a, const tq_attn_rows * rows, int first, int n_rows, int block, int key,
                             vf (*sum)[WIDTH]) {
    const int    n_blocks = a->head_k / TQ_BLOCK;
    const char * keys     = (const char *) rows->keys + (block * TQ_BLOCK * TQ_TILE + key * 4);
    vi           dot[STEP][WIDTH];
    FOR_ROWS(r) {
        FOR_WIDTH(v) {
            dot[r][v] = splat_i32(-KEY_BIAS * rows->query_sum[(first + r) * n_blocks + block]);
        }
    }
    for (int w = 0; w < TQ_BLOCK / 4; w++) {
        operand k[WIDTH];
        FOR_WIDTH(v) {
            k[v] = load_operand(keys + (w * TQ_TILE + v * LANES) * 4);
        }
        FOR_ROWS(r) {
            const int at = (first + r) * n_blocks + block;
            FOR_WIDTH(v) {
                dot[r][v] = dot_key(dot[r][v], k[v], rows->query_i8[at].qs + w * 4, rows->query_i16[at] + w * 4);
            }
        }
    }
    FOR_ROWS(r) {
        FOR_WIDTH(v) {
            const vf scale = load(rows->key_scale + block * TQ_TILE + key + v * LANES);
            sum[r][v] += to_float(dot[r][v]) * (scale * rows->query_i8[(first + r) * n_blocks + block].d);
        }
    }
}

INLINE void int8_logits(const tq_attn * a, const tq_attn_rows * rows, int first, int n_rows, int n_keys,
                        float (*x)[TQ_TILE]) {
    for (int k = 0; k < n_keys; k += WIDTH * LANES) {
        vf sum[STEP][WIDTH] = { 0 };
        for (int b = 0; b < a->head_k / TQ_BLOCK; b++) {
            add_block_logits(a, rows, first, n_rows, b, k, sum);
        }
        FOR_ROWS(r) {
            FOR_WIDTH(v) {
                store(x[r] + k + v * LANES, sum[r][v]);
            }
        }
    }
}
#endif

// ---- logits: query . mean of the keys' positions ----

#define START (-1)  // the window of position 0, which has a mean of its own

// Keys of a tile at positions that follow each other in one window: in most caches the whole tile. Where cells are in
// another order, each key is one.
typedef struct {
    int first, end;  // keys
    int window;
    int offset;  // of the first position in the window
    int left;    // positions of the window that follow it
} stretch;

typedef struct {
    int     n;
    stretch at[TQ_TILE];
} stretches;

INLINE stretch stretch_at(const tq_key_mean * m, int32_t position, int key) {
    const int last  = m->n_blocks - 1;
    const int block = position >> m->block_log2;
    if (position == 0) {
        return (stretch){ key, key + 1, START, 0, 0 };
    }
    if (block < 0 || block >= last) {
        return (stretch){ key, key + 1, last / TQ_MEAN_WINDOW, (last % TQ_MEAN_WINDOW) << m->block_log2, 0 };
    }
    const int window = block / TQ_MEAN_WINDOW;
    const int end    = (window + 1) * TQ_MEAN_WINDOW < last ? (window + 1) * TQ_MEAN_WINDOW : last;
    return (stretch){ key, key + 1, window, position - ((window * TQ_MEAN_WINDOW) << m->block_log2),
                      (end << m->block_log2) - position - 1 };
}

INLINE vi count_lanes(void) {
    vi lane;
    for (int i = 0; i < LANES; i++) {
        lane[i] = i;
    }
    return lane;
}

// Of a whole tile; the last one of a cache may be cut short, and is taken key by key.
INLINE bool are_consecutive(const int32_t * positions, int n_keys) {
    vi other = splat_i32(0);
    for (int k = 0; k < TQ_TILE && n_keys == TQ_TILE; k += LANES) {
        other |=
            (load_i32(positions + k) - splat_i32((int32_t) ((uint32_t) positions[0] + (uint32_t) k))) ^ count_lanes();
    }
    int32_t any = 0;
    for (int i = 0; i < LANES; i++) {
        any |= other[i];
    }
    return n_keys == TQ_TILE && any == 0;
}

INLINE void find_stretches(const tq_key_mean * m, const int32_t * positions, int n_keys, stretches * found) {
    const bool consecutive = are_consecutive(positions, n_keys);
    found->n               = 0;
    for (int k = 0; k < n_keys; k = found->at[found->n++].end) {
        stretch s = stretch_at(m, positions[k], k);
        if (consecutive) {
            s.end += s.left < n_keys - s.end ? s.left : n_keys - s.end;
        }
        found->at[found->n] = s;
    }
}

// The positions of the largest block.
typedef float span __attribute__((vector_size(4 * TQ_MAX_MEAN_BLOCK), aligned(4), may_alias));

// query . mean at all positions of a window: one tile after the other needs them.
INLINE void mean_of_window(const tq_attn * a, tq_attn_rows * rows, int first, int n_rows, int window) {
    const int     n_fast = 2 * a->key_mean.n_fast, n_slow = tq_mean_slow(&a->key_mean);
    const int     block  = 1 << a->key_mean.block_log2;
    const int     stride = n_fast + n_slow;
    const float * turned = rows->mean_turned + first * stride;
    const float * fast   = a->key_mean.table + (size_t) window * (size_t) (n_fast * TQ_MEAN_WINDOW + n_slow);
    const float * slow   = fast + n_fast * TQ_MEAN_WINDOW;
    vf            still[STEP];
    FOR_ROWS(r) {
        vf sum = splat(0.0f);
        for (int i = 0; i < n_slow; i += LANES) {
            sum += load(turned + r * stride + n_fast + i) * load(slow + i);
        }
        still[r] = splat(sum_lanes(sum) + rows->mean_fixed[first + r]);
    }
    for (int j = 0; j < TQ_MEAN_WINDOW; j += LANES) {
        vf sum[STEP];
        FOR_ROWS(r) {
            sum[r] = still[r];
        }
        for (int i = 0; i < n_fast; i++) {
            const vf t = load(fast + i * TQ_MEAN_WINDOW + j);
            FOR_ROWS(r) {
                sum[r] += turned[r * stride + i] * t;
            }
        }
        FOR_ROWS(r) {
            for (int b = 0; b < LANES; b++) {  // where a block is shorter, the next one overwrites the rest
                *(span *) (rows->mean_term[first + r] + (j + b) * block) = sum[r][b] - (span){ 0 };
            }
        }
    }
    rows->mean_window[first] = window;
}

// x has room for a vector past the last row's keys.
INLINE void add_mean_logits(const tq_attn * a, tq_attn_rows * rows, int first, int n_rows, const stretches * found,
                            float (*x)[TQ_TILE]) {
    for (const stretch * s = found->at; s < found->at + found->n; s++) {
        if (s->window == START) {
            FOR_ROWS(r) {
                x[r][s->first] += rows->mean_start[first + r];
            }
            continue;
        }
        if (s->window != rows->mean_window[first]) {
            mean_of_window(a, rows, first, n_rows, s->window);
        }
        for (int k = s->first; k < s->end; k += LANES) {
            const vi inside = count_lanes() < s->end - k;
            FOR_ROWS(r) {
                const vf term = load(rows->mean_term[first + r] + s->offset + (k - s->first));
                store(x[r] + k, load(x[r] + k) + choose(inside, term, splat(0.0f)));
            }
        }
    }
}

// ---- softmax ----

INLINE vf cap(vf x, float softcap) {
    const vf t    = exp_nonpositive(choose(x < 0.0f, x, -x) * (2.0f / softcap));
    const vf tanh = (1.0f - t) / (1.0f + t);
    return choose(x < 0.0f, -tanh, tanh) * softcap;
}

// The mask of a tile of n_keys, which may end with the row: what lies beyond is not read, and not seen.
INLINE const uint16_t * whole_mask(const uint16_t * mask, int n_keys, uint16_t * buffer) {
    if (n_keys == TQ_TILE) {
        return mask;
    }
    for (int k = 0; k < TQ_TILE; k++) {
        buffer[k] = k >= n_keys ? 0xfc00 : mask != NULL ? mask[k] : 0;
    }
    return buffer;
}

// Turns a row's logits into weights relative to the tile's maximum, and brings its state to the new maximum. Returns
// the factor of the tile's weights, exp(tile's maximum - row's maximum).
INLINE float softmax_row(const tq_attn * a, tq_attn_rows * rows, int r, int n_keys, float * x) {
    uint16_t         buffer[TQ_TILE];
    const uint16_t * mask = whole_mask(rows->mask[r], n_keys, buffer);
    vf               top  = splat(-INFINITY);
    for (int k = 0; k < TQ_TILE; k += LANES) {
        vf logit = load(x + k) * a->scale;
        if (a->softcap != 0.0f) {
            logit = cap(logit, a->softcap);
        }
        if (mask != NULL) {
            logit += load_f16(mask + k) * rows->slope[r];
        }
        if (k + LANES > n_keys) {
            logit = choose(load_f16(mask + k) == -INFINITY, splat(-INFINITY), logit);
        }
        store(x + k, logit);
        top = larger(logit, top);
    }
    const float tile_max = max_lanes(top);
    if (tile_max == -INFINITY) {
        memset(x, 0, TQ_TILE * sizeof(float));
        return 0.0f;
    }
    vf sum = splat(0.0f);
    for (int k = 0; k < TQ_TILE; k += LANES) {
        const vf weight = exp_nonpositive(load(x + k) - tile_max);
        store(x + k, weight);
        sum += weight;
    }
    float factor = 1.0f;
    if (tile_max > rows->max[r]) {
        const vf old = exp_nonpositive(splat(rows->max[r] - tile_max));
        float *  acc = rows->acc + r * a->head_v;
        for (int i = 0; i < a->head_v; i += LANES) {
            store(acc + i, load(acc + i) * old);
        }
        rows->sum[r] *= old[0];
        rows->max[r] = tile_max;
    } else {
        factor = exp_nonpositive(splat(tile_max - rows->max[r]))[0];
    }
    rows->sum[r] += factor * sum_lanes(sum);
    return factor;
}

// ---- acc += weight * value ----

INLINE void add_float_values(const tq_attn * a, tq_attn_rows * rows, int first, int n_rows, int n_keys,
                             float_rows values, float (*x)[TQ_TILE], const float * factor) {
    FOR_ROWS(r) {
        for (int k = 0; k < TQ_TILE; k += LANES) {
            store(x[r] + k, load(x[r] + k) * factor[r]);
        }
    }
    for (int i = 0; i < a->head_v; i += FLOAT_WIDTH * LANES) {
        multiply_add(n_rows, x[0], TQ_TILE, values, i, n_keys, rows->acc + first * a->head_v, a->head_v);
    }
}

#ifdef TQ_INT8
// Weight times value_scale as 15 bits of the largest one; returns the unit.
INLINE float quantise_weights(const tq_attn_rows * rows, float * x, int16_t * weights) {
    vf top = splat(0.0f);
    for (int k = 0; k < TQ_TILE; k += LANES) {
        const vf scaled = load(x + k) * load(rows->value_scale + k);
        store(x + k, scaled);
        top = larger(scaled, top);
    }
    const float max = max_lanes(top);
    const float inv = max > 0.0f ? WEIGHT_ONE / max : 0.0f;
    for (int k = 0; k < TQ_TILE; k += LANES) {
        store_narrow(weights + k, load(x + k) * inv + 0.5f);
    }
    return max * (1.0f / WEIGHT_ONE) * (32768.0f / RATIO_ONE);
}

// WIDTH * LANES values of a block.
INLINE void add_quads(int n_rows, int n_keys, const char * values, int32_t (*words)[TQ_TILE / 2], const float * unit,
                      float * acc, int stride) {
    weighted sum[STEP][WIDTH] = { 0 };
    for (int k = 0; k < n_keys; k += 8) {  // the second quad may lie past the end, where weights are 0
        for (int quad = 0; quad < 2; quad++) {
            operand value[WIDTH];
            FOR_WIDTH(v) {
                value[v] = load_operand(values + (k + quad * 4) * TQ_BLOCK + v * LANES * 4);
            }
            FOR_ROWS(r) {
                FOR_WIDTH(v) {
                    sum[r][v] = dot_value(sum[r][v], value[v], words[r] + k / 2 + quad);
                }
            }
        }
    }
    FOR_ROWS(r) {
        FOR_WIDTH(v) {
            float * out = acc + r * stride + v * LANES;
            store(out, load(out) + to_float(total(sum[r][v])) * unit[r]);
        }
    }
}

INLINE void add_int8_values(const tq_attn * a, tq_attn_rows * rows, int first, int n_rows, int n_keys,
                            float (*x)[TQ_TILE], const float * factor) {
    int16_t weights[STEP][TQ_TILE];
    int32_t words[STEP][TQ_TILE / 2];
    float   unit[STEP];
    FOR_ROWS(r) {
        unit[r] = quantise_weights(rows, x[r], weights[r]) * factor[r];
    }
    for (int b = 0; b < a->head_v / TQ_BLOCK; b++) {
        FOR_ROWS(r) {
            split_weights(weights[r], rows->value_ratio + b * TQ_TILE, words[r]);
        }
        for (int i = 0; i < TQ_BLOCK; i += WIDTH * LANES) {
            add_quads(n_rows, n_keys, (const char *) rows->values + (b * TQ_TILE * TQ_BLOCK + i * 4), words, unit,
                      rows->acc + first * a->head_v + b * TQ_BLOCK + i, a->head_v);
        }
    }
}
#endif

// ---- a tile ----

INLINE void logits(const tile * t, tq_attn_rows * rows, int first, int n_rows, float (*x)[TQ_TILE]) {
    const tq_attn * a = t->attn;
#ifdef TQ_INT8
    if (is_int8(a->type_k)) {
        int8_logits(a, rows, first, n_rows, t->n_keys, x);
        return;
    }
#endif
    if (read_in_place(a->type_k, rows->n)) {
        f16_logits(a, rows, first, n_rows, t->n_keys, t->keys, x);
    } else {
        float_logits(a, rows, first, n_rows, t->n_keys, x);
    }
}

INLINE void add_values(const tile * t, tq_attn_rows * rows, int first, int n_rows, float (*x)[TQ_TILE],
                       const float * factor) {
    const tq_attn * a = t->attn;
#ifdef TQ_INT8
    if (is_int8(a->type_v)) {
        add_int8_values(a, rows, first, n_rows, t->n_keys, x, factor);
        return;
    }
#endif
    if (read_in_place(a->type_v, rows->n)) {
        const float_rows values = { t->values, a->stride_v, true };
        add_float_values(a, rows, first, n_rows, t->n_keys, values, x, factor);
    } else {
        const float_rows values = { (const char *) rows->values, (size_t) a->head_v * sizeof(float), false };
        add_float_values(a, rows, first, n_rows, t->n_keys, values, x, factor);
    }
}

INLINE void attend_rows(const tile * t, tq_attn_rows * rows, const stretches * found, int first, int n_rows) {
    TQ_ALIGNED float x[STEP + 1][TQ_TILE];
    float            factor[STEP];
    logits(t, rows, first, n_rows, x);
    if (found->n > 0) {
        add_mean_logits(t->attn, rows, first, n_rows, found, x);
    }
    FOR_ROWS(r) {
        factor[r] = softmax_row(t->attn, rows, first + r, t->n_keys, x[r]);
    }
    add_values(t, rows, first, n_rows, x, factor);
}

// The number of rows must be known to the compiler, for the accumulators to live in registers.
void FN(tq_attn_tile)(const tq_attn * a, tq_attn_rows * rows, const char * keys, const char * values, int n_keys) {
    const tile t = { a, keys, values, n_keys };
    stretches  found;
    found.n = 0;
    if (a->key_mean.table != NULL) {
        find_stretches(&a->key_mean, rows->positions, n_keys, &found);
    }
    decode_keys(&t, rows);
    decode_values(&t, rows);
    int r = 0;
    for (; r + STEP <= rows->n; r += STEP) {
        attend_rows(&t, rows, &found, r, STEP);
    }
    switch (rows->n - r) {
        case 3:
            attend_rows(&t, rows, &found, r, 3);
            break;
        case 2:
            attend_rows(&t, rows, &found, r, 2);
            break;
        case 1:
            attend_rows(&t, rows, &found, r, 1);
            break;
        default:
            break;
    }
}

// ---- a finished row ----

INLINE vf butterfly(vf x, int h) {
    vi high;
    for (int i = 0; i < LANES; i++) {
        high[i] = i & h ? -1 : 0;
    }
    const vf partner = partners(x, h);
    return choose(high, partner - x, partner + x);
}

// The inverse of the codec's rotation of TQ_BLOCK values.
INLINE void unrotate(float * y) {
    enum { N = TQ_BLOCK / LANES };
    vf x[N];
    for (int i = 0; i < N; i++) {
        x[i] = load(y + i * LANES);
        for (int h = 1; h < LANES; h *= 2) {
            x[i] = butterfly(x[i], h);
        }
    }
    for (int h = 1; h < N; h *= 2) {
        for (int i = 0; i < N; i++) {
            if ((i & h) == 0) {
                const vf a = x[i];
                x[i]       = a + x[i + h];
                x[i + h]   = a - x[i + h];
            }
        }
    }
    for (int i = 0; i < N; i++) {
        vi sign;
        for (int l = 0; l < LANES; l++) {
            sign[l] = (TQ_SIGN_MASK >> (i * LANES + l)) & 1 ? INT32_MIN : 0;
        }
        store(y + i * LANES, (vf) ((vi) (x[i] * TQ_WHT_SCALE) ^ sign));
    }
}

void FN(tq_attn_finish)(const tq_attn * a, float sum, const float * acc, float * dst) {
    const float factor = sum > 0.0f ? 1.0f / sum : 0.0f;
    for (int i = 0; i < a->head_v; i += LANES) {
        store(dst + i, load(acc + i) * factor);
    }
    for (int i = 0; i < a->head_v && tq_cache_types[a->type_v].rotates; i += TQ_BLOCK) {
        unrotate(dst + i);
    }
}
