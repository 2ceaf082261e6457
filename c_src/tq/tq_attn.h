// Attention over tq3/tq4 keys and values in the rotated domain, one tile of keys at a time.
//
// A tile of keys and values is decoded once and used by every query row that shares it: all heads of a group, all
// tokens of a prefill chunk. Softmax is online (arXiv 2112.05682): each row carries its maximum, its sum and its
// accumulator, which stays in the rotated domain until tq_attn_finish.
#ifndef TQ_ATTN_H
#define TQ_ATTN_H

#include "tq.h"

#ifdef __cplusplus
extern "C" {
#endif

#define TQ_TILE     32   // keys decoded at a time
#define TQ_MAX_HEAD 576  // the largest head size (DeepSeek's latent attention)
#define TQ_MAX_ROWS 128  // query rows that share a tile

typedef struct {
    int    type_k, type_v;  // tq_type
    int    head_k, head_v;  // values per head: multiples of TQ_BLOCK, at most TQ_MAX_HEAD
    size_t stride_k;        // bytes from one key to the next
    size_t stride_v;
    float  scale;    // of the logits, before the cap
    float  softcap;  // logit = softcap * tanh(scale * q.k / softcap); 0: no cap
} tq_attn;

// A set of query rows with their state, and what one thread needs to attend a tile. About 1 MB: not for the stack.
typedef struct {
    int            n;
    float          max[TQ_MAX_ROWS];
    float          sum[TQ_MAX_ROWS];
    const float *  mask[TQ_MAX_ROWS];                                // a row's mask over the tile, or NULL
    tq_query_block query_i8[TQ_MAX_ROWS * TQ_MAX_HEAD / TQ_BLOCK];   // [n][head_k / 32]
    int32_t        query_sum[TQ_MAX_ROWS * TQ_MAX_HEAD / TQ_BLOCK];  // of each block's int8
    float          query[TQ_MAX_ROWS * TQ_MAX_HEAD];                 // [n][head_k]
    float          acc[TQ_MAX_ROWS * TQ_MAX_HEAD];                   // [n][head_v]
    float          logits[TQ_MAX_ROWS * TQ_TILE];                    // [n][TQ_TILE], then the weights
    float          tile[TQ_TILE * TQ_MAX_HEAD];                      // decoded keys, then values
    float          scales[TQ_TILE * TQ_MAX_HEAD / TQ_BLOCK];
    uint8_t        levels[TQ_TILE * TQ_MAX_HEAD];
} tq_attn_rows;

// Adds a query of head_k floats: rotated and rounded to int8, its state cleared.
TQ_API void tq_attn_add_row(const tq_attn * a, tq_attn_rows * rows, const float * query);

// Attends n_keys <= TQ_TILE keys with every row, adding rows->mask to the logits (-INFINITY: not seen).
TQ_API void tq_attn_tile(const tq_attn * a, tq_attn_rows * rows, const char * keys, const char * values, int n_keys);

// acc / sum, rotated back; zeros for a row that saw no key. dst and acc have head_v floats and may be the same.
TQ_API void tq_attn_finish(const tq_attn * a, float sum, const float * acc, float * dst);

#ifdef __cplusplus
}
#endif

#endif  // TQ_ATTN_H
