// FLASH_ATTN_EXT; see tq_hook.h.
#ifndef TQ_FLASH_ATTN_H
#define TQ_FLASH_ATTN_H

#include <stdbool.h>
#include <stddef.h>

struct ggml_compute_params;
struct ggml_tensor;

bool   tq_flash_attn(const struct ggml_compute_params * params, struct ggml_tensor * op);
size_t tq_flash_attn_work_size(int n_threads, const struct ggml_tensor * op);

#endif  // TQ_FLASH_ATTN_H
