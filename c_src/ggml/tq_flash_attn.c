// FLASH_ATTN_EXT over the cache types that tq_attn.h names. A job is a set of query rows that share a KV head, and a
// range of keys. Where query rows alone do not keep the threads busy (decoding), the keys are split too: each job then
// leaves a partial result, and after a barrier the partials of a row are added up.
#include "tq_flash_attn.h"

#include "ggml-cpu-impl.h"
#include "ggml-impl.h"
#include "ggml.h"
#include "tq_attn.h"
#include "tq_hook.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MIN_KEYS_PER_JOB 256
#define JOBS_PER_THREAD  4
#define FEW_ROWS         32
#define RANGE_BYTES      (768 * 1024)  // most of a second-level cache

typedef struct {
    const struct ggml_tensor *q, *k, *v, *mask, *sinks, *cells, *mean;
    char *                    dst;  // [n_seq][n_tokens][n_head] rows
    size_t                    dst_stride;
    tq_attn                   attn;
    float                     max_bias;
    int64_t                   n_tokens, n_head, n_head_kv, n_seq, n_kv;
    int64_t                   group;           // query heads that share a KV head
    int64_t                   tokens_per_job;  // so many tokens' rows of a group fit tq_attn_rows
    int64_t                   token_jobs, key_jobs, keys_per_job;
} plan;

static bool use_stock = false;

void tq_attention_use_stock(bool stock) {
    use_stock = stock;
}

bool tq_attention_uses_stock(void) {
    return use_stock;
}

__attribute__((constructor)) static void read_environment(void) {
    const char * wanted = getenv("TQ_ATTENTION");
    if (wanted == NULL || wanted[0] == '\0' || strcmp(wanted, "tq") == 0) {
        return;
    }
    use_stock = strcmp(wanted, "stock") == 0;
    if (!use_stock) {
        fprintf(stderr, "tq-ggml: TQ_ATTENTION=%s is neither tq nor stock; using tq\n", wanted);
    }
}

static bool is_tq(const struct ggml_tensor * t) {
    return t->type == GGML_TYPE_TQ3 || t->type == GGML_TYPE_TQ4;
}

static bool rows_are_whole(const struct ggml_tensor * t) {
    return tq_cache_type_of(t->type) >= 0 && t->nb[0] == ggml_type_size(t->type) && t->ne[0] % TQ_BLOCK == 0 &&
           t->ne[0] <= TQ_MAX_HEAD;
}

// Depends on the operator alone: all threads, and the work size, must come to the same answer.
static bool is_ours(const struct ggml_tensor * op) {
    const struct ggml_tensor *q = op->src[0], *k = op->src[1], *v = op->src[2], *mask = op->src[3];
    return rows_are_whole(k) && rows_are_whole(v) && q->type == GGML_TYPE_F32 && q->nb[0] == sizeof(float) &&
           k->ne[2] == v->ne[2] && k->ne[3] == v->ne[3] && q->ne[2] % k->ne[2] == 0 && q->ne[3] % k->ne[3] == 0 &&
           q->ne[2] / k->ne[2] <= TQ_MAX_ROWS && k->ne[1] > 0 &&
           (mask == NULL || (mask->type == GGML_TYPE_F16 && mask->nb[0] == sizeof(ggml_fp16_t)));
}

// All keys where the query rows keep the threads busy. Else enough ranges for the threads; and for few rows, where
// memory is what one waits for, no longer a range than stays in a core's cache while one head after the other goes
// over it: in llama.cpp's cache the heads of a key lie side by side.
static int64_t keys_per_job(const plan * p, int n_threads) {
    const int64_t row_jobs = p->token_jobs * p->n_head_kv * p->n_seq;
    const int64_t wanted   = JOBS_PER_THREAD * n_threads;
    int64_t       keys     = p->n_kv;
    if (row_jobs < wanted) {
        keys = MAX(p->n_kv * row_jobs / wanted, MIN_KEYS_PER_JOB);
    }
    if (p->n_tokens * p->group <= FEW_ROWS) {
        keys = MIN(keys, MAX(RANGE_BYTES / (int64_t) (p->k->nb[1] + p->v->nb[1]), MIN_KEYS_PER_JOB));
    }
    return GGML_PAD(keys, TQ_TILE);
}

