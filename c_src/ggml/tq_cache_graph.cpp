#include "tq_cache_graph.h"

#include "llama-kv-cache-iswa.h"
#include "tq_conditioner.h"
#include "tq_flash_attn.h"
#include "tq_kv_access.h"

using access = tq_kv_cache_access;

// ---- inputs ----

// Positions of the batch's tokens and of the cache's cells.
class tq_positions : public llm_graph_input_i {
public:
    tq_positions(const void * owner, std::function<const llama_kv_cache_context *()> cache)
        : owner(owner), cache(std::move(cache)) {
    }

    void set_input(const llama_ubatch * ubatch) override {
        if (tokens != nullptr && tokens->buffer != nullptr) {
            ggml_backend_tensor_set(tokens, ubatch->pos, 0, ggml_nbytes(tokens));
        }
        if (cells != nullptr && cells->buffer != nullptr) {
            set_cells();
        }
    }

    // What could differ, the number of tokens, cells and streams, the cache's own input compares.
    bool can_reuse(const llm_graph_params &) override {
        return true;
    }

    const void *  owner;  // llama.cpp's input for the same cache
    ggml_tensor * tokens = nullptr;
    ggml_tensor * cells  = nullptr;

private:
    void set_cells() {
        const llama_kv_cache_context & ctx = *cache();
        positions.resize(ggml_nelements(cells));
        for (int64_t s = 0; s < cells->ne[1]; s++) {
            const llama_kv_cells & from = access::cells(access::cache(ctx), access::first_stream(ctx) + (uint32_t) s);
            int32_t *              to   = positions.data() + s * cells->ne[0];
            for (int64_t i = 0; i < cells->ne[0]; i++) {
                to[i] = from.is_empty((uint32_t) i) ? 0 : from.pos_get((uint32_t) i);
            }
        }
        ggml_backend_tensor_set(cells, positions.data(), 0, ggml_nbytes(cells));
    }

    std::function<const llama_kv_cache_context *()> cache;
    std::vector<int32_t>                            positions;  // of cells
};

static ggml_tensor * new_positions(ggml_context * ctx, const char * name, int64_t n0, int64_t n1) {
    ggml_tensor * t = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, n0, n1);
    ggml_set_input(t);
    ggml_set_name(t, name);
    return t;
}

static tq_positions * positions_of(const llm_graph_context & g, const void * owner,
                                   const std::function<const llama_kv_cache_context *()> & cache) {
    for (const auto & input : g.res->inputs) {
        auto * found = dynamic_cast<tq_positions *>(input.get());
        if (found != nullptr && found->owner == owner) {
            return found;
        }
    }
    auto input    = std::make_unique<tq_positions>(owner, cache);
    input->tokens = new_positions(g.ctx0, "tq_token_positions", g.n_tokens, 1);
    return (tq_positions *) g.res->add_input(std::move(input));
}

// ---- nodes ----

static const float * row_of(const ggml_tensor * t, int64_t head, int64_t token) {
    return (const float *) (const void *) ((const char *) t->data + head * t->nb[1] + token * t->nb[2]);
}

static float * row_of(ggml_tensor * t, int64_t head, int64_t token) {
    return (float *) (void *) ((char *) t->data + head * t->nb[1] + token * t->nb[2]);
}

static ggml_tensor * map_rows(ggml_context * ctx, ggml_tensor * rows, ggml_tensor * positions, ggml_custom_op_t fn,
                              int n_tasks, const void * user) {
    ggml_tensor * args[] = { rows, positions };
    return ggml_custom_4d(ctx, GGML_TYPE_F32, rows->ne[0], rows->ne[1], rows->ne[2], 1, args, positions ? 2 : 1, fn,
                          n_tasks, const_cast<void *>(user));
}

static void condition_keys(ggml_tensor * dst, int ith, int nth, void * user) {
    const auto &        layer = *(const tq_conditioned_layer *) user;
    const ggml_tensor * k     = dst->src[0];
    const int32_t *     pos   = (const int32_t *) dst->src[1]->data;
    for (int64_t i = ith; i < dst->ne[1] * dst->ne[2]; i += nth) {
        const int64_t head = i % dst->ne[1], token = i / dst->ne[1];
        layer.condition(row_of(k, head, token), row_of(dst, head, token), (int) head, (int) dst->ne[0], pos[token]);
    }
}

static void filter_rows(ggml_tensor * dst, int ith, int, void * user) {
    if (ith != 0) {
        return;
    }
    const auto & f = *(const tq_filtered *) user;
    for (int64_t t = 0; t < dst->ne[2]; t++) {
        for (int64_t h = 0; h < dst->ne[1]; h++) {
            memcpy(row_of(dst, h, t), row_of((const ggml_tensor *) dst->src[0], h, t), dst->nb[1]);
        }
    }
    const tq_rows rows = { f.kind,
                           f.il,
                           (int32_t) dst->ne[2],
                           (int32_t) dst->ne[1],
                           (int32_t) dst->ne[0],
                           f.logit_scale,
                           (const int32_t *) dst->src[1]->data,
                           (float *) dst->data };
    f.conditioner->filter(f.conditioner->user, &rows);
}

// ---- build_attn ----

tq_cache_graph::tq_cache_graph(const llm_graph_context & graph, const llm_graph_input_attn_kv * inp, int il,
                               float logit_scale, bool takes_mean, ggml_tensor *& q, ggml_tensor *& k, ggml_tensor *& v)
    : graph(graph), cache([inp] { return inp->mctx; }), owner(inp) {
    build(il, logit_scale, takes_mean, q, k, v);
}

