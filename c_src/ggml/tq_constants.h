// What we need to know of a model's file: the constants of key conditioning in its metadata, for programs that have no
// tq_ggml to read them, and which model it is.
#ifndef TQ_CONSTANTS_H
#define TQ_CONSTANTS_H

#include <memory>

struct llama_model_loader;
struct tq_model_facts;

std::shared_ptr<const tq_model_facts> tq_read_model(llama_model_loader & loader);
std::shared_ptr<const tq_model_facts> tq_read_side_file(const char * path);

#endif  // TQ_CONSTANTS_H
