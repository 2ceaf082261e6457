// What libllama exports beside llama.h; called from Python (tq_ggml/library.py).
#ifndef TQ_KV_CACHE_H
#define TQ_KV_CACHE_H

#include "llama.h"

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// The bytes of a context's KV cache, keys and values apart, summed over its layers, streams and windows.
// 0 on success; -1 when the model keeps no KV cache, or one of a kind this function does not know.
LLAMA_API int tq_kv_cache_bytes(const struct llama_context * ctx, uint64_t * k_bytes, uint64_t * v_bytes);

#ifdef __cplusplus
}
#endif

#endif  // TQ_KV_CACHE_H