// What tq_flash_attn_set_mean has attached; the mean itself is each KV head's.
static tq_key_mean key_mean_of(const struct ggml_tensor * op) {
    const struct ggml_tensor * turns = op->src[TQ_SRC_TURNS];
    tq_key_mean                m     = { 0 };
    if (turns != NULL) {
        m.table    = turns->data;
        m.n_blocks = (int) turns->ne[1] * TQ_MEAN_WINDOW;
        m.n_rot    = op->op_params[TQ_PARAM_N_ROT];
        m.n_fast   = op->op_params[TQ_PARAM_N_FAST];
        m.is_neox  = op->op_params[TQ_PARAM_IS_NEOX] != 0;
        while (1 << m.block_log2 < op->op_params[TQ_PARAM_MEAN_BLOCK]) {
            m.block_log2++;
        }
    }
    return m;
}

static plan make_plan(int n_threads, const struct ggml_tensor * op) {
    const struct ggml_tensor *q = op->src[0], *k = op->src[1], *v = op->src[2];
    const float *             op_params = (const float *) op->op_params;

    plan p = { .q     = q,
               .k     = k,
               .v     = v,
               .mask  = op->src[3],
               .sinks = op->src[4],
               .cells = op->src[TQ_SRC_CELLS],
               .mean  = op->src[TQ_SRC_MEAN] };
    p.attn = (tq_attn){ .key_mean = key_mean_of(op),
                        .type_k   = (tq_cache_type) tq_cache_type_of(k->type),
                        .type_v   = (tq_cache_type) tq_cache_type_of(v->type),
                        .head_k   = (int) k->ne[0],
                        .head_v   = (int) v->ne[0],
                        .stride_k = k->nb[1],
                        .stride_v = v->nb[1],
                        .scale    = op_params[0],
                        .softcap  = op_params[2] };

    p.dst            = op->data;
    p.dst_stride     = op->nb[1];
    p.n_tokens       = q->ne[1];
    p.n_head         = q->ne[2];
    p.n_head_kv      = k->ne[2];
    p.n_seq          = q->ne[3];
    p.n_kv           = k->ne[1];
    p.group          = p.n_head / p.n_head_kv;
    p.max_bias       = op_params[1];
    p.tokens_per_job = MIN(p.n_tokens, TQ_MAX_ROWS / p.group);
    p.token_jobs     = (p.n_tokens + p.tokens_per_job - 1) / p.tokens_per_job;

    p.keys_per_job = keys_per_job(&p, n_threads);
    p.key_jobs     = (p.n_kv + p.keys_per_job - 1) / p.keys_per_job;
    return p;
}

static tq_attn_rows * thread_space(const struct ggml_compute_params * params, int thread) {
    return (tq_attn_rows *) GGML_PAD((uintptr_t) params->wdata, TQ_ALIGN) + thread;
}

static size_t partial_floats(const plan * p) {
    return 2 + (size_t) p->attn.head_v;  // maximum, sum, accumulator
}

size_t tq_flash_attn_work_size(int n_threads, const struct ggml_tensor * op) {
    if (!is_ours(op)) {
        return 0;
    }
    const plan   p        = make_plan(n_threads, op);
    const size_t n_rows   = (size_t) (p.n_tokens * p.n_head * p.n_seq);
    const size_t partials = p.key_jobs > 1 ? n_rows * (size_t) p.key_jobs * partial_floats(&p) * sizeof(float) : 0;
    return TQ_ALIGN + sizeof(tq_attn_rows) * (size_t) n_threads + partials;
}

typedef struct {
    int64_t seq, head_kv, first_token, n_tokens, first_key, end_key, key_job;
} job;

static job get_job(const plan * p, int64_t i) {
    job j;
    j.head_kv     = i % p->n_head_kv;
    i             = i / p->n_head_kv;
    j.first_token = i % p->token_jobs * p->tokens_per_job;
    i             = i / p->token_jobs;
    j.key_job     = i % p->key_jobs;
    j.seq         = i / p->key_jobs;
    j.n_tokens    = MIN(p->tokens_per_job, p->n_tokens - j.first_token);
    j.first_key   = j.key_job * p->keys_per_job;
    j.end_key     = MIN(j.first_key + p->keys_per_job, p->n_kv);
    return j;
}

