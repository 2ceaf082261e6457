// The constants of tq_conditioning.h, made ready for a KV cache, and what applies them.
#include "tq_conditioner.h"

#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "llama-context.h"
#include "llama-impl.h"
#include "llama-model.h"
#include "tq_attn.h"
#include "tq_constants.h"
#include "tq_flash_attn.h"
#include "tq_kv_access.h"
#include "tq_state.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <set>
#include <stdexcept>

#define SCALE_FLOOR 0.01f

using access = tq_kv_cache_access;

static thread_local const tq_key_constants * current_constants = nullptr;
static thread_local tq_row_filter            current_filter    = nullptr;
static thread_local void *                   current_user      = nullptr;

void tq_use_key_constants(const tq_key_constants * constants) {
    current_constants = constants;
}

void tq_use_row_filter(tq_row_filter filter, void * user) {
    current_filter = filter;
    current_user   = user;
}

// ---- RoPE ----

// Radians per position, as ggml_rope_ext computes them (YaRN: arXiv 2309.00071), which are proportional to it.
static bool rope_of(const llama_model & model, const llama_cparams & cparams, int il, tq_rope * rope) {
    const auto & hparams = model.hparams;
    *rope                = {};
    if (hparams.rope_type == LLAMA_ROPE_TYPE_NONE || !hparams.has_rope(il)) {
        return true;
    }
    const int n_rot = (int) hparams.n_rot(il);
    if (n_rot % 2 != 0 || n_rot > (int) hparams.n_embd_head_k(il) || n_rot > TQ_MAX_HEAD) {
        return false;
    }
    const float         base    = model.get_rope_freq_base(cparams, il);
    const float         scale   = model.get_rope_freq_scale(cparams, il);
    const ggml_tensor * factors = model.get_rope_factors(cparams, il);
    const float *       factor =
        factors != nullptr && ggml_backend_buffer_is_host(factors->buffer) ? (float *) factors->data : nullptr;
    float ramp[2];
    ggml_rope_yarn_corr_dims(n_rot, cparams.n_ctx_orig_yarn, base, cparams.yarn_beta_fast, cparams.yarn_beta_slow,
                             ramp);
    rope->n_rot   = n_rot;
    rope->is_neox = hparams.rope_type != LLAMA_ROPE_TYPE_NORM;
    for (int i = 0; i < n_rot / 2; i++) {
        const float angle    = std::pow(base, -2.0f * i / n_rot) / (factor != nullptr ? factor[i] : 1.0f);
        const float progress = (i - ramp[0]) / std::fmax(0.001f, ramp[1] - ramp[0]);
        const float mix      = (1.0f - std::fmin(1.0f, std::fmax(0.0f, progress))) * cparams.yarn_ext_factor;
        rope->angle[i]       = angle * (scale * (1.0f - mix) + mix);
    }
    return true;
}

int tq_layer_rope(const llama_context * ctx, int32_t il, tq_rope * rope) {
    const llama_model * model = llama_get_model(ctx);
    return il >= 0 && il < (int) model->hparams.n_layer() && rope_of(*model, ctx->get_cparams(), il, rope) ? 0 : -1;
}

// ---- the mean by blocks of positions ----

// The share of a pair's mean that n positions in a row have in common: the Dirichlet kernel.
static double common_share(double angle, double n) {
    const double half = std::sin(angle / 2.0);
    return std::fabs(half) < 1e-12 ? 1.0 : std::sin(n * angle / 2.0) / (n * half);
}

static ggml_context * context_for(int n_tensors) {
    return ggml_init({ n_tensors * ggml_tensor_overhead(), nullptr, true });
}

static ggml_tensor * new_tensor(ggml_context * ctx, const char * name, int64_t n0, int64_t n1, int64_t n2 = 1) {
    return ggml_set_name(ggml_new_tensor_3d(ctx, GGML_TYPE_F32, n0, n1, n2), name);
}

// Pairs that turn less than half a radian in a window of blocks count as still in it. A block that is the whole context
// has no window.
static int count_fast(const tq_rope & rope, int block) {
    int n = rope.n_rot / 2;
    while (n > 0 && block <= TQ_MAX_MEAN_BLOCK && rope.angle[n - 1] * block * TQ_MEAN_WINDOW < 0.5f) {
        n--;
    }
    return n;
}

