// FLASH_ATTN_EXT over tq3/tq4 caches. A job is a set of query rows that share a KV head, and a range of keys. Where
// query rows alone do not keep the threads busy (decoding), the keys are split too: each job then leaves a partial
// result, and after a barrier the partials of a row are added up.
#include "tq_flash_attn.h"

#include "ggml-cpu-impl.h"
#include "ggml-impl.h"
#include "ggml.h"
#include "tq_attn.h"

#include <math.h>
#include <string.h>

#define MIN_KEYS_PER_JOB 256
#define JOBS_PER_THREAD  4

typedef struct {
    const struct ggml_tensor *q, *k, *v, *mask, *sinks;
    char *                    dst;  // [n_seq][n_tokens][n_head] rows
    size_t                    dst_stride;
    tq_attn                   attn;
    int64_t                   n_tokens, n_head, n_head_kv, n_seq, n_kv;
    int64_t                   group;           // query heads that share a KV head
    int64_t                   tokens_per_job;  // so many tokens' rows of a group fit tq_attn_rows
    int64_t                   token_jobs, key_jobs, keys_per_job;
} plan;

static int tq_type_of(enum ggml_type type) {
    return type == GGML_TYPE_TQ3 ? TQ_TYPE_TQ3 : type == GGML_TYPE_TQ4 ? TQ_TYPE_TQ4 : -1;
}

static bool rows_are_whole(const struct ggml_tensor * t) {
    return tq_type_of(t->type) >= 0 && t->nb[0] == ggml_type_size(t->type) && t->ne[0] % TQ_BLOCK == 0 &&
           t->ne[0] <= TQ_MAX_HEAD;
}

// Depends on the operator alone: all threads, and the work size, must come to the same answer.
static bool is_ours(const struct ggml_tensor * op) {
    if (op->op != GGML_OP_FLASH_ATTN_EXT) {
        return false;
    }
    const struct ggml_tensor *q = op->src[0], *k = op->src[1], *v = op->src[2], *mask = op->src[3];
    const float               max_bias = ((const float *) op->op_params)[1];
    return rows_are_whole(k) && rows_are_whole(v) && q->type == GGML_TYPE_F32 && q->nb[0] == sizeof(float) &&
           max_bias == 0.0f && k->ne[2] == v->ne[2] && k->ne[3] == v->ne[3] && q->ne[2] % k->ne[2] == 0 &&
           q->ne[3] % k->ne[3] == 0 && q->ne[2] / k->ne[2] <= TQ_MAX_ROWS && k->ne[1] > 0 &&
           (mask == NULL || (mask->type == GGML_TYPE_F16 && mask->nb[0] == sizeof(ggml_fp16_t) && mask->ne[2] == 1));
}

