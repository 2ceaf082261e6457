// The cache types by the names that users give them, for llama.cpp's own programs (tq_ggml/cache_types.py has the
// same).
#ifndef TQ_TYPE_NAMES_H
#define TQ_TYPE_NAMES_H

#include "ggml.h"

#include <string.h>

// GGML_TYPE_COUNT: none of ours.
static inline enum ggml_type tq_type_from_name(const char * name) {
    static const struct {
        const char *   name;
        enum ggml_type type;
    } names[] = {
        { "tq3", GGML_TYPE_TQ3 },    { "tq4", GGML_TYPE_TQ4 },  { "turbo3", GGML_TYPE_TQ3 },
        { "turbo4", GGML_TYPE_TQ4 }, { "tbq3", GGML_TYPE_TQ3 }, { "tbq4", GGML_TYPE_TQ4 },
    };
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        if (strcmp(name, names[i].name) == 0) {
            return names[i].type;
        }
    }
    return GGML_TYPE_COUNT;
}

#endif  // TQ_TYPE_NAMES_H