tq_block_table::tq_block_table(const tq_rope & rope, int block, int n_positions, ggml_backend_buffer_type_t buft)
    : rope(rope), block(block), n_fast(count_fast(rope, block)), buft(buft), ctx(context_for(1)) {
    const int n_used = (n_positions + block - 1) / block;
    n_blocks         = GGML_PAD(n_used + 1, TQ_MEAN_WINDOW);  // the last one stays zero, of slow pairs its whole window
    if (n_blocks - n_used <= TQ_MEAN_WINDOW) {
        n_blocks += TQ_MEAN_WINDOW;
    }
    const int n_floats = 2 * n_fast * TQ_MEAN_WINDOW + GGML_PAD(rope.n_rot - 2 * n_fast, TQ_MEAN_PAD);
    turns              = new_tensor(ctx.get(), "tq_turns", std::max(n_floats, 1), n_blocks / TQ_MEAN_WINDOW);
    buffer.reset(ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), buft));
    values.resize(ggml_nelements(turns));
    for (int b = 0; b < n_used; b++) {
        for (int i = 0; i < rope.n_rot / 2; i++) {
            const entry  e      = entry_of(b, i);
            const double angle  = rope.angle[i];
            const double middle = angle * (i < n_fast ? b * block + (block - 1) / 2.0 : window_middle(b));
            values[e.cosine]    = (float) std::cos(middle);
            values[e.sine]      = (float) std::sin(middle);
        }
    }
    ggml_backend_tensor_set(turns, values.data(), 0, ggml_nbytes(turns));
}

double tq_block_table::window_middle(int b) const {
    const double n = (double) TQ_MEAN_WINDOW * block;
    return b / TQ_MEAN_WINDOW * n + (n - 1) / 2.0;
}

// Where block b's cosine and sine of pair i are.
tq_block_table::entry tq_block_table::entry_of(int b, int i) const {
    const size_t window = (size_t) (b / TQ_MEAN_WINDOW) * turns->ne[0];
    const size_t slow   = window + 2 * n_fast * TQ_MEAN_WINDOW;
    if (i < n_fast) {
        const size_t at = window + (size_t) i * TQ_MEAN_WINDOW + b % TQ_MEAN_WINDOW;
        return { at, at + (size_t) n_fast * TQ_MEAN_WINDOW };
    }
    return { slow + i - n_fast, slow + i - n_fast + (rope.n_rot / 2 - n_fast) };
}

int tq_block_table::block_of(llama_pos position) const {
    return position < 0 ? n_blocks - 1 : std::min(position / block, n_blocks - 1);
}

// ---- a layer ----

// Mean squares before RoPE to those over all positions of the context: the two values of a pair turn into each other,
// so fast pairs come to share theirs, and slow ones keep what they have. None is left far below the head's mean: a
// channel that calibration saw little of may yet be used.
static void turn_squares(float * x, const float * products, const tq_rope & rope, int head_size, int n_ctx) {
    const float floor = SCALE_FLOOR * std::accumulate(x, x + head_size, 0.0f) / (float) head_size;
    for (int i = 0; i < rope.n_rot / 2; i++) {
        const int    a = tq_first_of_pair(rope, i), b = tq_second_of_pair(rope, i);
        const double turn    = 2.0 * n_ctx * rope.angle[i];
        const double cosine  = turn < 1e-6 ? 1.0 : std::sin(turn) / turn;
        const double sine    = turn < 1e-6 ? 0.0 : (1.0 - std::cos(turn)) / turn;
        const double between = 0.5 * (x[a] + x[b]);
        const double apart   = 0.5 * (x[a] - x[b]) * cosine - products[a] * sine;
        x[a]                 = (float) std::max(between + apart, 0.0);
        x[b]                 = (float) std::max(between - apart, 0.0);
    }
    for (int i = 0; i < head_size; i++) {
        x[i] += floor;
    }
}

// (variance / query energy)^1/4, of geometric mean 1. Of the mean, what stays in the keys counts as variance.
static std::vector<float> scale_of(const tq_stored_moments & moments, const std::vector<float> & taken,
                                   const tq_rope & rope, int n_ctx) {
    std::vector<float> variance = moments.variance, covariance = moments.covariance, query = moments.query_energy;
    const int          head_size = moments.head_size;
    const auto square = [](const std::vector<float> & x, size_t i, size_t j) { return x.empty() ? 0.0f : x[i] * x[j]; };
    for (size_t head = 0; head < variance.size(); head += head_size) {
        for (int i = 0; i < head_size; i++) {
            const size_t at = head + i, partner = head + tq_partner(rope, i);
            variance[at] += square(moments.mean, at, at) - square(taken, at, at);
            covariance[at] += square(moments.mean, at, partner) - square(taken, at, partner);
        }
        float *s = variance.data() + head, *q = query.data() + head, log_sum = 0.0f;
        turn_squares(s, covariance.data() + head, rope, head_size, n_ctx);
        turn_squares(q, moments.query_product.data() + head, rope, head_size, n_ctx);
        for (int i = 0; i < head_size; i++) {
            s[i] = s[i] > 0.0f && q[i] > 0.0f ? std::pow(s[i] / q[i], 0.25f) : 1.0f;
            log_sum += std::log(s[i]);
        }
        for (int i = 0; i < head_size; i++) {
            s[i] *= std::exp(-log_sum / (float) head_size);
        }
    }
    return variance;
}

