// tq_kv_cache_bytes: what a context's KV cache takes, keys and values apart, as the engine allocated it.
#include "tq_kv_cache.h"

#include "llama-kv-cache-iswa.h"
#include "llama-memory-hybrid-iswa.h"
#include "llama-memory-hybrid.h"
#include "tq_kv_access.h"

std::vector<llama_kv_cache *> tq_kv_cache_access::caches(llama_memory_t memory) {
    if (auto * plain = dynamic_cast<llama_kv_cache *>(memory)) {
        return { plain };
    }
    if (auto * windowed = dynamic_cast<llama_kv_cache_iswa *>(memory)) {
        return { windowed->get_base(), windowed->get_swa() };
    }
    if (auto * hybrid = dynamic_cast<llama_memory_hybrid *>(memory)) {
        return caches(hybrid->get_mem_attn());
    }
    if (auto * hybrid_windowed = dynamic_cast<llama_memory_hybrid_iswa *>(memory)) {
        return caches(hybrid_windowed->get_mem_attn());
    }
    return {};
}

int tq_kv_cache_bytes(const llama_context * ctx, uint64_t * k_bytes, uint64_t * v_bytes) {
    *k_bytes = *v_bytes = 0;
    const auto caches   = tq_kv_cache_access::caches(llama_get_memory(ctx));
    for (const llama_kv_cache * kv : caches) {
        *k_bytes += tq_kv_cache_access::k_bytes(*kv);
        *v_bytes += tq_kv_cache_access::v_bytes(*kv);
    }
    return caches.empty() ? -1 : 0;
}
