// tq-attn-bench: times one layer's attention (FLASH_ATTN_EXT) over caches of several types, or writing into them
// (SET_ROWS), and prints one line of JSON for each.
//
// The types take turns, round after round, so that whatever else the machine does slows all of them alike; and between
// two turns of a type the others push its cache out of the processor's, as the other layers of a model would.
#define _POSIX_C_SOURCE 200112L

#include "bench_arguments.h"
#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"
#include "tq.h"
#include "tq_hook.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct {
    candidate            what;
    struct ggml_tensor * k, *v;  // the cache; set_rows has only k
    struct ggml_tensor * out;
    struct ggml_cgraph * graph;
    double *             ms;  // [repeats], sorted when all are there
} run;

// ---- data ----

// The same numbers in every run of the program (Box-Muller on xorshift64).
static void fill_gaussian(struct ggml_tensor * x, uint64_t seed) {
    for (int64_t i = 0; i < ggml_nelements(x); i++) {
        float u[2];
        for (int k = 0; k < 2; k++) {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            u[k] = ((float) (seed >> 40) + 0.5f) * 0x1p-24f;
        }
        ((float *) x->data)[i] = sqrtf(-2.0f * logf(u[0])) * cosf(6.2831853f * u[1]);
    }
}

static struct ggml_context * new_context(void) {
    const struct ggml_init_params params = { ggml_graph_overhead() + 16 * ggml_tensor_overhead(), NULL, true };
    return ggml_init(params);
}

static void place(ggml_backend_t cpu, struct ggml_context * ctx) {
    if (ggml_backend_alloc_ctx_tensors(ctx, cpu) == NULL) {
        fail("no memory for the tensors; make the problem smaller");
    }
}

static run new_run(const problem * p, candidate what) {
    run r = { .what = what, .ms = malloc((size_t) p->repeats * sizeof(double)) };
    if (r.ms == NULL) {
        fail("no memory for the times; choose fewer repeats");
    }
    return r;
}

static void set_output(run * r, struct ggml_context * ctx, struct ggml_tensor * out) {
    r->out   = out;
    r->graph = ggml_new_graph(ctx);
    ggml_build_forward_expand(r->graph, out);
}

// A cache as the operator sees it: [head_size][n_kv][n_head_kv].
static struct ggml_tensor * new_cache(struct ggml_context * ctx, const problem * p, enum ggml_type type) {
    if (!p->by_token) {
        return ggml_new_tensor_3d(ctx, type, p->head_size, p->n_kv, p->n_head_kv);
    }
    return ggml_permute(ctx, ggml_new_tensor_3d(ctx, type, p->head_size, p->n_head_kv, p->n_kv), 0, 2, 1, 3);
}

static char * row_of(const struct ggml_tensor * cache, int64_t head, int64_t key) {
    return (char *) cache->data + head * cache->nb[2] + key * cache->nb[1];
}

static void copy_cache(const struct ggml_tensor * cache, const struct ggml_tensor * f32) {
    const ggml_from_float_t from_float = ggml_get_type_traits_cpu(cache->type)->from_float;
    for (int64_t head = 0; head < cache->ne[2]; head++) {
        for (int64_t key = 0; key < cache->ne[1]; key++) {
            from_float((const float *) (const void *) row_of(f32, head, key), row_of(cache, head, key), cache->ne[0]);
        }
    }
}

// Causal: the queries are the last n_q of the n_kv tokens.
static void fill_mask(struct ggml_tensor * mask) {
    const int64_t     n_kv = mask->ne[0], n_q = mask->ne[1];
    ggml_fp16_t *     x      = mask->data;
    const ggml_fp16_t hidden = ggml_fp32_to_fp16(-INFINITY), seen = ggml_fp32_to_fp16(0.0f);
    for (int64_t i = 0; i < n_q * n_kv; i++) {
        x[i] = i % n_kv <= n_kv - n_q + i / n_kv ? seen : hidden;
    }
}

// ---- measuring ----

static int ascending(const void * a, const void * b) {
    const double x = *(const double *) a, y = *(const double *) b;
    return (x > y) - (x < y);
}

static double now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double) t.tv_sec * 1e3 + (double) t.tv_nsec * 1e-6;
}

static double compute(ggml_backend_t cpu, const run * r) {
    tq_attention_use_stock(r->what.stock);
    const double start = now_ms();
    if (ggml_backend_graph_compute(cpu, r->graph) != GGML_STATUS_SUCCESS) {
        fail("ggml could not compute %s", ggml_type_name(r->what.type));
    }
    return now_ms() - start;
}

static void measure(ggml_backend_t cpu, const problem * p, run * runs, int n) {
    for (int round = -1; round < p->repeats; round++) {  // the first one warms up
        for (int i = 0; i < n; i++) {
            const double ms = compute(cpu, &runs[i]);
            if (round >= 0) {
                runs[i].ms[round] = ms;
            }
        }
    }
    for (int i = 0; i < n; i++) {
        qsort(runs[i].ms, (size_t) p->repeats, sizeof(double), ascending);
    }
}

