// Reading the constants of key conditioning from GGUF metadata, for programs that have no tq_ggml to do it.
#ifndef TQ_CONSTANTS_H
#define TQ_CONSTANTS_H

#include <memory>

struct gguf_context;
struct tq_model_constants;

// NULL where there are none.
std::shared_ptr<const tq_model_constants> tq_read_constants(const gguf_context * metadata);
std::shared_ptr<const tq_model_constants> tq_read_constants(const char * path);

#endif  // TQ_CONSTANTS_H
