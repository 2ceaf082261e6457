// The parts of llama.cpp's KV cache that our code reads; llama-kv-cache.h names it as a friend.
#ifndef TQ_KV_ACCESS_H
#define TQ_KV_ACCESS_H

#include "llama-kv-cache.h"

#include <memory>
#include <vector>

class tq_conditioner;

struct tq_kv_cache_access {
    // All KV caches of a memory; empty for kinds that are not known here.
    static std::vector<llama_kv_cache *> caches(llama_memory_t memory);

    static const llama_model & model(const llama_kv_cache & kv) {
        return kv.model;
    }

    static const llama_hparams & hparams(const llama_kv_cache & kv) {
        return kv.hparams;
    }

    static std::shared_ptr<tq_conditioner> & conditioner(llama_kv_cache & kv) {
        return kv.tq;
    }

    static llama_kv_cache & cache(const llama_kv_cache_context & ctx) {
        return *ctx.kv;
    }

    static bool flash_attention(const llama_kv_cache & kv) {
        return !kv.v_trans;
    }

    static bool rotates_keys(const llama_kv_cache & kv) {
        return kv.attn_rot_k;
    }

    static bool rotates_values(const llama_kv_cache & kv) {
        return kv.attn_rot_v;
    }

    // The cache whose cells, and maybe keys, kv shares; NULL for a cache of its own.
    static llama_kv_cache * other(const llama_kv_cache & kv) {
        return kv.other;
    }

    static size_t n_layers(const llama_kv_cache & kv) {
        return kv.layers.size();
    }

    // The model layer that writes the keys which layer il attends.
    static int writer(const llama_kv_cache & kv, int il) {
        return (int) kv.layers[kv.map_layer_ids.at(il)].il;
    }

    // Where the keys of a model layer that writes them are kept.
    static ggml_backend_buffer_type_t key_buffer_type(const llama_kv_cache & kv, int il) {
        const ggml_tensor * keys = kv.layers[kv.map_layer_ids.at(il)].k;
        return keys->buffer != nullptr ? ggml_backend_buffer_get_type(keys->buffer) : ggml_backend_cpu_buffer_type();
    }

    static uint64_t k_bytes(const llama_kv_cache & kv) {
        return kv.size_k_bytes();
    }

    static uint64_t v_bytes(const llama_kv_cache & kv) {
        return kv.size_v_bytes();
    }

    static const llama_kv_cells & cells(const llama_kv_cache & kv, uint32_t stream) {
        return kv.v_cells[stream];
    }

    static uint32_t first_stream(const llama_kv_cache_context & ctx) {
        return ctx.sinfos[ctx.i_cur].s0;
    }
};

#endif  // TQ_KV_ACCESS_H
