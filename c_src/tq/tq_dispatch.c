// Which kernels run: one table, best level first, chosen once from the CPU, the operating system and TQ_SIMD.
#include "tq_impl.h"

#include <stdio.h>
#include <stdlib.h>

#if defined(__x86_64__) || defined(_M_X64)
#    define TQ_X86 1
#    include <cpuid.h>
#elif defined(__aarch64__)
#    define TQ_ARM 1
#    if defined(__linux__)
#        include <sys/auxv.h>
#    elif defined(__APPLE__)
#        include <sys/sysctl.h>
#    endif
#endif

#ifdef TQ_X86
// A level needs the instructions (CPUID) and an operating system that saves their registers (XCR0).
static bool cpuid_leaf7(unsigned * ebx, unsigned * ecx) {
    unsigned eax, edx;
    return __get_cpuid_count(7, 0, &eax, ebx, ecx, &edx);
}

static bool os_saves(unsigned xcr0_bits) {
    unsigned eax, ebx, ecx, edx;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !(ecx & bit_OSXSAVE)) {
        return false;
    }
    unsigned low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low & xcr0_bits) == xcr0_bits;
}

static bool has_avx2(void) {
    const unsigned need = bit_F16C | bit_FMA | bit_AVX;
    unsigned       eax, ebx, ecx, edx, ebx7, ecx7;
    return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & need) == need && cpuid_leaf7(&ebx7, &ecx7) &&
           (ebx7 & bit_AVX2) && os_saves(0x6);
}

static bool has_avx512bw(void) {
    const unsigned need = bit_AVX512F | bit_AVX512BW | bit_AVX512VL | bit_AVX512DQ;
    unsigned       ebx, ecx;
    return has_avx2() && cpuid_leaf7(&ebx, &ecx) && (ebx & need) == need && os_saves(0xe6);
}

static bool has_avx512(void) {
    unsigned ebx, ecx;
    return has_avx512bw() && cpuid_leaf7(&ebx, &ecx) && (ecx & bit_AVX512VNNI);
}
#endif

#ifdef TQ_ARM
static bool has_neon(void) {
    return true;  // part of the architecture
}

static bool has_dotprod(void) {
#    if defined(__linux__)
    return (getauxval(AT_HWCAP) & (1ul << 20)) != 0;  // HWCAP_ASIMDDP
#    elif defined(__APPLE__)
    int    value = 0;
    size_t size  = sizeof(value);
    return sysctlbyname("hw.optional.arm.FEAT_DotProd", &value, &size, NULL, 0) == 0 && value;
#    else
    return false;
#    endif
}
#endif

static bool always(void) {
    return true;
}

