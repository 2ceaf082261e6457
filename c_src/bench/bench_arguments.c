#include "bench_arguments.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_VALUES (INT64_C(1) << 28)  // of a tensor, in f32 a gigabyte

static const char USAGE[] =
    "usage: tq-attn-bench attention N_Q N_KV HEAD_SIZE N_HEAD N_HEAD_KV THREADS REPEATS TYPES [by-token]\n"
    "       tq-attn-bench set_rows N_TOKENS HEAD_SIZE N_HEAD_KV THREADS REPEATS TYPES\n"
    "TYPES: f16, q8_0, q4_0, iq4_nl, tq4, tq3, joined by commas; f16@stock is llama.cpp's own attention over f16.\n"
    "by-token: heads side by side in a token's row, as llama.cpp's cache has them; else one head's keys are "
    "together.\n";

static const enum ggml_type TYPES[] = { GGML_TYPE_F16,    GGML_TYPE_Q8_0, GGML_TYPE_Q4_0,
                                        GGML_TYPE_IQ4_NL, GGML_TYPE_TQ4,  GGML_TYPE_TQ3 };

_Noreturn void fail(const char * format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fputs("tq-attn-bench: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    exit(2);
}

static int64_t parse_number(const char * name, const char * text, int64_t max) {
    char *          end;
    const long long n = strtoll(text, &end, 10);
    if (*end != '\0' || end == text || n < 1 || n > max) {
        fail("%s is '%s'; give a whole number from 1 to %" PRId64, name, text, max);
    }
    return n;
}

static candidate parse_type(const char * text) {
    candidate    r    = { .type = GGML_TYPE_COUNT };
    const char * at   = strchr(text, '@');
    const size_t size = at != NULL ? (size_t) (at - text) : strlen(text);
    for (size_t i = 0; i < sizeof(TYPES) / sizeof(TYPES[0]); i++) {
        const char * name = ggml_type_name(TYPES[i]);
        r.type            = strlen(name) == size && strncmp(name, text, size) == 0 ? TYPES[i] : r.type;
    }
    r.stock = at != NULL && strcmp(at, "@stock") == 0;
    if (r.type == GGML_TYPE_COUNT || (at != NULL && !r.stock)) {
        fail("unknown type '%s'; choose f16, q8_0, q4_0, iq4_nl, tq4 or tq3, the first four with or without @stock",
             text);
    }
    if (r.stock && (r.type == GGML_TYPE_TQ3 || r.type == GGML_TYPE_TQ4)) {
        fail("'%s': tq3 and tq4 are always attended by tq-ggml; leave @stock out", text);
    }
    return r;
}

static int parse_types(char * text, int64_t head_size, candidate * candidates) {
    int n = 0;
    for (char * name = strtok(text, ","); name != NULL; name = strtok(NULL, ",")) {
        if (n == MAX_RUNS) {
            fail("more than %d types", MAX_RUNS);
        }
        candidates[n]       = parse_type(name);
        const int64_t block = ggml_blck_size(candidates[n++].type);
        if (head_size % block != 0) {
            fail("head size %" PRId64 " is no multiple of the %" PRId64 " values of a block of %s", head_size, block,
                 name);
        }
    }
    if (n == 0) {
        fail("no type given; for example f16@stock,tq4");
    }
    return n;
}

static problem parse_problem(char ** v, bool attention) {
    problem p   = { .is_attention = attention };
    p.n_q       = attention ? parse_number("N_Q", *v++, 65536) : 0;
    p.n_kv      = parse_number(attention ? "N_KV" : "N_TOKENS", *v++, 1 << 24);
    p.head_size = parse_number("HEAD_SIZE", *v++, 4096);
    p.n_head    = attention ? parse_number("N_HEAD", *v++, 1024) : 0;
    p.n_head_kv = parse_number("N_HEAD_KV", *v++, 1024);
    p.threads   = (int) parse_number("THREADS", *v++, GGML_MAX_N_THREADS);
    p.repeats   = (int) parse_number("REPEATS", *v++, 100000);
    if (p.n_q > p.n_kv) {
        fail("%" PRId64 " queries, but only %" PRId64 " keys; the queries are the last of these tokens", p.n_q, p.n_kv);
    }
    if (p.n_head % p.n_head_kv != 0) {
        fail("%" PRId64 " heads cannot share %" PRId64 " KV heads evenly; choose a multiple", p.n_head, p.n_head_kv);
    }
    if (p.n_kv * p.head_size * p.n_head_kv > MAX_VALUES || p.n_q * p.n_kv > MAX_VALUES) {
        fail("more than %" PRId64 " values; choose fewer tokens", MAX_VALUES);
    }
    return p;
}

int parse_arguments(int argc, char ** argv, problem * p, candidate * candidates) {
    const bool attention = argc > 1 && strcmp(argv[1], "attention") == 0;
    const int  n         = attention ? 10 : 8;
    const bool by_token  = attention && argc == n + 1 && strcmp(argv[n], "by-token") == 0;
    if (argc != n + by_token || (!attention && strcmp(argv[1], "set_rows") != 0)) {
        fputs(USAGE, stderr);
        exit(2);
    }
    *p          = parse_problem(argv + 2, attention);
    p->by_token = by_token;
    return parse_types(argv[n - 1], p->head_size, candidates);
}
