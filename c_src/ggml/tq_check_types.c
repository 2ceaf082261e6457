// Run by the build: the patched ggml must answer our names under the ids that tq_ggml/cache_types.py lists.
#include "ggml.h"

#include <stdio.h>
#include <string.h>

int main(void) {
    static const struct {
        int          id;
        const char * name;
        size_t       size;
    } expected[] = { { 43, "tq3", 14 }, { 44, "tq4", 18 } };

    for (size_t i = 0; i < sizeof(expected) / sizeof(expected[0]); i++) {
        const char * name = expected[i].id < GGML_TYPE_COUNT ? ggml_type_name((enum ggml_type) expected[i].id) : NULL;
        if (name == NULL || strcmp(name, expected[i].name) != 0 ||
            ggml_type_size((enum ggml_type) expected[i].id) != expected[i].size) {
            fprintf(stderr, "type %d should be %s of %zu bytes a block, but ggml says %s; see c_src/patches\n",
                    expected[i].id, expected[i].name, expected[i].size, name != NULL ? name : "nothing");
            return 1;
        }
    }
    return 0;
}