// Of each pair what is taken out: what a block's positions share, and for a mean that is not added back only pairs that
// turn less than a radian over the whole context.
static void damp_mean(std::vector<float> & mean, const tq_block_table & table, int head_size, bool added_back) {
    for (size_t head = 0; head < mean.size(); head += head_size) {
        for (int i = 0; i < table.rope.n_rot / 2; i++) {
            const double angle = table.rope.angle[i];
            const double share = !added_back && angle * table.block > 1.0 ? 0.0 : common_share(angle, table.block);
            mean[head + tq_first_of_pair(table.rope, i)] *= (float) share;
            mean[head + tq_second_of_pair(table.rope, i)] *= (float) share;
        }
    }
}

// The tensors that graphs take, where the layer's keys are: the scale of each query head, and the mean as attention
// needs it.
static void make_tensors(tq_conditioned_layer & l, int n_head, ggml_backend_buffer_type_t buft) {
    l.ctx.reset(context_for(2));
    const int head = l.head_size, group = n_head / l.n_head_kv;
    l.scale_q = new_tensor(l.ctx.get(), "tq_scale", head, n_head);
    if (l.mode == TQ_POSITIONAL) {
        l.mean_over_scale = new_tensor(l.ctx.get(), "tq_mean", head, l.n_head_kv, 3);
    }
    l.buffer.reset(ggml_backend_alloc_ctx_tensors_from_buft(l.ctx.get(), buft));
    for (int h = 0; h < n_head; h++) {
        ggml_backend_tensor_set(l.scale_q, l.scale.data() + (size_t) (h / group) * head,
                                (size_t) h * head * sizeof(float), head * sizeof(float));
    }
    if (l.mean_over_scale == nullptr) {
        return;
    }
    const size_t       n = l.mean.size();
    std::vector<float> out(3 * n);
    for (size_t i = 0; i < n; i++) {
        const size_t partner = i - i % head + tq_partner(l.table->rope, (int) (i % head));
        out[i]               = l.mean[i] / l.scale[i];
        out[n + i]           = l.mean[partner] / l.scale[i];
        out[2 * n + i]       = l.start[i] / l.scale[i];
    }
    ggml_backend_tensor_set(l.mean_over_scale, out.data(), 0, ggml_nbytes(l.mean_over_scale));
}

void tq_conditioned_layer::condition(const float * k, float * out, int head, int n, llama_pos position) const {
    const size_t  first = (size_t) head * head_size;
    const float * inv   = inverse.data() + first;
    if (mode == TQ_SCALED) {
        for (int i = 0; i < n; i++) {
            out[i] = k[i] * inv[i];
        }
        return;
    }
    float mu[TQ_MAX_HEAD];
    mean_at(head, position, mu);
    for (int i = 0; i < n; i++) {
        out[i] = (k[i] - mu[i]) * inv[i];
    }
}

void tq_conditioned_layer::restore(const float * k, float * out, int head, int n, llama_pos position) const {
    float         mu[TQ_MAX_HEAD] = { 0 };
    const float * s               = scale.data() + (size_t) head * head_size;
    if (mode != TQ_SCALED) {
        mean_at(head, position, mu);
    }
    for (int i = 0; i < n; i++) {
        out[i] = k[i] * s[i] + mu[i];
    }
}

void tq_conditioned_layer::mean_at(int head, llama_pos position, float * mu) const {
    if (mode == TQ_POSITIONAL && position == 0) {
        memcpy(mu, start.data() + (size_t) head * head_size, head_size * sizeof(float));
        return;
    }
    const tq_rope & rope  = table->rope;
    const float *   m     = mean.data() + (size_t) head * head_size;
    const float *   turns = table->values.data();
    const int       block = table->block_of(mode == TQ_CONSTANT ? 0 : position);
    for (int i = 0; i < rope.n_rot / 2; i++) {
        const int   a = tq_first_of_pair(rope, i), b = tq_second_of_pair(rope, i);
        const auto  e = table->entry_of(block, i);
        const float c = turns[e.cosine], s = turns[e.sine];
        mu[a] = m[a] * c - m[b] * s;
        mu[b] = m[b] * c + m[a] * s;
    }
    for (int i = rope.n_rot; i < head_size; i++) {
        mu[i] = m[i];
    }
}

