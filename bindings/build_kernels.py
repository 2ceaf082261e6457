"""The cffi definition of tq_ggml._kernels: libtq's checked entry points. CMake turns it into C (API mode, abi3)."""

from cffi import FFI

ffibuilder = FFI()

ffibuilder.cdef("""
    typedef struct {
        const char * name;
        size_t       block_bytes;
    } tq_type_info;

    const tq_type_info * tq_get_type_info(int type);

    const char * tq_simd_level(void);
    const char * tq_simd_available(int i);
    bool tq_set_simd_level(const char * name);

    const char * tq_quantize(int type, const float * src, int64_t n, void * dst, size_t dst_bytes);
    const char * tq_dequantize(int type, const void * src, size_t src_bytes, float * dst, int64_t n);
    const char * tq_dot(int type, const void * rows, size_t rows_bytes, int64_t n_rows, const float * query, int64_t n,
                        float * results);
""")

ffibuilder.set_source("tq_ggml._kernels", '#include "tq.h"')