// Energy of the difference by that of the reference.
static double nmse(const struct ggml_tensor * x, const struct ggml_tensor * reference) {
    const float *a = x->data, *b = reference->data;
    double       error = 0, energy = 0;
    for (int64_t i = 0; i < ggml_nelements(x); i++) {
        error += ((double) a[i] - b[i]) * ((double) a[i] - b[i]);
        energy += (double) b[i] * b[i];
    }
    return error / energy;
}

static double median(const problem * p, const run * r) {
    return (r->ms[(p->repeats - 1) / 2] + r->ms[p->repeats / 2]) / 2;
}

static void print_common(const char * op, const problem * p, const run * r) {
    printf("{\"op\": \"%s\", \"simd\": \"%s\", \"threads\": %d, \"repeats\": %d, \"type\": \"%s\", \"n_kv\": %" PRId64
           ", \"head_size\": %" PRId64 ", \"n_head_kv\": %" PRId64 ", \"median_ms\": %.6f, \"min_ms\": %.6f, ",
           op, tq_simd_level(), p->threads, p->repeats, ggml_type_name(r->what.type), p->n_kv, p->head_size,
           p->n_head_kv, median(p, r), r->ms[0]);
}

// ---- the two operators; what they allocate lives until the program ends ----

static run new_attention(ggml_backend_t cpu, const problem * p, candidate what, struct ggml_tensor * q,
                         struct ggml_tensor * mask) {
    run                   r   = new_run(p, what);
    struct ggml_context * ctx = new_context();
    r.k                       = new_cache(ctx, p, what.type);
    r.v                       = new_cache(ctx, p, what.type);
    set_output(&r, ctx, ggml_flash_attn_ext(ctx, q, r.k, r.v, mask, 1.0f / sqrtf((float) p->head_size), 0.0f, 0.0f));
    place(cpu, ctx);
    return r;
}

static void attention(ggml_backend_t cpu, const problem * p, const candidate * candidates, int n) {
    struct ggml_context * inputs = new_context();
    struct ggml_tensor *  q      = ggml_new_tensor_3d(inputs, GGML_TYPE_F32, p->head_size, p->n_q, p->n_head);
    struct ggml_tensor *  mask   = ggml_new_tensor_2d(inputs, GGML_TYPE_F16, p->n_kv, p->n_q);
    place(cpu, inputs);
    fill_gaussian(q, 1);
    fill_mask(mask);
    // What the others are compared with; not timed.
    const run exact = new_attention(cpu, p, (candidate){ GGML_TYPE_F32, true }, q, mask);
    fill_gaussian(exact.k, 2);
    fill_gaussian(exact.v, 3);
    compute(cpu, &exact);

    run runs[MAX_RUNS];
    for (int i = 0; i < n; i++) {
        runs[i] = new_attention(cpu, p, candidates[i], q, mask);
        copy_cache(runs[i].k, exact.k);
        copy_cache(runs[i].v, exact.v);
    }
    measure(cpu, p, runs, n);
    for (int i = 0; i < n; i++) {
        const double loss = nmse(runs[i].out, exact.out);
        print_common("attention", p, &runs[i]);
        printf("\"n_q\": %" PRId64 ", \"n_head\": %" PRId64 ", \"layout\": \"%s\", \"path\": \"%s\", \"nmse\": ",
               p->n_q, p->n_head, p->by_token ? "by-token" : "by-head", runs[i].what.stock ? "stock" : "ours");
        printf(isfinite(loss) ? "%.3e}\n" : "null}\n", loss);
    }
}

static void set_rows(ggml_backend_t cpu, const problem * p, const candidate * candidates, int n) {
    const int64_t         row    = p->head_size * p->n_head_kv;
    struct ggml_context * inputs = new_context();
    struct ggml_tensor *  x      = ggml_new_tensor_2d(inputs, GGML_TYPE_F32, row, p->n_kv);
    struct ggml_tensor *  index  = ggml_new_tensor_1d(inputs, GGML_TYPE_I64, p->n_kv);
    place(cpu, inputs);
    fill_gaussian(x, 1);
    for (int64_t i = 0; i < p->n_kv; i++) {
        ((int64_t *) index->data)[i] = i;
    }
    run runs[MAX_RUNS];
    for (int i = 0; i < n; i++) {
        struct ggml_context * ctx = new_context();
        runs[i]                   = new_run(p, candidates[i]);
        runs[i].k                 = ggml_new_tensor_2d(ctx, candidates[i].type, row, p->n_kv);
        set_output(&runs[i], ctx, ggml_set_rows(ctx, runs[i].k, x, index));
        place(cpu, ctx);
    }
    measure(cpu, p, runs, n);
    for (int i = 0; i < n; i++) {
        print_common("set_rows", p, &runs[i]);
        printf("\"ns_per_value\": %.4f}\n", median(p, &runs[i]) * 1e6 / (double) (row * p->n_kv));
    }
}

int main(int argc, char ** argv) {
    problem        p;
    candidate      candidates[MAX_RUNS];
    const int      n   = parse_arguments(argc, argv, &p, candidates);
    ggml_backend_t cpu = ggml_backend_cpu_init();
    ggml_backend_cpu_set_n_threads(cpu, p.threads);
    (p.is_attention ? attention : set_rows)(cpu, &p, candidates, n);
    return 0;
}