// ---- a cache ----

static bool is_ours(ggml_type type) {
    return type == GGML_TYPE_TQ3 || type == GGML_TYPE_TQ4;
}

tq_conditioner::tq_conditioner(const llama_kv_cache & kv) : filter(current_filter), user(current_user), kv(kv) {
    if (current_constants != nullptr) {
        take(*current_constants);
    } else if (access::n_layers(kv) > 0 && ggml_is_quantized(kv.type_k())) {  // some models have an empty cache
        take_from_model();
    }
}

void tq_conditioner::take(const tq_key_constants & given) {
    for (mean_block = 1; mean_block < given.mean_block && mean_block < TQ_MAX_MEAN_BLOCK;) {
        mean_block *= 2;
    }
    mean_block = given.mean_block > 0 ? mean_block : TQ_MEAN_BLOCK;
    for (int i = 0; i < given.n_layers; i++) {
        const tq_layer_constants & c = given.layers[i];
        const size_t               n = (size_t) c.n_head_kv * c.head_size;
        tq_stored_moments &        s = constants[c.il];
        s.n_head_kv                  = c.n_head_kv;
        s.head_size                  = c.head_size;
        s.variance.assign(c.variance, c.variance + n);
        s.covariance.assign(c.covariance, c.covariance + n);
        s.query_energy.assign(c.query_energy, c.query_energy + n);
        s.query_product.assign(c.query_product, c.query_product + n);
        if (c.mean != nullptr) {
            s.mean.assign(c.mean, c.mean + n);
        }
        if (c.start != nullptr) {
            s.start.assign(c.start, c.start + n);
        }
    }
}

// Nobody chose for this thread, as in llama.cpp's own programs: TQ_GGML_CALIBRATION decides, as `tq-ggml
// --calibration`.
void tq_conditioner::take_from_model() {
    const char *      variable = getenv("TQ_GGML_CALIBRATION");
    const std::string choice   = variable != nullptr && *variable ? variable : "auto";
    const bool        is_file  = choice != "auto" && choice != "on" && choice != "off";
    if (choice == "off" || (choice == "auto" && !is_ours(kv.type_k()))) {
        return;
    }
    const auto found = is_file ? tq_read_side_file(choice.c_str()) : access::model(kv).tq;
    if (!found->problem.empty()) {
        throw std::runtime_error("tq-ggml: the calibration in " + (is_file ? choice : "the model") +
                                 " is unusable: " + found->problem + "; make it again, or set TQ_GGML_CALIBRATION=off");
    }
    if (found->layers.empty()) {
        LLAMA_LOG_WARN(
            "tq-ggml: the model carries no calibration, so its keys are not conditioned, which costs quality; "
            "`tq-ggml calibrate MODEL -o COPY` writes a copy that does\n");
        return;
    }
    constants = found->layers;
    LLAMA_LOG_INFO("tq-ggml: constants for the keys of %zu layers\n", constants.size());
}

tq_conditioner & tq_conditioner::of(llama_kv_cache & kv) {
    auto & c     = access::conditioner(kv);
    auto * other = access::other(kv);
    if (other != nullptr && of(*other).conditions()) {
        // Thrown while the context is made: llama_init_from_model says it and returns NULL.
        throw std::runtime_error("tq-ggml: this context shares a KV cache whose keys are conditioned, which it cannot "
                                 "read; make the other context with calibration off");
    }
    if (!c) {
        c = std::make_shared<tq_conditioner>(kv);
    }
    return *c;
}

bool tq_conditioner::conditions() const {
    return std::any_of(layers.begin(), layers.end(), [](const auto & l) { return l.second->mode != TQ_PLAIN; });
}

// Architectures whose graphs write to the cache or attend it without build_attn.
static bool goes_around(llm_arch arch) {
    static const std::set<llm_arch> archs = { LLM_ARCH_QWEN4EXP,   LLM_ARCH_DEEPSEEK4, LLM_ARCH_GLM5_NEXT,
                                              LLM_ARCH_MINIMAX_M3, LLM_ARCH_DFLASH,    LLM_ARCH_T5 };
    return archs.count(arch) != 0;
}

static bool attends_with_ours(const llama_kv_cache & kv, int head_size) {
    return is_ours(kv.type_k()) && tq_cache_type_of(kv.type_v()) >= 0 && access::flash_attention(kv) &&
           head_size <= TQ_MAX_HEAD;
}

