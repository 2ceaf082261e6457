// What ggml's RPC backend needs to know of us; ggml-rpc.cpp includes this and nothing else of ours.
#ifndef TQ_RPC_H
#define TQ_RPC_H

#include "ggml.h"

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

// Both sides must agree on type ids, block layouts and what our operators are given: TQ_RPC_BUILD is a hash of the
// sources that say so. It travels in the two bytes of the greeting that ggml's own check leaves alone.
extern "C" {
GGML_BACKEND_API int tq_rpc_build(void);
}

int tq_rpc_build(void) {
    return TQ_RPC_BUILD;
}

static inline void tq_rpc_sign(uint8_t & low, uint8_t & high) {
    low  = TQ_RPC_BUILD & 0xff;
    high = TQ_RPC_BUILD >> 8;
}

static inline bool tq_rpc_same_build(uint8_t low, uint8_t high) {
    if ((low | high << 8) == TQ_RPC_BUILD) {
        return true;
    }
    fprintf(stderr,
            "tq-ggml: the RPC server is of build %04x, and this program of %04x; start the ggml-rpc-server that "
            "was built with it\n",
            low | high << 8, TQ_RPC_BUILD);
    return false;
}

// Ops that call a function of this process: no other can run them.
static inline bool tq_rpc_stays_here(const ggml_tensor * op) {
    return op->op == GGML_OP_CUSTOM || op->op == GGML_OP_MAP_CUSTOM1 || op->op == GGML_OP_MAP_CUSTOM2 ||
           op->op == GGML_OP_MAP_CUSTOM3;
}

// A server that cannot be reached, or is gone, is no fault of this program's, and a stack trace would say nothing. ggml
// knows no way back from here.
[[noreturn]] static inline void tq_rpc_give_up(const char * format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fflush(stdout);
    fputs("tq-ggml: RPC: ", stderr);
    vfprintf(stderr, format, arguments);
    fputs("\ntq-ggml: see that ggml-rpc-server runs there (docs/rpc.md), and start again\n", stderr);
    va_end(arguments);
    _Exit(1);
}

#undef GGML_ABORT
#define GGML_ABORT(...) tq_rpc_give_up(__VA_ARGS__)

#endif  // TQ_RPC_H