#define TQ_KERNELS(level, suffix, runs_here)                                                \
    { level,                                                                                \
      runs_here,                                                                            \
      { { tq3_quantize_row_##suffix, tq3_dequantize_row_##suffix, tq3_vec_dot_##suffix },   \
        { tq4_quantize_row_##suffix, tq4_dequantize_row_##suffix, tq4_vec_dot_##suffix } }, \
      tq_query_row_##suffix }

static const tq_kernels LEVELS[] = {
#ifdef TQ_X86
    TQ_KERNELS("avx512", avx512, has_avx512),    TQ_KERNELS("avx512bw", avx512bw, has_avx512bw),
    TQ_KERNELS("avx2", avx2, has_avx2),
#endif
#ifdef TQ_ARM
    TQ_KERNELS("dotprod", dotprod, has_dotprod), TQ_KERNELS("neon", neon, has_neon),
#endif
    TQ_KERNELS("scalar", ref, always),
};

enum { N_LEVELS = sizeof(LEVELS) / sizeof(LEVELS[0]) };

static const tq_type_info TYPES[TQ_TYPE_COUNT] = {
    [TQ_TYPE_TQ3] = { "tq3", sizeof(tq3_block) },
    [TQ_TYPE_TQ4] = { "tq4", sizeof(tq4_block) },
};

// Set once before main (or the first dlopen) returns, so that no call pays for a check and no two threads race.
static const tq_kernels * active = &LEVELS[N_LEVELS - 1];

// By prefix, so that "avx512" means the best AVX-512 level this CPU has.
static const tq_kernels * find_level(const char * name) {
    for (int i = 0; i < N_LEVELS; i++) {
        if (strncmp(LEVELS[i].name, name, strlen(name)) == 0 && LEVELS[i].runs_here()) {
            return &LEVELS[i];
        }
    }
    return NULL;
}

__attribute__((constructor)) static void choose_level(void) {
    active              = find_level("");
    const char * forced = getenv("TQ_SIMD");
    if (forced == NULL || forced[0] == '\0') {
        return;
    }
    const tq_kernels * level = find_level(forced);
    if (level == NULL) {
        fprintf(stderr, "tq-ggml: TQ_SIMD=%s cannot run here; using %s. Levels here:", forced, active->name);
        for (int i = 0; tq_simd_available(i) != NULL; i++) {
            fprintf(stderr, " %s", tq_simd_available(i));
        }
        fprintf(stderr, "\n");
        return;
    }
    active = level;
}

const char * tq_simd_level(void) {
    return active->name;
}

const char * tq_simd_available(int i) {
    for (int level = 0; level < N_LEVELS && i >= 0; level++) {
        if (LEVELS[level].runs_here() && i-- == 0) {
            return LEVELS[level].name;
        }
    }
    return NULL;
}

bool tq_set_simd_level(const char * name) {
    const tq_kernels * level = find_level(name);
    if (level == NULL) {
        return false;
    }
    active = level;
    return true;
}

const tq_type_info * tq_get_type_info(int type) {
    return type >= 0 && type < TQ_TYPE_COUNT ? &TYPES[type] : NULL;
}

static const char * check_row(int type, int64_t n, size_t bytes) {
    if (tq_get_type_info(type) == NULL) {
        return "no such type";
    }
    if (n < 0 || n % TQ_BLOCK != 0) {
        return "the number of values must be a multiple of 32";
    }
    if ((uint64_t) n / TQ_BLOCK != bytes / TYPES[type].block_bytes || bytes % TYPES[type].block_bytes != 0) {
        return "the number of bytes does not fit the number of values";
    }
    return NULL;
}

const char * tq_quantize(int type, const float * src, int64_t n, void * dst, size_t dst_bytes) {
    const char * error = check_row(type, n, dst_bytes);
    if (error == NULL) {
        active->type[type].quantize_row(src, dst, n);
    }
    return error;
}

const char * tq_dequantize(int type, const void * src, size_t src_bytes, float * dst, int64_t n) {
    const char * error = check_row(type, n, src_bytes);
    if (error == NULL) {
        active->type[type].dequantize_row(src, dst, n);
    }
    return error;
}

const char * tq_dot(int type, const void * x, size_t x_bytes, const float * query, int64_t n, float * result) {
    const char * error = check_row(type, n, x_bytes);
    if (error != NULL) {
        return error;
    }
    double sum = 0.0;
    for (int64_t ib = 0; ib < n / TQ_BLOCK; ib++) {
        tq_query_block q;
        float          part;
        active->query_row(query + ib * TQ_BLOCK, &q, TQ_BLOCK);
        active->type[type].vec_dot(TQ_BLOCK, &part, 0, (const char *) x + ib * TYPES[type].block_bytes, 0, &q, 0, 1);
        sum += part;
    }
    *result = (float) sum;
    return NULL;
}

void tq3_quantize_row(const float * src, void * dst, int64_t n) {
    active->type[TQ_TYPE_TQ3].quantize_row(src, dst, n);
}

void tq4_quantize_row(const float * src, void * dst, int64_t n) {
    active->type[TQ_TYPE_TQ4].quantize_row(src, dst, n);
}

void tq3_dequantize_row(const void * src, float * dst, int64_t n) {
    active->type[TQ_TYPE_TQ3].dequantize_row(src, dst, n);
}

void tq4_dequantize_row(const void * src, float * dst, int64_t n) {
    active->type[TQ_TYPE_TQ4].dequantize_row(src, dst, n);
}

void tq3_vec_dot(int n, float * s, size_t bs, const void * x, size_t bx, const void * query, size_t by, int nrc) {
    active->type[TQ_TYPE_TQ3].vec_dot(n, s, bs, x, bx, query, by, nrc);
}

void tq4_vec_dot(int n, float * s, size_t bs, const void * x, size_t bx, const void * query, size_t by, int nrc) {
    active->type[TQ_TYPE_TQ4].vec_dot(n, s, bs, x, bx, query, by, nrc);
}

void tq_query_row(const float * src, void * dst, int64_t n) {
    active->query_row(src, dst, n);
}