// The fp16 mask of a row, from a key on.
static const uint16_t * mask_of(const plan * p, int64_t seq, int64_t token, int64_t head, int64_t key) {
    const struct ggml_tensor * m = p->mask;
    const char * x = (const char *) m->data + token * m->nb[1] + head % m->ne[2] * m->nb[2] + seq % m->ne[3] * m->nb[3];
    return (const uint16_t *) (const void *) x + key;
}

enum { HIDES_ALL, HIDES_SOME, HIDES_NONE };

static int scan_mask(const uint16_t * mask, int n_keys) {
    const uint16_t hidden  = 0xfc00;  // fp16 -infinity
    uint16_t       visible = 0, altered = 0;
    for (int k = 0; k < n_keys; k++) {
        visible |= mask[k] ^ hidden;
        altered |= mask[k];
    }
    return visible == 0 ? HIDES_ALL : altered == 0 ? HIDES_NONE : HIDES_SOME;
}

// Gives each row its mask over a tile, NULL where it hides nothing. False when no row sees any of the keys.
static bool set_masks(const plan * p, const job * j, tq_attn_rows * rows, int64_t key, int n_keys) {
    if (p->mask == NULL) {
        return true;
    }
    bool             seen = false;
    const uint16_t * mask = NULL;
    for (int r = 0; r < rows->n; r++) {
        const int64_t head = r % p->group;
        if (head == 0 || p->mask->ne[2] > 1) {
            mask            = mask_of(p, j->seq, j->first_token + r / p->group, j->head_kv * p->group + head, key);
            const int hides = scan_mask(mask, n_keys);
            seen |= hides != HIDES_ALL;
            mask = hides == HIDES_NONE ? NULL : mask;
        }
        rows->mask[r] = mask;
    }
    return seen;
}

// ALiBi (arXiv 2108.12409): the factor of the mask in each head. 1 without it.
static float slope_of(const plan * p, int64_t head) {
    if (p->max_bias == 0.0f) {
        return 1.0f;
    }
    int64_t n = 1;  // the largest power of two that is not above the number of heads
    while (2 * n <= p->n_head) {
        n *= 2;
    }
    const float step = p->max_bias / (float) n;
    return head < n ? exp2f(-step * (float) (head + 1)) : exp2f(-step * 0.5f * (float) (2 * (head - n) + 1));
}

static float * partial_of(const plan * p, float * partials, int64_t row, int64_t key_job) {
    return partials + (size_t) (row * p->key_jobs + key_job) * partial_floats(p);
}

static int64_t row_index(const plan * p, int64_t seq, int64_t token, int64_t head) {
    return (seq * p->n_tokens + token) * p->n_head + head;
}

// A learned sink is one more logit that no value belongs to.
static void finish_row(const plan * p, int64_t row, float max, float sum, float * acc) {
    const int64_t head = row % p->n_head;
    if (p->sinks != NULL) {
        sum += expf(((const float *) p->sinks->data)[head] - max);
    }
    tq_attn_finish(&p->attn, sum, acc, (float *) (void *) (p->dst + (size_t) row * p->dst_stride));
}

static void add_queries(const plan * p, const tq_attn * attn, const job * j, tq_attn_rows * rows) {
    rows->n = 0;
    for (int64_t t = j->first_token; t < j->first_token + j->n_tokens; t++) {
        for (int64_t h = j->head_kv * p->group; h < (j->head_kv + 1) * p->group; h++) {
            const char * query = (const char *) p->q->data + t * p->q->nb[1] + h * p->q->nb[2] + j->seq * p->q->nb[3];
            tq_attn_add_row(attn, rows, (const float *) (const void *) query);
            rows->slope[rows->n - 1] = slope_of(p, h);
        }
    }
}

