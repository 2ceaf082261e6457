// SET_ROWS into tq3 and tq4: how a token's keys and values enter the cache. ggml gives whole rows to its threads; a
// token being decoded is one long row, of all heads, so that here a row is cut into segments.
#include "tq_set_rows.h"

#include "ggml-cpu-impl.h"
#include "ggml-impl.h"
#include "ggml.h"
#include "tq.h"

#define SEGMENT 512  // values; less is not worth a thread's while

static bool is_ours(const struct ggml_tensor * op) {
    const struct ggml_tensor *src = op->src[0], *index = op->src[1];
    return (op->type == GGML_TYPE_TQ3 || op->type == GGML_TYPE_TQ4) && src->type == GGML_TYPE_F32 &&
           src->nb[0] == sizeof(float) && op->nb[0] == ggml_type_size(op->type) &&
           (index->type == GGML_TYPE_I64 || index->type == GGML_TYPE_I32);
}

static int64_t index_at(const struct ggml_tensor * index, int64_t i0, int64_t i1, int64_t i2) {
    const char * p = (const char *) index->data + i0 * index->nb[0] + i1 * index->nb[1] + i2 * index->nb[2];
    return index->type == GGML_TYPE_I64 ? *(const int64_t *) (const void *) p : *(const int32_t *) (const void *) p;
}

// One segment of row i1 of src, in plane (i2, i3).
static void set_segment(struct ggml_tensor * op, int64_t i1, int64_t i2, int64_t i3, int64_t segment) {
    const struct ggml_tensor *src = op->src[0], *index = op->src[1];
    const int64_t             row = index_at(index, i1, i2 % index->ne[1], i3 % index->ne[2]);
    GGML_ASSERT(row >= 0 && row < op->ne[1]);
    const int64_t first = segment * SEGMENT;
    const int64_t n     = MIN(SEGMENT, src->ne[0] - first);
    const char *  from  = (const char *) src->data + i1 * src->nb[1] + i2 * src->nb[2] + i3 * src->nb[3];
    char *        to    = (char *) op->data + row * op->nb[1] + i2 * op->nb[2] + i3 * op->nb[3];
    (op->type == GGML_TYPE_TQ3 ? tq3_quantize_row : tq4_quantize_row)((const float *) (const void *) from + first,
                                                                      to + ggml_row_size(op->type, first), n);
}

bool tq_set_rows(const struct ggml_compute_params * params, struct ggml_tensor * op) {
    if (!is_ours(op)) {
        return false;
    }
    const int64_t * ne         = op->src[0]->ne;
    const int64_t   n_segments = (ne[0] + SEGMENT - 1) / SEGMENT;
    const int64_t   n          = n_segments * ne[1] * ne[2] * ne[3];
    const int64_t   end        = n * (params->ith + 1) / params->nth;
    for (int64_t i = n * params->ith / params->nth; i < end; i++) {
        const int64_t row = i / n_segments;
        set_segment(op, row % ne[1], row / ne[1] % ne[2], row / ne[1] / ne[2], i % n_segments);
    }
    return true;
}
