#include "tq_hook.h"

#include "ggml-cpu-impl.h"
#include "tq_flash_attn.h"
#include "tq_set_rows.h"

bool tq_compute_forward(const struct ggml_compute_params * params, struct ggml_tensor * op) {
    if (params->use_ref) {
        return false;  // ggml's own operators, the oracle of test-backend-ops
    }
    switch (op->op) {
        case GGML_OP_FLASH_ATTN_EXT:
            return tq_flash_attn(params, op);
        case GGML_OP_SET_ROWS:
            return tq_set_rows(params, op);
        default:
            return false;
    }
}

size_t tq_work_size(int n_threads, const struct ggml_tensor * op) {
    return op->op == GGML_OP_FLASH_ATTN_EXT ? tq_flash_attn_work_size(n_threads, op) : 0;
}
