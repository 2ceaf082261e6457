// The rows and case labels that tq3 and tq4 add to ggml's tables; the patched ggml includes this and nothing else of
// ours.
#ifndef TQ_TYPE_TRAITS_H
#define TQ_TYPE_TRAITS_H

#include "tq.h"

// ggml.c, type_traits. The query type is what a cached row is dotted with: it is quantised and dotted, never stored.
#define TQ_TYPE_TRAITS \
    [GGML_TYPE_TQ3] = {                                      \
        .type_name      = "tq3",                             \
        .blck_size      = TQ_BLOCK,                          \
        .type_size      = sizeof(tq3_block),                 \
        .is_quantized   = true,                              \
        .to_float       = tq3_dequantize_row,                \
        .from_float_ref = tq3_quantize_row_ref,              \
    },                                                       \
    [GGML_TYPE_TQ4] = {                                      \
        .type_name      = "tq4",                             \
        .blck_size      = TQ_BLOCK,                          \
        .type_size      = sizeof(tq4_block),                 \
        .is_quantized   = true,                              \
        .to_float       = tq4_dequantize_row,                \
        .from_float_ref = tq4_quantize_row_ref,              \
    },                                                       \
    [GGML_TYPE_TQ_QUERY] = {                                 \
        .type_name    = "tq_query",                          \
        .blck_size    = TQ_BLOCK,                            \
        .type_size    = sizeof(tq_query_block),              \
        .is_quantized = true,                                \
    },

// ggml-cpu.c, type_traits_cpu.
#define TQ_TYPE_TRAITS_CPU \
    [GGML_TYPE_TQ3] = {                                      \
        .from_float   = tq3_quantize_row,                    \
        .vec_dot      = tq3_vec_dot,                         \
        .vec_dot_type = GGML_TYPE_TQ_QUERY,                  \
        .nrows        = 1,                                   \
    },                                                       \
    [GGML_TYPE_TQ4] = {                                      \
        .from_float   = tq4_quantize_row,                    \
        .vec_dot      = tq4_vec_dot,                         \
        .vec_dot_type = GGML_TYPE_TQ_QUERY,                  \
        .nrows        = 1,                                   \
    },                                                       \
    [GGML_TYPE_TQ_QUERY] = {                                 \
        .from_float = tq_query_row,                          \
    },

// llama-kv-cache.cpp: these types rotate by themselves, so the graph must not (docs/rotation.md has the measurement).
#define TQ_TYPE_ROTATES(type) ((type) == GGML_TYPE_TQ3 || (type) == GGML_TYPE_TQ4)

// Switches over quantised types.
#define TQ_TYPE_CASES   \
    case GGML_TYPE_TQ3: \
    case GGML_TYPE_TQ4:

// ggml.c, ggml_quantize_chunk.
#define TQ_QUANTIZE_CHUNK_CASES                                                                \
    case GGML_TYPE_TQ3:                                                                        \
    case GGML_TYPE_TQ4:                                                                        \
        type_traits[type].from_float_ref(src + start, (char *) dst + start_row * row_size, n); \
        result = nrows * row_size;                                                             \
        break;

#endif  // TQ_TYPE_TRAITS_H
