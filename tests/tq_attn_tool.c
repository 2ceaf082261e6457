// tq_attn_tool < problem > result: attention by the tile core, for tests of every SIMD level, emulated Arm included.
//
// problem: int32 type_k, type_v, head_k, head_v, n_rows, n_keys; float scale, softcap; then float
// queries[n_rows][head_k], keys[n_keys][head_k], values[n_keys][head_v], mask[n_rows][n_keys]. result:
// float[n_rows][head_v].
#include "tq_attn.h"

#include <stdio.h>
#include <stdlib.h>

static void * read_or_die(size_t bytes) {
    void * data = malloc(bytes > 0 ? bytes : 1);
    if (data == NULL || fread(data, 1, bytes, stdin) != bytes) {
        fprintf(stderr, "tq_attn_tool: the problem is shorter than it says\n");
        exit(2);
    }
    return data;
}

// Reads n rows of floats and encodes them.
static char * read_encoded(int type, int n, int head) {
    const size_t bytes = (size_t) head / TQ_BLOCK * tq_get_type_info(type)->block_bytes * (size_t) n;
    float *      x     = read_or_die((size_t) n * (size_t) head * sizeof(float));
    char *       data  = malloc(bytes);
    const char * error = tq_quantize(type, x, (int64_t) n * head, data, bytes);
    if (error != NULL) {
        fprintf(stderr, "tq_attn_tool: %s\n", error);
        exit(2);
    }
    free(x);
    return data;
}

int main(void) {
    int32_t * size   = read_or_die(6 * sizeof(int32_t));
    float *   scale  = read_or_die(2 * sizeof(float));
    tq_attn   a      = { .type_k = size[0], .type_v = size[1], .head_k = size[2], .head_v = size[3] };
    const int n_rows = size[4], n_keys = size[5];
    a.scale    = scale[0];
    a.softcap  = scale[1];
    a.stride_k = (size_t) a.head_k / TQ_BLOCK * tq_get_type_info(a.type_k)->block_bytes;
    a.stride_v = (size_t) a.head_v / TQ_BLOCK * tq_get_type_info(a.type_v)->block_bytes;

    float *        queries = read_or_die((size_t) n_rows * (size_t) a.head_k * sizeof(float));
    char *         keys    = read_encoded(a.type_k, n_keys, a.head_k);
    char *         values  = read_encoded(a.type_v, n_keys, a.head_v);
    float *        mask    = read_or_die((size_t) n_rows * (size_t) n_keys * sizeof(float));
    tq_attn_rows * rows    = malloc(sizeof(tq_attn_rows));
    float *        out     = malloc((size_t) a.head_v * sizeof(float));

    fprintf(stderr, "%s\n", tq_simd_level());
    rows->n = 0;
    for (int r = 0; r < n_rows; r++) {
        tq_attn_add_row(&a, rows, queries + (size_t) r * a.head_k);
    }
    for (int k = 0; k < n_keys; k += TQ_TILE) {
        for (int r = 0; r < n_rows; r++) {
            rows->mask[r] = mask + (size_t) r * n_keys + k;
        }
        tq_attn_tile(&a, rows, keys + k * a.stride_k, values + k * a.stride_v,
                     n_keys - k < TQ_TILE ? n_keys - k : TQ_TILE);
    }
    for (int r = 0; r < n_rows; r++) {
        tq_attn_finish(&a, rows->sum[r], rows->acc + (size_t) r * a.head_v, out);
        fwrite(out, sizeof(float), (size_t) a.head_v, stdout);
    }
    free(size), free(scale), free(queries), free(keys), free(values), free(mask), free(rows), free(out);
    return 0;
}
