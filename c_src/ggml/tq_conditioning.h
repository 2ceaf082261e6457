// Key conditioning: what a quantised KV cache stores is K' = (K - mean) / scale, what attends is Q' = Q * scale.
//
// mean and scale belong to a layer, KV head and channel, from a calibration run (docs/conditioning.md). The scale
// cancels in Q'.K'; it is (key variance / query energy)^1/4, both as they are with RoPE over the context, which makes
// the error of Q'.K' least. The mean is the one before RoPE, so it turns with the position: it is taken out in blocks
// of positions, and Q.mean, the same for all keys of a block, is added to the logits by our attention
// (tq_flash_attn.c). Position 0 has a mean of its own: the first token's key is much the same whatever the token, and
// attention goes back to it all the time. Where another operator attends, only what does not turn within the context is
// taken out; softmax does not see a constant. Whatever the constants are, right or useless, attention's result is the
// same but for rounding.
#ifndef TQ_CONDITIONING_H
#define TQ_CONDITIONING_H

#include "llama.h"

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// What calibration knows of a layer, float32 [n_head_kv][head_size] each.
typedef struct {
    int32_t       il;
    int32_t       n_head_kv;
    int32_t       head_size;
    const float * mean;           // of keys before RoPE; NULL: none is taken out
    const float * start;          // of keys at position 0, where attention sinks are; NULL: as everywhere
    const float * variance;       // of keys about it
    const float * covariance;     // of a channel with its partner in the RoPE pair; a lone channel is its own
    const float * query_energy;   // mean square of the queries that attend them, before RoPE
    const float * query_product;  // mean product of a query's channel with its partner, as covariance
} tq_layer_constants;

typedef struct {
    int32_t                    n_layers;
    const tq_layer_constants * layers;
    int32_t                    mean_block;  // positions that share a mean, 1, 2, 4 or 8; 0: TQ_MEAN_BLOCK
} tq_key_constants;

#define TQ_MEAN_BLOCK 8

// The constants of the KV caches in contexts that this thread makes from now on; NULL: for tq types those that the
// model carries, or what the environment's TQ_GGML_CALIBRATION says. They are copied while the context is made, not
// here.
LLAMA_API void tq_use_key_constants(const tq_key_constants * constants);

// Rows on the way into a KV cache (or, of queries, to attention), to be read or changed in place.
enum tq_rows_kind { TQ_ROWS_K, TQ_ROWS_V, TQ_ROWS_Q };

typedef struct {
    int32_t         kind;  // tq_rows_kind
    int32_t         il;
    int32_t         n_tokens;
    int32_t         n_head;
    int32_t         head_size;
    float           logit_scale;  // of queries times keys
    const int32_t * positions;    // [n_tokens]
    float *         rows;         // [n_tokens][n_head][head_size]; keys and queries with RoPE
} tq_rows;

typedef void (*tq_row_filter)(void * user, const tq_rows * rows);

// The filter of the contexts that this thread makes from now on; NULL: none. Called on the thread that decodes.
LLAMA_API void tq_use_row_filter(tq_row_filter filter, void * user);

// How a context's RoPE turns the keys of a layer.
typedef struct {
    int32_t n_rot;       // channels that turn, from the first on
    int32_t is_neox;     // pairs are (i, i + n_rot / 2); else (2 i, 2 i + 1)
    float   angle[512];  // [n_rot / 2] radians per position
} tq_rope;

// 0 on success; -1 for a layer that the model does not have or whose RoPE does not fit.
LLAMA_API int tq_layer_rope(const struct llama_context * ctx, int32_t il, tq_rope * rope);

// Layers of a context's KV caches by what is done to their keys.
typedef struct {
    int32_t plain;       // nothing
    int32_t scaled;      // scale alone
    int32_t constant;    // scale, and the mean of the channels that hardly turn
    int32_t positional;  // scale, and the mean at each block of positions
} tq_conditioned_layers;

LLAMA_API int tq_kv_conditioning(const struct llama_context * ctx, tq_conditioned_layers * layers);

#ifdef __cplusplus
}
#endif

#endif  // TQ_CONDITIONING_H
