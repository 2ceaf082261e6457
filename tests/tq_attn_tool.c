// tq_attn_tool < problem > result: attention by the tile core, for tests of every SIMD level, emulated Arm included.
//
// problem: int32 type_k, type_v (tq_cache_type), head_k, head_v, n_rows, n_keys, stride_k, stride_v; the key mean's
// n_rot, n_fast, is_neox, block_log2, n_blocks (0: no mean) and bytes of its table; float scale, softcap,
// slope[n_rows]; int32 has_mask[n_rows]; float queries[n_rows][head_k]; the cache's bytes: keys, a stride apart, then
// values; of a key mean float table[], mean, crossed and start [head_k] each, int32 positions[n_keys]; for each row
// with a mask, fp16 mask[n_keys]. result: float[n_rows][head_v].
//
// Keys, values and each mask lie in a buffer of their own that ends with the last of them, so that the address
// sanitizer sees what is read past them.
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

// n rows of a cache; what would lie between the last one and the next is not there.
static char * read_cache(tq_cache_type type, int head, size_t stride, int n) {
    const size_t row = (size_t) head / TQ_BLOCK * tq_cache_block_bytes(type);
    return read_or_die((size_t) (n - 1) * stride + row);
}

int main(void) {
    int32_t * size   = read_or_die(14 * sizeof(int32_t));
    float *   scale  = read_or_die(2 * sizeof(float));
    const int n_rows = size[4], n_keys = size[5];
    tq_attn   a = {
        .type_k = (tq_cache_type) size[0], .type_v = (tq_cache_type) size[1], .head_k = size[2], .head_v = size[3]
    };
    a.stride_k = (size_t) size[6];
    a.stride_v = (size_t) size[7];
    a.scale    = scale[0];
    a.softcap  = scale[1];

    float *    slope     = read_or_die((size_t) n_rows * sizeof(float));
    int32_t *  has_mask  = read_or_die((size_t) n_rows * sizeof(int32_t));
    float *    queries   = read_or_die((size_t) n_rows * (size_t) a.head_k * sizeof(float));
    char *     keys      = read_cache(a.type_k, a.head_k, a.stride_k, n_keys);
    char *     values    = read_cache(a.type_v, a.head_v, a.stride_v, n_keys);
    const bool has_mean  = size[12] > 0;
    float *    table     = read_or_die(has_mean ? (size_t) size[13] : 0);
    float *    mean      = read_or_die(has_mean ? (size_t) a.head_k * sizeof(float) : 0);
    float *    crossed   = read_or_die(has_mean ? (size_t) a.head_k * sizeof(float) : 0);
    float *    start     = read_or_die(has_mean ? (size_t) a.head_k * sizeof(float) : 0);
    int32_t *  positions = read_or_die(has_mean ? (size_t) n_keys * sizeof(int32_t) : 0);
    a.key_mean           = (tq_key_mean){ has_mean ? table : NULL, mean,     crossed, start, size[8], size[9],
                                          size[10] != 0,           size[11], size[12] };
    uint16_t * mask[TQ_MAX_ROWS];
    for (int r = 0; r < n_rows; r++) {
        mask[r] = has_mask[r] ? read_or_die((size_t) n_keys * sizeof(uint16_t)) : NULL;
    }
    tq_attn_rows * rows = malloc(sizeof(tq_attn_rows));
    float *        out  = malloc((size_t) a.head_v * sizeof(float));

    fprintf(stderr, "%s\n", tq_simd_level());
    rows->n = 0;
    for (int r = 0; r < n_rows; r++) {
        tq_attn_add_row(&a, rows, queries + (size_t) r * a.head_k);
        rows->slope[r] = slope[r];
    }
    for (int k = 0; k < n_keys; k += TQ_TILE) {
        for (int r = 0; r < n_rows; r++) {
            rows->mask[r] = mask[r] ? mask[r] + k : NULL;
        }
        rows->positions = positions + k;
        tq_attn_tile(&a, rows, keys + k * a.stride_k, values + k * a.stride_v,
                     n_keys - k < TQ_TILE ? n_keys - k : TQ_TILE);
    }
    for (int r = 0; r < n_rows; r++) {
        tq_attn_finish(&a, rows->sum[r], rows->acc + (size_t) r * a.head_v, out);
        fwrite(out, sizeof(float), (size_t) a.head_v, stdout);
        free(mask[r]);
    }
    free(size), free(scale), free(slope), free(has_mask), free(queries), free(keys), free(values), free(rows);
    free(out), free(table), free(mean), free(crossed), free(start), free(positions);
    return 0;
}