tq_conditioned_mode tq_conditioner::mode_of(const tq_stored_moments & s, bool takes_mean) const {
    if (s.mean.empty()) {
        return TQ_SCALED;
    }
    if (attends_with_ours(kv, s.head_size)) {
        return TQ_POSITIONAL;
    }
    return takes_mean ? TQ_CONSTANT : TQ_SCALED;
}

std::unique_ptr<tq_conditioned_layer> tq_conditioner::make(const llama_cparams & cparams, int il, bool takes_mean) {
    auto         layer = std::make_unique<tq_conditioned_layer>();
    const auto & model = access::model(kv);
    const auto & hp    = model.hparams;
    const auto   found = constants.find(il);
    tq_rope      rope;
    layer->kv = &kv;
    layer->il = il;
    if (found == constants.end() || !ggml_is_quantized(kv.type_k()) || goes_around(model.arch) ||
        access::other(kv) != nullptr || found->second.n_head_kv != (int) hp.n_head_kv(il) ||
        found->second.head_size != (int) hp.n_embd_head_k(il) || !rope_of(model, cparams, il, &rope)) {
        return layer;
    }
    const tq_stored_moments & s = found->second;
    layer->n_head_kv            = s.n_head_kv;
    layer->head_size            = s.head_size;
    layer->mode                 = mode_of(s, takes_mean);
    const int  n_ctx            = (int) cparams.n_ctx_seq;
    const auto buft             = access::key_buffer_type(kv, il);
    if (layer->mode != TQ_SCALED) {
        layer->mean  = s.mean;
        layer->table = table_for(rope, layer->mode == TQ_POSITIONAL ? mean_block : n_ctx, n_ctx, buft);
        damp_mean(layer->mean, *layer->table, s.head_size, layer->mode == TQ_POSITIONAL);
        layer->start = s.start.empty() ? layer->mean : s.start;
    }
    layer->scale = scale_of(s, layer->mean, rope, n_ctx);
    for (float x : layer->scale) {
        layer->inverse.push_back(1.0f / x);
    }
    make_tensors(*layer, (int) hp.n_head(il), buft);
    return layer;
}

std::shared_ptr<const tq_block_table> tq_conditioner::table_for(const tq_rope & rope, int block, int n_positions,
                                                                ggml_backend_buffer_type_t buft) {
    for (const auto & t : tables) {
        if (t->block == block && t->buft == buft && memcmp(&t->rope, &rope, sizeof(rope)) == 0) {
            return t;
        }
    }
    tables.push_back(std::make_shared<const tq_block_table>(rope, block, n_positions, buft));
    return tables.back();
}

const tq_conditioned_layer & tq_conditioner::layer(const llama_cparams & cparams, int il, bool takes_mean) {
    const int writer = access::writer(kv, il);
    auto &    l      = layers[writer];
    if (!l) {
        l = make(cparams, writer, takes_mean);
    }
    return *l;
}

const tq_conditioned_layer * tq_conditioner::find(int il) const {
    const auto found = layers.find(access::writer(kv, il));
    return found != layers.end() && found->second->mode != TQ_PLAIN ? found->second.get() : nullptr;
}

// The constants and the context, not the scale made of them: its last bit depends on the machine's mathematics library.
void tq_conditioner::add_to(tq_digest & digest, const llama_cparams & cparams) const {
    for (const auto & [il, layer] : layers) {
        if (layer->mode == TQ_PLAIN) {
            continue;
        }
        const tq_stored_moments & s = constants.at(il);
        for (int32_t x : { il, (int) layer->mode, mean_block, (int) cparams.n_ctx_seq }) {
            digest.add(x);
        }
        for (const auto * x : { &s.mean, &s.start, &s.variance, &s.covariance, &s.query_energy, &s.query_product }) {
            digest.add(x->data(), x->size() * sizeof(float));
        }
    }
}

const tq_filtered * tq_conditioner::filtered(const tq_filtered & what) {
    return &(filters[{ what.kind, what.il }] = what);
}

int tq_kv_conditioning(const llama_context * ctx, tq_conditioned_layers * layers) {
    const auto caches = access::caches(llama_get_memory(ctx));
    int        n[4]   = { 0, 0, 0, 0 };
    for (llama_kv_cache * kv : caches) {
        for (const auto & [_, layer] : tq_conditioner::of(*kv).all()) {
            n[layer->mode]++;
        }
    }
    *layers = { n[TQ_PLAIN], n[TQ_SCALED], n[TQ_CONSTANT], n[TQ_POSITIONAL] };
    return caches.empty() ? -1 : 0;
}
