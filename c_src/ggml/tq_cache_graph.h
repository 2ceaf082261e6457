// What llama.cpp's graph code calls: build_attn makes a tq_cache_graph before keys are stored, and lets it see the
// attention afterwards; the K-shift undoes the conditioning and redoes it.
#ifndef TQ_CACHE_GRAPH_H
#define TQ_CACHE_GRAPH_H

#include "llama-graph.h"

#include <functional>

class llama_kv_cache;
class tq_conditioner;
struct tq_conditioned_layer;

class tq_cache_graph {
public:
    // Filters and conditions queries, keys and values of layer il; k and v are NULL where another layer has stored
    // them. takes_mean: nothing in this layer's attention sees a constant that is added to all logits.
    tq_cache_graph(const llm_graph_context & graph, const llm_graph_input_attn_kv * inp, int il, float logit_scale,
                   bool takes_mean, ggml_tensor *& q, ggml_tensor *& k, ggml_tensor *& v);
    tq_cache_graph(const llm_graph_context & graph, const llm_graph_input_attn_kv_iswa * inp, int il, float logit_scale,
                   bool takes_mean, ggml_tensor *& q, ggml_tensor *& k, ggml_tensor *& v);

    // Gives the attention, of which cur is the result, the mean that was taken out of the keys.
    void attach(ggml_tensor * cur) const;

private:
    using context_of = std::function<const llama_kv_cache_context *()>;  // inputs outlive it when a graph is reused

    void build(int il, float logit_scale, bool takes_mean, ggml_tensor *& q, ggml_tensor *& k, ggml_tensor *& v);

    const llm_graph_context &    graph;
    context_of                   cache;
    const void *                 owner;
    class tq_positions *         positions = nullptr;
    const tq_conditioned_layer * layer     = nullptr;
};

// Keys of layer il as the cache holds them, [n_rot][n_head_kv][cell], to keys and back; around the RoPE of a K-shift.
ggml_tensor * tq_shift_undo(const llama_kv_cache * kv, ggml_context * ctx, ggml_tensor * keys, int il);
ggml_tensor * tq_shift_redo(const llama_kv_cache * kv, ggml_context * ctx, ggml_tensor * keys, int il);

#endif  // TQ_CACHE_GRAPH_H
