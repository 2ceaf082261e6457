// Attention over a KV cache, one tile of keys at a time.
//
// A tile of keys and values is decoded once and used by every query row that shares it: all heads of a group, all
// tokens of a prefill chunk. Softmax is online (arXiv 2112.05682): each row carries its maximum, its sum and its
// accumulator. tq3 and tq4 stay in the rotated domain throughout: queries are rotated when they are added, results when
// they are finished. docs/attention.md tells the rest.
#ifndef TQ_ATTN_H
#define TQ_ATTN_H

#include "tq.h"

#ifdef __cplusplus
extern "C" {
#endif

#define TQ_TILE     64   // keys decoded at a time
#define TQ_MAX_HEAD 576  // the largest head size (DeepSeek's latent attention)
#define TQ_MAX_ROWS 128  // query rows that share a tile

// What a cache can hold. The blocks of the last four are ggml's.
typedef enum {
    TQ_CACHE_TQ3 = TQ_TYPE_TQ3,
    TQ_CACHE_TQ4 = TQ_TYPE_TQ4,
    TQ_CACHE_Q4_0,
    TQ_CACHE_IQ4_NL,
    TQ_CACHE_Q8_0,
    TQ_CACHE_F16,
    TQ_CACHE_COUNT
} tq_cache_type;

#define TQ_MEAN_WINDOW    16  // blocks of positions whose terms are computed together
#define TQ_MEAN_PAD       16
#define TQ_MAX_MEAN_BLOCK 8  // positions of a block
#define TQ_MEAN_SPAN      (TQ_MEAN_WINDOW * TQ_MAX_MEAN_BLOCK)

// A mean that was taken out of the keys and comes back as a term of the logits. It turns with the position as RoPE
// turns keys, block by block; pairs that hardly turn, window by window: channel a of a pair is cos * mean[a] - sin *
// crossed[a], channel b cos * mean[b] + sin * crossed[b]. The table has for each window
//   [2 n_fast][TQ_MEAN_WINDOW]    of each block the cosines of the fast pairs, then the sines
//   [n_rot - 2 n_fast]            cosines and sines of the others; zeros up to a multiple of TQ_MEAN_PAD
typedef struct {
    const float * table;    // NULL: no mean was taken out
    const float * mean;     // [head_k], of the KV head that is attended
    const float * crossed;  // [head_k], what the sine takes from a channel's partner: its mean, where nothing is scaled
    const float * start;    // [head_k], the mean at position 0 alone
    int           n_rot;    // channels that turn; the others' mean is the same for all keys
    int           n_fast;   // pairs, from the first on, that turn with the block
    bool          is_neox;  // pairs are (i, i + n_rot / 2), else (2 i, 2 i + 1)
    int           block_log2;  // positions of a block, at most TQ_MAX_MEAN_BLOCK
    int           n_blocks;    // whole windows; the last block is for all positions beyond, and negative ones
} tq_key_mean;

typedef struct {
    tq_cache_type type_k, type_v;
    int           head_k, head_v;  // values per head: multiples of TQ_BLOCK, at most TQ_MAX_HEAD
    size_t        stride_k;        // bytes from one key to the next
    size_t        stride_v;
    float         scale;    // of the logits, before the cap
    float         softcap;  // logit = softcap * tanh(scale * q.k / softcap); 0: no cap
    tq_key_mean   key_mean;
} tq_attn;

#define TQ_ALIGN   64  // of tq_attn_rows: a vector on two cache lines costs twice
#define TQ_ALIGNED __attribute__((aligned(TQ_ALIGN)))

// A set of query rows with their state, and what one thread needs to attend a tile. About 1.3 MB: not for the stack.
typedef struct {
    int              n;
    float            max[TQ_MAX_ROWS];
    float            sum[TQ_MAX_ROWS];
    const uint16_t * mask[TQ_MAX_ROWS];        // a row's fp16 mask over the tile, or NULL: all of it is seen
    float            slope[TQ_MAX_ROWS];       // the mask's factor (ALiBi); 1 elsewhere
    const int32_t *  positions;                // of the tile's keys; read where there is a key_mean
    float            mean_start[TQ_MAX_ROWS];  // query . mean at position 0
    float            mean_fixed[TQ_MAX_ROWS];  // query . mean over the channels that do not turn
    float            mean_turned[TQ_MAX_ROWS * (TQ_MAX_HEAD + TQ_MEAN_PAD)];  // [n]: what the table is multiplied with
    TQ_ALIGNED float mean_term[TQ_MAX_ROWS][TQ_MEAN_SPAN + 16];  // query . mean at the positions, read past the end, of
    int              mean_window[TQ_MAX_ROWS];                   // this window; -1 for none
    TQ_ALIGNED float query[TQ_MAX_ROWS * TQ_MAX_HEAD];           // [n][head_k]
    tq_query_block   query_i8[TQ_MAX_ROWS * TQ_MAX_HEAD / TQ_BLOCK];             // [n][head_k / 32]
    int16_t          query_i16[TQ_MAX_ROWS * TQ_MAX_HEAD / TQ_BLOCK][TQ_BLOCK];  // the same; of each four 0, 2, 1, 3
    int32_t          query_sum[TQ_MAX_ROWS * TQ_MAX_HEAD / TQ_BLOCK];            // of each block's int8
    TQ_ALIGNED float acc[TQ_MAX_ROWS * TQ_MAX_HEAD];                             // [n][head_v]
    // The decoded tile; what it holds depends on the type and the SIMD level (tq_attn.c).
    TQ_ALIGNED float keys[TQ_TILE * TQ_MAX_HEAD];
    TQ_ALIGNED float values[TQ_TILE * TQ_MAX_HEAD];
    TQ_ALIGNED float key_scale[TQ_TILE * TQ_MAX_HEAD / TQ_BLOCK];
    TQ_ALIGNED int16_t value_ratio[TQ_TILE * TQ_MAX_HEAD / TQ_BLOCK];
    TQ_ALIGNED float   value_scale[TQ_TILE];
} tq_attn_rows;

// Bytes of TQ_BLOCK values in a cache.
TQ_API size_t tq_cache_block_bytes(tq_cache_type type);

// Adds a query of head_k floats, its state cleared and its mask NULL.
TQ_API void tq_attn_add_row(const tq_attn * a, tq_attn_rows * rows, const float * query);

// Attends n_keys <= TQ_TILE keys with every row, adding slope * mask to the logits (-INFINITY: not seen).
TQ_API void tq_attn_tile(const tq_attn * a, tq_attn_rows * rows, const char * keys, const char * values, int n_keys);

// acc / sum, rotated back where the type is; zeros for a row that saw no key. dst and acc have head_v floats and may be
// the same.
TQ_API void tq_attn_finish(const tq_attn * a, float sum, const float * acc, float * dst);

#ifdef __cplusplus
}
#endif

#endif  // TQ_ATTN_H