static void run_job(const plan * p, const job * j, tq_attn_rows * rows, float * partials) {
    tq_attn attn = p->attn;
    if (p->mean != NULL) {
        const int64_t all     = p->mean->ne[0] * p->mean->ne[1];
        attn.key_mean.mean    = (const float *) p->mean->data + j->head_kv * p->mean->ne[0];
        attn.key_mean.crossed = attn.key_mean.mean + all;
        attn.key_mean.start   = attn.key_mean.mean + 2 * all;
    }
    add_queries(p, &attn, j, rows);
    const int64_t seq_kv = j->seq / (p->n_seq / p->k->ne[3]);
    const char *  keys   = (const char *) p->k->data + j->head_kv * p->k->nb[2] + seq_kv * p->k->nb[3];
    const char *  values = (const char *) p->v->data + j->head_kv * p->v->nb[2] + seq_kv * p->v->nb[3];
    for (int64_t key = j->first_key; key < j->end_key; key += TQ_TILE) {
        const int n_keys = (int) MIN(TQ_TILE, j->end_key - key);
        if (set_masks(p, j, rows, key, n_keys)) {
            rows->positions = p->cells != NULL ? (const int32_t *) p->cells->data + seq_kv * p->n_kv + key : NULL;
            tq_attn_tile(&attn, rows, keys + key * p->k->nb[1], values + key * p->v->nb[1], n_keys);
        }
    }
    for (int r = 0; r < rows->n; r++) {
        const int64_t row = row_index(p, j->seq, j->first_token + r / p->group, j->head_kv * p->group + r % p->group);
        float *       acc = rows->acc + (int64_t) r * p->attn.head_v;
        if (p->key_jobs == 1) {
            finish_row(p, row, rows->max[r], rows->sum[r], acc);
        } else {
            float * partial = partial_of(p, partials, row, j->key_job);
            partial[0]      = rows->max[r];
            partial[1]      = rows->sum[r];
            memcpy(partial + 2, acc, (size_t) p->attn.head_v * sizeof(float));
        }
    }
}

static void add_partials(const plan * p, int64_t row, float * acc, float * partials) {
    float max = -INFINITY;
    for (int64_t i = 0; i < p->key_jobs; i++) {
        max = fmaxf(max, partial_of(p, partials, row, i)[0]);
    }
    float sum = 0.0f;
    memset(acc, 0, (size_t) p->attn.head_v * sizeof(float));
    for (int64_t i = 0; i < p->key_jobs && max != -INFINITY; i++) {
        const float * partial = partial_of(p, partials, row, i);
        const float   factor  = expf(partial[0] - max);
        sum += partial[1] * factor;
        for (int d = 0; d < p->attn.head_v; d++) {
            acc[d] += partial[2 + d] * factor;
        }
    }
    finish_row(p, row, max, sum, acc);
}

bool tq_flash_attn(const struct ggml_compute_params * params, struct ggml_tensor * op) {
    // ggml's own operator would not add the mean back: whoever attached it has to know that it comes here.
    GGML_ASSERT(is_ours(op) || op->src[TQ_SRC_MEAN] == NULL);
    if (!is_ours(op) || (use_stock && !is_tq(op->src[1]) && !is_tq(op->src[2]))) {
        return false;
    }
    const plan     p        = make_plan(params->nth, op);
    tq_attn_rows * rows     = thread_space(params, params->ith);
    float *        partials = (float *) thread_space(params, params->nth);
    const int64_t  n_jobs   = p.token_jobs * p.n_head_kv * p.n_seq * p.key_jobs;

    if (params->ith == 0) {
        ggml_threadpool_chunk_set(params->threadpool, params->nth);
    }
    ggml_barrier(params->threadpool);
    for (int64_t i = params->ith; i < n_jobs; i = ggml_threadpool_chunk_add(params->threadpool, 1)) {
        const job j = get_job(&p, i);
        run_job(&p, &j, rows, partials);
    }
    if (p.key_jobs > 1) {
        ggml_barrier(params->threadpool);
        const int64_t n_rows = p.n_tokens * p.n_head * p.n_seq;
        for (int64_t row = params->ith; row < n_rows; row += params->nth) {
            add_partials(&p, row, rows->acc, partials);
        }
    }
    return true;
}
