// The key conditioning of one KV cache (tq_conditioning.h says what that is).
#ifndef TQ_CONDITIONER_H
#define TQ_CONDITIONER_H

#include "ggml-cpp.h"
#include "ggml.h"
#include "tq_conditioning.h"

#include <map>
#include <memory>
#include <string>
#include <vector>

class llama_kv_cache;
struct llama_cparams;
struct tq_digest;

enum tq_conditioned_mode { TQ_PLAIN, TQ_SCALED, TQ_CONSTANT, TQ_POSITIONAL };

inline int tq_first_of_pair(const tq_rope & rope, int i) {
    return rope.is_neox ? i : 2 * i;
}

inline int tq_second_of_pair(const tq_rope & rope, int i) {
    return rope.is_neox ? i + rope.n_rot / 2 : 2 * i + 1;
}

inline int tq_partner(const tq_rope & rope, int channel) {
    const int half = rope.n_rot / 2;
    return channel >= rope.n_rot ? channel
           : !rope.is_neox       ? channel ^ 1
           : channel < half      ? channel + half
                                 : channel - half;
}

// A copy of tq_layer_constants.
struct tq_stored_moments {
    int                n_head_kv, head_size;
    std::vector<float> mean, start, variance, covariance, query_energy, query_product;
};

// What we keep of a model's file, or of a side file: the constants in its metadata (tq_ggml/calibration.py writes
// them).
struct tq_model_facts {
    std::map<int, tq_stored_moments> layers;      // empty: it carries none
    std::string                      problem;     // what is wrong with them; then there are no layers
    uint64_t                         digest = 0;  // of its tensors, for saved states (tq_state.h)
};

// How far each pair has turned at each block of positions: tq_key_mean's table.
struct tq_block_table {
    struct entry {
        size_t cosine, sine;
    };

    tq_block_table(const tq_rope & rope, int block, int n_positions, ggml_backend_buffer_type_t buft);
    int   block_of(llama_pos position) const;
    entry entry_of(int block, int pair) const;  // in turns

    tq_rope                    rope;
    int                        block, n_fast, n_blocks;
    std::vector<float>         values;  // of turns, which a graph takes and the host may not be able to read
    ggml_tensor *              turns;
    ggml_backend_buffer_type_t buft;

private:
    double window_middle(int block) const;

    ggml_context_ptr        ctx;
    ggml_backend_buffer_ptr buffer;
};

struct tq_conditioned_layer {
    // n channels of a key: (k - mean) / scale and back; in place or not.
    void condition(const float * k, float * out, int head, int n, llama_pos position) const;
    void restore(const float * k, float * out, int head, int n, llama_pos position) const;

    const llama_kv_cache *                kv   = nullptr;
    tq_conditioned_mode                   mode = TQ_PLAIN;
    int                                   il = -1, n_head_kv = 0, head_size = 0;
    std::vector<float>                    scale, inverse, mean, start;  // [n_head_kv][head_size]
    std::shared_ptr<const tq_block_table> table;

    // For graphs.
    ggml_tensor * scale_q         = nullptr;  // [head_size][n_head]
    ggml_tensor * mean_over_scale = nullptr;  // [head_size][n_head_kv][3], TQ_POSITIONAL alone

    ggml_context_ptr        ctx;
    ggml_backend_buffer_ptr buffer;

private:
    void mean_at(int head, llama_pos position, float * mu) const;
};

class tq_conditioner;

// What a row filter's node in the graph refers to.
struct tq_filtered {
    const tq_conditioner * conditioner;
    int32_t                kind, il;
    float                  logit_scale;
};

class tq_conditioner {
public:
    explicit tq_conditioner(const llama_kv_cache & kv);
    static tq_conditioner & of(llama_kv_cache & kv);  // made with the constants of this thread at the first call

    // The layer that stores il's keys. takes_mean: see tq_cache_graph.
    const tq_conditioned_layer & layer(const llama_cparams & cparams, int il, bool takes_mean);
    const tq_conditioned_layer * find(int il) const;  // NULL: not conditioned

    const std::map<int, std::unique_ptr<tq_conditioned_layer>> & all() const {
        return layers;
    }

    bool                conditions() const;                                               // any layer's keys
    void                add_to(tq_digest & digest, const llama_cparams & cparams) const;  // what stored keys depend on
    const tq_filtered * filtered(const tq_filtered & what);

    const tq_row_filter filter;
    void * const        user;

private:
    std::unique_ptr<tq_conditioned_layer> make(const llama_cparams & cparams, int il, bool takes_mean);
    tq_conditioned_mode                   mode_of(const tq_stored_moments & s, bool takes_mean) const;
    std::shared_ptr<const tq_block_table> table_for(const tq_rope & rope, int block, int n_positions,
                                                    ggml_backend_buffer_type_t buft);

    void take(const tq_key_constants & given);
    void take_from_model();

    const llama_kv_cache &                               kv;
    int                                                  mean_block = TQ_MEAN_BLOCK;
    std::map<int, tq_stored_moments>                     constants;
    std::map<int, std::unique_ptr<tq_conditioned_layer>> layers;
    std::vector<std::shared_ptr<const tq_block_table>>   tables;
    std::map<std::pair<int32_t, int32_t>, tq_filtered>   filters;
};

#endif  // TQ_CONDITIONER_H
