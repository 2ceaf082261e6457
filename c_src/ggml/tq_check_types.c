// Run by the build with the rows of tq_ggml/cache_types.py as arguments, each ID:NAME:BYTES: the patched ggml must
// agree.
#include "ggml.h"

#include <stdio.h>
#include <string.h>

int main(int argc, char ** argv) {
    for (int i = 1; i < argc; i++) {
        int    id;
        char   name[32];
        size_t bytes;
        if (sscanf(argv[i], "%d:%31[^:]:%zu", &id, name, &bytes) != 3) {
            fprintf(stderr, "tq-check-types: %s is not ID:NAME:BYTES\n", argv[i]);
            return 1;
        }
        const char * found = id < GGML_TYPE_COUNT ? ggml_type_name((enum ggml_type) id) : NULL;
        if (found == NULL || strcmp(found, name) != 0 || ggml_type_size((enum ggml_type) id) != bytes) {
            fprintf(stderr, "type %d should be %s of %zu bytes a block, but ggml says %s; see c_src/patches\n", id,
                    name, bytes, found != NULL ? found : "nothing");
            return 1;
        }
    }
    return argc > 1 ? 0 : 1;
}
