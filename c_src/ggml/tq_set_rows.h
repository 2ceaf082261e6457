// SET_ROWS; see tq_hook.h.
#ifndef TQ_SET_ROWS_H
#define TQ_SET_ROWS_H

#include <stdbool.h>

struct ggml_compute_params;
struct ggml_tensor;

bool tq_set_rows(const struct ggml_compute_params * params, struct ggml_tensor * op);

#endif  // TQ_SET_ROWS_H
