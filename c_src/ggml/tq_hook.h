// The hook in ggml-cpu's traits.cpp: which graph nodes are computed here instead of by ggml's own operators.
#ifndef TQ_HOOK_H
#define TQ_HOOK_H

#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

struct ggml_compute_params;
struct ggml_tensor;

// Computes op and returns true, or returns false and leaves it to ggml. Called by every thread of the pool.
bool tq_compute_forward(const struct ggml_compute_params * params, struct ggml_tensor * op);

// Bytes of work space that tq_compute_forward needs for op; 0 when op is not ours.
size_t tq_work_size(int n_threads, const struct ggml_tensor * op);

// Gives f16, q8_0, q4_0 and iq4_nl caches back to ggml's own attention, as the environment variable TQ_ATTENTION=stock
// does, or takes them again. Not to be called while a graph is computed. tq3 and tq4 always come here.
void tq_attention_use_stock(bool stock);
bool tq_attention_uses_stock(void);

#ifdef __cplusplus
}
#endif

#endif  // TQ_HOOK_H