tq_cache_graph::tq_cache_graph(const llm_graph_context & graph, const llm_graph_input_attn_kv_iswa * inp, int il,
                               float logit_scale, bool takes_mean, ggml_tensor *& q, ggml_tensor *& k, ggml_tensor *& v)
    : graph(graph), cache(graph.hparams.is_swa(il) ? context_of([inp] { return inp->mctx->get_swa(); })
                                                   : context_of([inp] { return inp->mctx->get_base(); })),
      // One of each per graph: the address of the mask tells them apart.
      owner(graph.hparams.is_swa(il) ? (const void *) &inp->self_kq_mask_swa : (const void *) &inp->self_kq_mask) {
    build(il, logit_scale, takes_mean, q, k, v);
}

void tq_cache_graph::build(int il, float logit_scale, bool takes_mean, ggml_tensor *& q, ggml_tensor *& k,
                           ggml_tensor *& v) {
    if (graph.cparams.training) {
        return;  // attends the batch's own keys
    }
    auto & conditioner = tq_conditioner::of(access::cache(*cache()));
    auto & found       = conditioner.layer(graph.cparams, il, takes_mean);
    if (conditioner.filter == nullptr && found.mode == TQ_PLAIN) {
        return;
    }
    positions = positions_of(graph, owner, cache);
    if (conditioner.filter != nullptr) {
        const auto filtered = [&](ggml_tensor * rows, int kind) {
            const auto * what = conditioner.filtered({ &conditioner, kind, il, logit_scale });
            return rows == nullptr ? nullptr : map_rows(graph.ctx0, rows, positions->tokens, filter_rows, 1, what);
        };
        q = filtered(q, TQ_ROWS_Q);
        k = filtered(k, TQ_ROWS_K);
        v = filtered(v, TQ_ROWS_V);
    }
    if (found.mode == TQ_PLAIN) {
        return;
    }
    layer = &found;
    q     = ggml_mul(graph.ctx0, q, layer->scale_q);
    if (k != nullptr) {
        k = map_rows(graph.ctx0, k, positions->tokens, condition_keys, GGML_N_TASKS_MAX, layer);
    }
}

void tq_cache_graph::attach(ggml_tensor * cur) const {
    if (layer == nullptr || layer->mode != TQ_POSITIONAL) {
        return;
    }
    while (cur->op != GGML_OP_FLASH_ATTN_EXT) {
        cur = cur->src[0];
    }
    const ggml_tensor * k = cur->src[1];
    if (positions->cells == nullptr) {
        positions->cells = new_positions(graph.ctx0, "tq_cell_positions", k->ne[1], k->ne[3]);
    }
    tq_flash_attn_set_mean(cur, positions->cells, layer->table->turns, layer->mean_over_scale, layer->table->rope.n_rot,
                           layer->table->n_fast, layer->table->rope.is_neox, layer->table->block);
}

// ---- K-shift ----

// Reads the cells while the graph runs: they hold the new position, and how far it is from the old one.
static void shift_rows(ggml_tensor * dst, int ith, int nth, const tq_conditioned_layer & layer, bool undo) {
    const llama_kv_cache & kv = *layer.kv;
    for (int64_t i = ith; i < dst->ne[2]; i += nth) {
        const llama_kv_cells & cells = access::cells(kv, (uint32_t) (i / kv.get_size()));
        const uint32_t         cell  = (uint32_t) (i % kv.get_size());
        const llama_pos        pos   = cells.is_empty(cell) ? 0 : cells.pos_get(cell);
        for (int64_t h = 0; h < dst->ne[1]; h++) {
            const float * from = row_of((const ggml_tensor *) dst->src[0], h, i);
            if (undo) {
                const llama_pos shift = cells.is_empty(cell) ? 0 : cells.get_shift(cell);
                layer.restore(from, row_of(dst, h, i), (int) h, (int) dst->ne[0], pos - shift);
            } else {
                layer.condition(from, row_of(dst, h, i), (int) h, (int) dst->ne[0], pos);
            }
        }
    }
}

static void shift_undo(ggml_tensor * dst, int ith, int nth, void * user) {
    shift_rows(dst, ith, nth, *(const tq_conditioned_layer *) user, true);
}

static void shift_redo(ggml_tensor * dst, int ith, int nth, void * user) {
    shift_rows(dst, ith, nth, *(const tq_conditioned_layer *) user, false);
}

static ggml_tensor * shift_node(llama_kv_cache & kv, ggml_context * ctx, ggml_tensor * keys, int il,
                                ggml_custom_op_t fn) {
    const tq_conditioned_layer * layer = tq_conditioner::of(kv).find(il);
    return layer == nullptr ? keys : map_rows(ctx, keys, nullptr, fn, GGML_N_TASKS_MAX, layer);
}

ggml_tensor * tq_shift_undo(const llama_kv_cache * kv, ggml_context * ctx, ggml_tensor * keys, int il) {
    return shift_node(const_cast<llama_kv_cache &>(*kv), ctx, keys, il, shift_undo);
}

ggml_tensor * tq_shift_redo(const llama_kv_cache * kv, ggml_context * ctx, ggml_tensor * keys, int il) {
    return shift_node(const_cast<llama_kv_cache &>(*kv), ctx, keys, il, shift_redo);
}
