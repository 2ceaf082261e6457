// What tq-attn-bench is asked to measure.
#ifndef BENCH_ARGUMENTS_H
#define BENCH_ARGUMENTS_H

#include "ggml.h"

#define MAX_RUNS 32

typedef struct {
    int64_t n_q, n_kv, head_size, n_head, n_head_kv;  // set_rows writes n_kv tokens and has no queries
    int     threads, repeats;
    bool    by_token;
    bool    is_attention;  // else set_rows
} problem;

typedef struct {
    enum ggml_type type;
    bool           stock;  // llama.cpp's own attention
} candidate;

// Prints a line about what is wrong and ends the program with status 2.
_Noreturn void fail(const char * format, ...);

// Fills the problem and up to MAX_RUNS candidates, and returns their number; or fails.
int parse_arguments(int argc, char ** argv, problem * p, candidate * candidates);

#endif  // BENCH_ARGUMENTS_H
