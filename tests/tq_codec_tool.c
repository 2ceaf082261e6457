// Runs the codec's rows on one SIMD level, for tests/codec_tool.py to compare:
//
//   tq_codec_tool tq3|tq4 values|blocks < records > results
//
// A record is a row of 128 keys (float values, or blocks to be taken as they are) and a row of 128 query values. Its
// result: the blocks, the decoded row, the query's blocks, the dot product. The SIMD level goes to stderr.
#include "tq.h"

#include <stdio.h>
#include <string.h>

enum { ROW = 128, ROW_BLOCKS = ROW / TQ_BLOCK };

typedef struct {
    void (*quantize_row)(const float * src, void * dst, int64_t n);
    void (*dequantize_row)(const void * src, float * dst, int64_t n);
    void (*vec_dot)(int n, float * s, size_t bs, const void * x, size_t bx, const void * query, size_t by, int nrc);
} rows;

static const rows ROWS[TQ_TYPE_COUNT] = {
    [TQ_TYPE_TQ3] = { tq3_quantize_row, tq3_dequantize_row, tq3_vec_dot },
    [TQ_TYPE_TQ4] = { tq4_quantize_row, tq4_dequantize_row, tq4_vec_dot },
};

static int find_type(const char * name) {
    int type = 0;
    while (tq_get_type_info(type) != NULL && strcmp(tq_get_type_info(type)->name, name) != 0) {
        type++;
    }
    return type;
}

static bool read_exactly(void * dst, size_t bytes) {
    return fread(dst, 1, bytes, stdin) == bytes;
}

static bool answer_record(int type, bool from_values) {
    const size_t   row_bytes = ROW_BLOCKS * tq_get_type_info(type)->block_bytes;
    float          values[ROW], query[ROW], dot;
    tq4_block      blocks[ROW_BLOCKS];  // the largest type's
    tq_query_block query_blocks[ROW_BLOCKS];
    if (!(from_values ? read_exactly(values, sizeof(values)) : read_exactly(blocks, row_bytes)) ||
        !read_exactly(query, sizeof(query))) {
        return false;
    }
    if (from_values) {
        ROWS[type].quantize_row(values, blocks, ROW);
    }
    ROWS[type].dequantize_row(blocks, values, ROW);
    tq_query_row(query, query_blocks, ROW);
    ROWS[type].vec_dot(ROW, &dot, 0, blocks, 0, query_blocks, 0, 1);

    fwrite(blocks, 1, row_bytes, stdout);
    fwrite(values, 1, sizeof(values), stdout);
    fwrite(query_blocks, 1, sizeof(query_blocks), stdout);
    fwrite(&dot, 1, sizeof(dot), stdout);
    return true;
}

int main(int argc, char ** argv) {
    const int type = argc == 3 ? find_type(argv[1]) : TQ_TYPE_COUNT;
    if (tq_get_type_info(type) == NULL || (strcmp(argv[2], "values") != 0 && strcmp(argv[2], "blocks") != 0)) {
        fprintf(stderr, "usage: tq_codec_tool tq3|tq4 values|blocks < records > results\n");
        return 2;
    }
    fprintf(stderr, "level: %s\n", tq_simd_level());
    while (answer_record(type, strcmp(argv[2], "values") == 0)) {
    }
    return ferror(stdin) || ferror(stdout) || fflush(stdout) ? 1 : 0;
}
