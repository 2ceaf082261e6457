// tq_flash_attn_tool RUN... < problem > results: one FLASH_ATTN_EXT of the patched ggml on its CPU, computed once for
// each RUN: a number of threads, or "ref" for ggml's own reference operator on one.
//
// problem: float scale, max_bias, softcap; the key mean's int32 n_rot, n_fast, is_neox, block; then the operator's
// tensors q, k, v, mask, sinks, and of a key mean cells, turns and mean, each int64 type, ne[4], nb[4], n_bytes and its
// bytes. A type of -1 is a tensor that is not there; all from mask on may be. results: one after another,
// float[n_seq][n_tokens][n_head][head_v].
//
// Each tensor, the result and the work space lie in a buffer of their own, no larger than they must be.
#include "ggml-cpu.h"
#include "ggml.h"
#include "tq_flash_attn.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { N_SRC = TQ_SRC_MEAN + 1 };

static void die(const char * why) {
    fprintf(stderr, "tq_flash_attn_tool: %s\n", why);
    exit(2);
}

static void read_or_die(void * data, size_t bytes) {
    if (data == NULL || fread(data, 1, bytes, stdin) != bytes) {
        die("the problem is shorter than it says");
    }
}

static struct ggml_tensor * read_tensor(struct ggml_context * ctx) {
    int64_t head[10];
    read_or_die(head, sizeof(head));
    if (head[0] < 0) {
        return NULL;
    }
    struct ggml_tensor * t = ggml_new_tensor(ctx, (enum ggml_type) head[0], 4, head + 1);
    for (int i = 0; i < 4; i++) {
        t->nb[i] = (size_t) head[5 + i];
    }
    t->data = malloc((size_t) head[9]);
    read_or_die(t->data, (size_t) head[9]);
    return t;
}

static void compute(struct ggml_cgraph * graph, struct ggml_tensor * out, const char * run) {
    const bool ref       = strcmp(run, "ref") == 0;
    const int  n_threads = ref ? 1 : atoi(run);
    if (n_threads < 1) {
        die("a run is a number of threads or ref");
    }
    struct ggml_cplan plan = ggml_graph_plan(graph, n_threads, NULL);
    plan.use_ref           = ref;
    plan.work_data         = malloc(plan.work_size > 0 ? plan.work_size : 1);
    out->data              = malloc(ggml_nbytes(out));
    memset(out->data, 0xff, ggml_nbytes(out));  // NaN, until it is written
    memset(plan.work_data, 0xff, plan.work_size);
    if (ggml_graph_compute(graph, &plan) != GGML_STATUS_SUCCESS) {
        die("ggml could not compute the graph");
    }
    fwrite(out->data, 1, ggml_nbytes(out), stdout);
    free(out->data);
    free(plan.work_data);
}

int main(int argc, char ** argv) {
    ggml_cpu_init();
    struct ggml_context * ctx = ggml_init((struct ggml_init_params){ .mem_size = 1 << 20, .no_alloc = true });
    float                 param[3];
    int32_t               shape[4];
    read_or_die(param, sizeof(param));
    read_or_die(shape, sizeof(shape));
    struct ggml_tensor * src[N_SRC];
    for (int i = 0; i < N_SRC; i++) {
        src[i] = read_tensor(ctx);
    }
    struct ggml_tensor * out = ggml_flash_attn_ext(ctx, src[0], src[1], src[2], src[3], param[0], param[1], param[2]);
    ggml_flash_attn_ext_add_sinks(out, src[4]);
    if (src[TQ_SRC_MEAN] != NULL) {
        tq_flash_attn_set_mean(out, src[TQ_SRC_CELLS], src[TQ_SRC_TURNS], src[TQ_SRC_MEAN], shape[0], shape[1],
                               shape[2], shape[3]);
    }
    struct ggml_cgraph * graph = ggml_new_graph(ctx);
    ggml_build_forward_expand(graph, out);
    for (int i = 1; i < argc; i++) {
        compute(graph, out, argv[i]);
    }
    for (int i = 0; i < N_SRC; i++) {
        free(src[i] ? src[i]->data : NULL);
    }
    ggml_free(ctx);
    return 0;
}
