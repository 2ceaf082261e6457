// tq_kv_cache_bytes: what a context's KV cache takes, keys and values apart, as the engine allocated it.
#include "tq_kv_cache.h"

#include "llama-kv-cache-iswa.h"
#include "llama-kv-cache.h"
#include "llama-memory-hybrid-iswa.h"
#include "llama-memory-hybrid.h"

struct tq_kv_cache_access {
    uint64_t k_bytes = 0;
    uint64_t v_bytes = 0;
    bool     found   = false;

    void add(const llama_kv_cache * cache) {
        k_bytes += cache->size_k_bytes();
        v_bytes += cache->size_v_bytes();
        found = true;
    }

    void add(const llama_kv_cache_iswa * cache) {
        add(cache->get_base());
        add(cache->get_swa());
    }

    void add(llama_memory_t memory) {
        if (const auto * plain = dynamic_cast<llama_kv_cache *>(memory)) {
            add(plain);
        } else if (const auto * windowed = dynamic_cast<llama_kv_cache_iswa *>(memory)) {
            add(windowed);
        } else if (const auto * hybrid = dynamic_cast<llama_memory_hybrid *>(memory)) {
            add(hybrid->get_mem_attn());
        } else if (const auto * hybrid_windowed = dynamic_cast<llama_memory_hybrid_iswa *>(memory)) {
            add(hybrid_windowed->get_mem_attn());
        }
    }
};

int tq_kv_cache_bytes(const llama_context * ctx, uint64_t * k_bytes, uint64_t * v_bytes) {
    tq_kv_cache_access sum;
    sum.add(llama_get_memory(ctx));
    *k_bytes = sum.k_bytes;
    *v_bytes = sum.v_bytes;
    return sum.found ? 0 : -1;
}