static plan make_plan(int n_threads, const struct ggml_tensor * op) {
    const struct ggml_tensor *q = op->src[0], *k = op->src[1], *v = op->src[2];
    const float *             op_params = (const float *) op->op_params;

    plan p = { .q = q, .k = k, .v = v, .mask = op->src[3], .sinks = op->src[4] };
    p.attn = (tq_attn){ .type_k   = tq_type_of(k->type),
                        .type_v   = tq_type_of(v->type),
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
    p.tokens_per_job = MIN(p.n_tokens, TQ_MAX_ROWS / p.group);
    p.token_jobs     = (p.n_tokens + p.tokens_per_job - 1) / p.tokens_per_job;

    const int64_t row_jobs = p.token_jobs * p.n_head_kv * p.n_seq;
    const int64_t wanted   = (JOBS_PER_THREAD * n_threads + row_jobs - 1) / row_jobs;
    const int64_t possible = (p.n_kv + MIN_KEYS_PER_JOB - 1) / MIN_KEYS_PER_JOB;
    p.key_jobs             = row_jobs >= JOBS_PER_THREAD * n_threads ? 1 : MIN(wanted, possible);
    p.keys_per_job         = GGML_PAD((p.n_kv + p.key_jobs - 1) / p.key_jobs, TQ_TILE);
    p.key_jobs             = (p.n_kv + p.keys_per_job - 1) / p.keys_per_job;
    return p;
}

// Per thread: the rows' state and the tile's mask for each token of a job.
typedef struct {
    tq_attn_rows rows;
    float        mask[TQ_MAX_ROWS][TQ_TILE];
} thread_space;

static size_t space_bytes(void) {
    return GGML_PAD(sizeof(thread_space), 64);  // no two threads on one cache line
}

static size_t partial_floats(const plan * p) {
    return 2 + (size_t) p->attn.head_v;  // maximum, sum, accumulator
}

size_t tq_work_size(int n_threads, const struct ggml_tensor * op) {
    if (!is_ours(op)) {
        return 0;
    }
    const plan   p        = make_plan(n_threads, op);
    const size_t n_rows   = (size_t) (p.n_tokens * p.n_head * p.n_seq);
    const size_t partials = p.key_jobs > 1 ? n_rows * (size_t) p.key_jobs * partial_floats(&p) * sizeof(float) : 0;
    return space_bytes() * (size_t) n_threads + partials;
}

typedef struct {
    int64_t seq, head_kv, first_token, n_tokens, first_key, end_key, key_job;
} job;

static job get_job(const plan * p, int64_t i) {
    job j;
    j.key_job     = i % p->key_jobs;
    i             = i / p->key_jobs;
    j.first_token = i % p->token_jobs * p->tokens_per_job;
    i             = i / p->token_jobs;
    j.head_kv     = i % p->n_head_kv;
    j.seq         = i / p->n_head_kv;
    j.n_tokens    = MIN(p->tokens_per_job, p->n_tokens - j.first_token);
    j.first_key   = j.key_job * p->keys_per_job;
    j.end_key     = MIN(j.first_key + p->keys_per_job, p->n_kv);
    return j;
}

// Reads the mask of a tile for every token of a job. False when no token sees any of its keys.
static bool load_mask(const plan * p, const job * j, int64_t key, int n_keys, float (*out)[TQ_TILE]) {
    const struct ggml_tensor * m    = p->mask;
    bool                       seen = false;
    for (int64_t t = 0; t < j->n_tokens; t++) {
        const char * row      = (const char *) m->data + (j->first_token + t) * m->nb[1] + j->seq % m->ne[3] * m->nb[3];
        const ggml_fp16_t * x = (const ggml_fp16_t *) row + key;
        for (int k = 0; k < n_keys; k++) {
            out[t][k] = GGML_FP16_TO_FP32(x[k]);
            seen |= out[t][k] != -INFINITY;
        }
    }
    return seen;
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

static void run_job(const plan * p, const job * j, thread_space * space, float * partials) {
    tq_attn_rows * rows = &space->rows;
    rows->n             = 0;
    for (int64_t t = 0; t < j->n_tokens; t++) {
        for (int64_t g = 0; g < p->group; g++) {
            const char * query = (const char *) p->q->data + (j->first_token + t) * p->q->nb[1] +
                                 (j->head_kv * p->group + g) * p->q->nb[2] + j->seq * p->q->nb[3];
            tq_attn_add_row(&p->attn, rows, (const float *) query);
            rows->mask[rows->n - 1] = p->mask != NULL ? space->mask[t] : NULL;
        }
    }
    const int64_t seq_kv = j->seq / (p->n_seq / p->k->ne[3]);
    const char *  keys   = (const char *) p->k->data + j->head_kv * p->k->nb[2] + seq_kv * p->k->nb[3];
    const char *  values = (const char *) p->v->data + j->head_kv * p->v->nb[2] + seq_kv * p->v->nb[3];
    for (int64_t key = j->first_key; key < j->end_key; key += TQ_TILE) {
        const int n_keys = (int) MIN(TQ_TILE, j->end_key - key);
        if (p->mask == NULL || load_mask(p, j, key, n_keys, space->mask)) {
            tq_attn_tile(&p->attn, rows, keys + key * p->k->nb[1], values + key * p->v->nb[1], n_keys);
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

bool tq_compute_forward(const struct ggml_compute_params * params, struct ggml_tensor * op) {
    // use_ref asks for ggml's own operator: the oracle of test-backend-ops
    if (params->use_ref || !is_ours(op)) {
        return false;
    }
    const plan     p        = make_plan(params->nth, op);
    thread_space * space    = (thread_space *) ((char *) params->wdata + space_bytes() * (size_t) params->ith);
    float *        partials = (float *) ((char *) params->wdata + space_bytes() * (size_t) params->nth);
    const int64_t  n_jobs   = p.token_jobs * p.n_head_kv * p.n_seq * p.key_jobs;

    if (params->ith == 0) {
        ggml_threadpool_chunk_set(params->threadpool, params->nth);
    }
    ggml_barrier(params->threadpool);
    for (int64_t i = params->ith; i < n_jobs; i = ggml_threadpool_chunk_add(params->threadpool, 1)) {
        const job j = get_job(&p, i);
        run_job(&p, &j, space, partials);
    }
    if (p.key_jobs > 1) {
        ggml_barrier(params->threadpool);
        const int64_t n_rows = p.n_tokens * p.n_head * p.n_seq;
        for (int64_t row = params->ith; row < n_rows; row += params->nth) {
            add_partials(&p, row, space->rows.acc, partials);
        }
    }
    return true;
}
