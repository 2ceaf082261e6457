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

#define TQ_TYPE_KERNELS(type, suffix) \
    { type##_quantize_row_##suffix, type##_dequantize_row_##suffix, type##_vec_dot_##suffix }
#define TQ_KERNELS(level, suffix, runs_here)                          \
    { level,                                                          \
      runs_here,                                                      \
      { TQ_TYPE_KERNELS(tq3, suffix), TQ_TYPE_KERNELS(tq4, suffix) }, \
      tq_query_row_##suffix,                                          \
      tq_attn_tile_##suffix,                                          \
      tq_attn_finish_##suffix }

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

static const tq_kernels * best_level(void) {
    const tq_kernels * level = LEVELS;
    while (!level->runs_here()) {
        level++;
    }
    return level;
}

// NULL when there is none of that name, or when it cannot run here.
static const tq_kernels * find_level(const char * name) {
    for (int i = 0; i < N_LEVELS; i++) {
        const bool stands_for = strcmp(name, "avx512") == 0 && strcmp(LEVELS[i].name, "avx512bw") == 0;
        if ((stands_for || strcmp(LEVELS[i].name, name) == 0) && LEVELS[i].runs_here()) {
            return &LEVELS[i];
        }
    }
    return NULL;
}

__attribute__((constructor)) static void choose_level(void) {
    active              = best_level();
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

// In stretches, so that the rotated query needs no allocation and is made once for all rows.
const char * tq_dot(int type, const void * rows, size_t rows_bytes, int64_t n_rows, const float * query, int64_t n,
                    float * results) {
    enum { STRETCH = 32 };
    const char * error = check_row(type, n * n_rows, rows_bytes);
    if (error != NULL || n % TQ_BLOCK != 0) {
        return error != NULL ? error : "the number of values must be a multiple of 32";
    }
    const size_t block_bytes = TYPES[type].block_bytes;
    const size_t stride      = (size_t) (n / TQ_BLOCK) * block_bytes;
    memset(results, 0, (size_t) n_rows * sizeof(float));
    for (int64_t ib = 0; ib < n / TQ_BLOCK; ib += STRETCH) {
        const int64_t  left   = n - ib * TQ_BLOCK;
        const int      length = (int) (left < STRETCH * TQ_BLOCK ? left : STRETCH * TQ_BLOCK);
        tq_query_block q[STRETCH];
        active->query_row(query + ib * TQ_BLOCK, q, length);
        for (int64_t row = 0; row < n_rows; row++) {
            float part;
            active->type[type].vec_dot(length, &part, 0, (const char *) rows + row * stride + ib * block_bytes, 0, q, 0,
                                       1);
            results[row] += part;
        }
    }
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

const tq_cache_type_info tq_cache_types[TQ_CACHE_COUNT] = {
    [TQ_CACHE_TQ3]    = { sizeof(tq3_block), TQ_LEVEL_STEP, true },
    [TQ_CACHE_TQ4]    = { sizeof(tq4_block), TQ_LEVEL_STEP, true },
    [TQ_CACHE_Q4_0]   = { 18, 1.0f, false },
    [TQ_CACHE_IQ4_NL] = { 18, 1.0f, false },
    [TQ_CACHE_Q8_0]   = { 34, 1.0f, false },
    [TQ_CACHE_F16]    = { 64, 1.0f, false },
};

size_t tq_cache_block_bytes(tq_cache_type type) {
    return tq_cache_types[type].block_bytes;
}

// A block of a query in int8, as tq_query_row makes it, without the rotation.
static void round_query(const float * query, tq_query_block * q) {
    float max_abs = 0.0f;
    for (int i = 0; i < TQ_BLOCK; i++) {
        max_abs = fmaxf(max_abs, fabsf(query[i]));
    }
    q->d           = max_abs * (1.0f / 127.0f);
    const float id = q->d >= 1e-30f ? 1.0f / q->d : 0.0f;
    for (int i = 0; i < TQ_BLOCK; i++) {
        q->qs[i] = (int8_t) lrintf(query[i] * id);
    }
}

// For the levels that multiply in int16: of four elements the even ones, then the odd ones, as sign extension in place
// leaves a key's. And the sum, for those whose keys have a bias.
static void prepare_query(const tq_query_block * q, int16_t * pairs, int32_t * sum) {
    *sum = 0;
    for (int i = 0; i < TQ_BLOCK; i++) {
        pairs[(i & ~3) | (i & 1) << 1 | (i & 2) >> 1] = q->qs[i];
        *sum += q->qs[i];
    }
}

static float product(const float * x, const float * y, int first, int end) {
    float sum = 0.0f;
    for (int i = first; i < end; i++) {
        sum += x[i] * y[i];
    }
    return sum;
}

// query . (mean turned by an angle) is, for each pair, cos * (qa ma + qb mb) + sin * (qb cb - qa ca).
static void turn_query(const tq_key_mean * m, int head_k, const float * query, float * turned, float * fixed) {
    const int half = m->n_rot / 2, n_fast = m->n_fast, n_slow = half - n_fast;
    memset(turned, 0, (size_t) (2 * n_fast + tq_mean_slow(m)) * sizeof(float));
    for (int i = 0; i < half; i++) {
        const int a                      = m->is_neox ? i : 2 * i;
        const int b                      = m->is_neox ? i + half : 2 * i + 1;
        float *   to                     = i < n_fast ? turned + i : turned + n_fast + i;
        to[0]                            = query[a] * m->mean[a] + query[b] * m->mean[b];
        to[i < n_fast ? n_fast : n_slow] = query[b] * m->crossed[b] - query[a] * m->crossed[a];
    }
    *fixed = product(query, m->mean, m->n_rot, head_k);
}

void tq_attn_add_row(const tq_attn * a, tq_attn_rows * rows, const float * query) {
    const int        n_blocks = a->head_k / TQ_BLOCK;
    const int        row      = rows->n++;
    const int        first    = row * n_blocks;
    const bool       rotates  = tq_cache_types[a->type_k].rotates;
    tq_query_block * q        = rows->query_i8 + first;
    if (rotates) {
        active->query_row(query, q, a->head_k);
    }
    for (int ib = 0; ib < n_blocks; ib++) {
        if (!rotates) {
            round_query(query + ib * TQ_BLOCK, &q[ib]);
        }
        prepare_query(&q[ib], rows->query_i16[first + ib], &rows->query_sum[first + ib]);
    }
    for (int i = 0; i < a->head_k; i++) {
        const tq_query_block * block     = &q[i / TQ_BLOCK];
        rows->query[row * a->head_k + i] = rotates ? block->d * (float) block->qs[i % TQ_BLOCK] : query[i];
    }
    if (a->key_mean.table != NULL) {
        float * turned = rows->mean_turned + row * (2 * a->key_mean.n_fast + tq_mean_slow(&a->key_mean));
        turn_query(&a->key_mean, a->head_k, query, turned, &rows->mean_fixed[row]);
        rows->mean_window[row] = -1;
        rows->mean_start[row]  = product(query, a->key_mean.start, 0, a->head_k);
    }
    rows->max[row]   = -INFINITY;
    rows->sum[row]   = 0.0f;
    rows->mask[row]  = NULL;
    rows->slope[row] = 1.0f;
    memset(rows->acc + row * a->head_v, 0, (size_t) a->head_v * sizeof(float));
}

void tq_attn_tile(const tq_attn * a, tq_attn_rows * rows, const char * keys, const char * values, int n_keys) {
    active->attn_tile(a, rows, keys, values, n_keys);
}

void tq_attn_finish(const tq_attn * a, float sum, const float * acc, float * dst) {
    active->attn_finish(a, sum, acc, dst);
}
