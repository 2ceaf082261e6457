// tq: the tq3 and tq4 block codecs of a TurboQuant KV cache (arXiv 2504.19874, MSE stage).
//
// A block is 32 values: an fp16 scale and 32 codes. Values are rotated by a signed Walsh-Hadamard transform, so a
// stored coordinate is close to Gaussian and one fixed codebook fits all data. See docs/codec.md for the layout and the
// encoder.
//
// Rows are arrays of blocks; every count is in values and must be a multiple of TQ_BLOCK. Functions named *_row have
// the signatures of ggml's type traits, check nothing and must be given whole blocks; tq_quantize() and friends check.
#ifndef TQ_H
#define TQ_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(_WIN32)
#    ifdef TQ_BUILD
#        define TQ_API __declspec(dllexport)
#    else
#        define TQ_API __declspec(dllimport)
#    endif
#else
#    define TQ_API __attribute__((visibility("default")))
#endif

#define TQ_BLOCK 32

// Packed: a row of blocks may start at any byte.
#pragma pack(push, 1)

// 3.5 bits a value: magnitude index (2 bits) and sign (1 bit) in two planes. Four adjacent elements, the 32-bit word of
// a dot product, have their signs in one bit of four bytes.
typedef struct {
    uint16_t d;         // fp16 scale; value = d * level / 32
    uint8_t  qs[8];     // byte j: magnitude indices of elements j, j+8, j+16, j+24 at bits 0, 2, 4, 6
    uint8_t  signs[4];  // bit j of byte m: element 4j + m is negative
} tq3_block;

// 4.5 bits a value.
typedef struct {
    uint16_t d;       // fp16 scale; value = d * level / 32
    uint8_t  qs[16];  // byte j: element j in the low nibble, j+16 in the high one; bit 3 of a code is the sign
} tq4_block;

#pragma pack(pop)

// A rotated query block in int8: what a key block is dotted with. Never stored in a cache.
typedef struct {
    float  d;
    int8_t qs[TQ_BLOCK];
} tq_query_block;

typedef enum { TQ_TYPE_TQ3, TQ_TYPE_TQ4, TQ_TYPE_COUNT } tq_type;

typedef struct {
    const char * name;
    size_t       block_bytes;
} tq_type_info;

// NULL when there is no such type.
TQ_API const tq_type_info * tq_get_type_info(int type);

// The name of the kernels that run: scalar, avx2, avx512bw, avx512 (with VNNI), neon or dotprod. Chosen once, from the
// CPU and the environment variable TQ_SIMD; a TQ_SIMD that cannot run here is reported on stderr and the best level is
// used.
TQ_API const char * tq_simd_level(void);

// The i-th level that this CPU can run, best first; NULL past the last.
TQ_API const char * tq_simd_available(int i);

// Switches to a level by name; "avx512" stands for avx512bw on a CPU without VNNI. False, and no change, when it cannot
// run here. Not to be called while another thread encodes or decodes.
TQ_API bool tq_set_simd_level(const char * name);

// Checked entry points. They return NULL on success, or what is wrong as a static sentence.
TQ_API const char * tq_quantize(int type, const float * src, int64_t n, void * dst, size_t dst_bytes);
TQ_API const char * tq_dequantize(int type, const void * src, size_t src_bytes, float * dst, int64_t n);
TQ_API const char * tq_dot(int type, const void * rows, size_t rows_bytes, int64_t n_rows, const float * query,
                           int64_t n, float * results);

// Rows for ggml's tables. NaN is encoded as 0; what lies beyond +-65504, infinities included, as +-65504.
TQ_API void tq3_quantize_row(const float * src, void * dst, int64_t n);
TQ_API void tq4_quantize_row(const float * src, void * dst, int64_t n);
TQ_API void tq3_dequantize_row(const void * src, float * dst, int64_t n);
TQ_API void tq4_dequantize_row(const void * src, float * dst, int64_t n);
TQ_API void tq3_vec_dot(int n, float * s, size_t bs, const void * x, size_t bx, const void * query, size_t by, int nrc);
TQ_API void tq4_vec_dot(int n, float * s, size_t bs, const void * x, size_t bx, const void * query, size_t by, int nrc);
TQ_API void tq_query_row(const float * src, void * dst, int64_t n);

// The reference: plain C, the specification of every byte.
TQ_API void tq3_quantize_row_ref(const float * src, void * dst, int64_t n);
TQ_API void tq4_quantize_row_ref(const float * src, void * dst, int64_t n);
TQ_API void tq3_dequantize_row_ref(const void * src, float * dst, int64_t n);
TQ_API void tq4_dequantize_row_ref(const void * src, float * dst, int64_t n);
TQ_API void tq_query_row_ref(const float * src, void * dst, int64_t n);

#ifdef __cplusplus
}
#endif

#endif  // TQ_H
