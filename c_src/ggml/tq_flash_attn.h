// FLASH_ATTN_EXT over quantised caches. See tq_hook.h.
#ifndef TQ_FLASH_ATTN_H
#define TQ_FLASH_ATTN_H

#include "ggml.h"
#include "tq_attn.h"

#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

struct ggml_compute_params;

bool   tq_flash_attn(const struct ggml_compute_params * params, struct ggml_tensor * op);
size_t tq_flash_attn_work_size(int n_threads, const struct ggml_tensor * op);

// -1 for what is left to ggml.
static inline int tq_cache_type_of(enum ggml_type type) {
    switch (type) {
        case GGML_TYPE_TQ3:
            return TQ_CACHE_TQ3;
        case GGML_TYPE_TQ4:
            return TQ_CACHE_TQ4;
        case GGML_TYPE_Q4_0:
            return TQ_CACHE_Q4_0;
        case GGML_TYPE_IQ4_NL:
            return TQ_CACHE_IQ4_NL;
        case GGML_TYPE_Q8_0:
            return TQ_CACHE_Q8_0;
        case GGML_TYPE_F16:
            return TQ_CACHE_F16;
        default:
            return -1;
    }
}

// The mean that was taken out of the keys of an attention, as further sources of the operator (ggml uses five):
//   cells  I32 [n_kv][n_stream]            the position of each key
//   turns  F32 [window][n_windows]         tq_block_table
//   mean   F32 [head_size][n_head_kv][3]   tq_key_mean's mean, crossed and start, over the scale that queries carry
// and as the last of its parameters the shape of the RoPE.
enum { TQ_SRC_CELLS = 5, TQ_SRC_TURNS = 6, TQ_SRC_MEAN = 7 };
enum { TQ_PARAM_N_ROT = 12, TQ_PARAM_N_FAST = 13, TQ_PARAM_IS_NEOX = 14, TQ_PARAM_MEAN_BLOCK = 15 };

static inline void tq_flash_attn_set_mean(struct ggml_tensor * op, struct ggml_tensor * cells,
                                          struct ggml_tensor * turns, struct ggml_tensor * mean, int n_rot, int n_fast,
                                          int is_neox, int block) {
    op->src[TQ_SRC_CELLS]              = cells;
    op->src[TQ_SRC_TURNS]              = turns;
    op->src[TQ_SRC_MEAN]               = mean;
    op->op_params[TQ_PARAM_N_ROT]      = n_rot;
    op->op_params[TQ_PARAM_N_FAST]     = n_fast;
    op->op_params[TQ_PARAM_IS_NEOX]    = is_neox;
    op->op_params[TQ_PARAM_MEAN_BLOCK] = block;
}

#ifdef __cplusplus
}
#endif

#endif  // TQ_FLASH_ATTN_H
