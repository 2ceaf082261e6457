#include "tq_state.h"

#include "ggml.h"
#include "llama-context.h"
#include "llama-impl.h"
#include "llama-model.h"
#include "tq_conditioner.h"
#include "tq_kv_access.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <vector>

// Raise it when what a cache's bytes mean has changed: a block's layout, or how keys are conditioned.
#define TQ_STATE_VERSION 1

using access = tq_kv_cache_access;

// Four lanes, so that the multiplications overlap: about as fast as memory.
void tq_digest::add(const void * data, size_t n) {
    constexpr uint64_t prime   = 0x9fb21c651e98df25u;
    const auto *       bytes   = (const uint8_t *) data;
    uint64_t           lane[4] = { value ^ n, value + 1, value + 2, value + 3 };
    const auto         mix     = [&](uint64_t x, uint64_t word) {
        x = (x ^ word) * prime;
        return x ^ (x >> 29);
    };
    for (; n >= sizeof(lane); n -= sizeof(lane), bytes += sizeof(lane)) {
        uint64_t words[4];
        memcpy(words, bytes, sizeof(words));
        for (int i = 0; i < 4; i++) {
            lane[i] = mix(lane[i], words[i]);
        }
    }
    uint64_t rest[4] = { 0 };
    memcpy(rest, bytes, n);
    for (int i = 0; i < 4; i++) {
        value = mix(value, mix(lane[i], rest[i]));
    }
}

// ---- what a cache depends on ----

namespace {

struct state_header {
    char     magic[4]     = { 'T', 'Q', 'S', 'T' };
    uint32_t version      = TQ_STATE_VERSION;
    uint64_t engine       = 0;  // the pinned llama.cpp, whose layout the rest has
    uint64_t model        = 0;
    uint64_t rope         = 0;
    uint64_t conditioning = 0;
    int32_t  type_k = -1, type_v = -1;
    uint16_t rotated_k = 0, rotated_v = 0, transposed_v = 0, reserved = 0;
};

}  // namespace

static uint64_t engine_digest() {
    const std::string versions = std::string(ggml_version()) + " " + std::to_string(LLAMA_SESSION_VERSION) + " " +
                                 std::to_string(LLAMA_STATE_SEQ_VERSION);
    tq_digest         d;
    d.add(versions.data(), versions.size());
    return d.value;
}

// Of RoPE what a user can set.
static uint64_t rope_digest(const llama_cparams & c) {
    tq_digest d;
    for (float x : { c.rope_freq_base, c.rope_freq_scale, c.yarn_ext_factor, c.yarn_attn_factor, c.yarn_beta_fast,
                     c.yarn_beta_slow }) {
        d.add(x);
    }
    d.add(c.n_ctx_orig_yarn);
    d.add(c.n_ctx_seq > c.n_ctx_orig_yarn);  // chooses between short and long factors
    return d.value;
}

static state_header header_of(const llama_context & ctx) {
    state_header h;
    tq_digest    conditioning;
    h.engine = engine_digest();
    h.model  = ctx.get_model().tq->digest;
    h.rope   = rope_digest(ctx.get_cparams());
    for (llama_kv_cache * kv : access::caches(llama_get_memory(&ctx))) {
        tq_conditioner::of(*kv).add_to(conditioning, ctx.get_cparams());
        if (access::n_layers(*kv) > 0) {
            h.type_k = kv->type_k();
            h.type_v = kv->type_v();
            h.rotated_k |= access::rotates_keys(*kv);
            h.rotated_v |= access::rotates_values(*kv);
            h.transposed_v |= !access::flash_attention(*kv);
        }
    }
    h.conditioning = conditioning.value;
    return h;
}

static void finish_updates(llama_context & ctx) {
    ctx.memory_update(false);
    ctx.synchronize();
}

void tq_state_write(llama_io_write_i & io, llama_context & ctx) {
    finish_updates(ctx);
    const state_header h = header_of(ctx);
    io.write(&h, sizeof(h));
}

static std::string type_names(const state_header & h) {
    const auto name = [](int32_t type) {
        return type >= 0 && type < GGML_TYPE_COUNT && ggml_type_name((ggml_type) type) != nullptr
                   ? ggml_type_name((ggml_type) type)
                   : "no known type";
    };
    return std::string(name(h.type_k)) + " keys and " + name(h.type_v) + " values";
}

static std::string difference(const state_header & saved, const state_header & here) {
    if (saved.version != here.version || saved.engine != here.engine) {
        return "another version of tq-ggml or llama.cpp";
    }
    if (saved.model != here.model) {
        return "another model";
    }
    if (saved.type_k != here.type_k || saved.type_v != here.type_v) {
        return type_names(saved) + ", and this context has " + type_names(here);
    }
    if (saved.rotated_k != here.rotated_k || saved.rotated_v != here.rotated_v) {
        return "another rotation of keys or values (LLAMA_ATTN_ROT_DISABLE)";
    }
    if (saved.transposed_v != here.transposed_v) {
        return saved.transposed_v ? "flash attention off" : "flash attention on";
    }
    if (saved.rope != here.rope) {
        return "other RoPE settings";
    }
    return saved.conditioning != here.conditioning ? "another calibration, or one for another context length" : "";
}

void tq_state_read(llama_io_read_i & io, llama_context & ctx) {
    finish_updates(ctx);
    const state_header here = header_of(ctx);
    state_header       saved;
    io.read(&saved, sizeof(saved));
    if (memcmp(saved.magic, here.magic, sizeof(here.magic)) != 0) {
        throw std::runtime_error("this is no state of tq-ggml's llama.cpp");
    }
    if (const std::string what = difference(saved, here); !what.empty()) {
        throw std::runtime_error("the state was saved with " + what);
    }
}

// ---- files ----

namespace fs = std::filesystem;

static const char SEAL[8] = { 'T', 'Q', 'S', 'E', 'A', 'L', '0', '1' };
static_assert(TQ_SEAL_SIZE == sizeof(SEAL) + sizeof(uint64_t));

static uint64_t digest_of(std::istream & in, size_t n) {
    std::vector<char> buffer(1 << 20);
    tq_digest         d;
    while (n > 0 && in.read(buffer.data(), (std::streamsize) std::min(n, buffer.size()))) {
        d.add(buffer.data(), (size_t) in.gcount());
        n -= (size_t) in.gcount();
    }
    return d.value;
}

size_t tq_state_file_size(llama_context & ctx, size_t n_tokens) {
    return 3 * sizeof(uint32_t) + n_tokens * sizeof(llama_token) + ctx.state_get_size();
}

static void seal(const fs::path & path, size_t n) {
    std::ifstream  in(path, std::ios::binary);
    const uint64_t digest = digest_of(in, n);
    in.close();
    std::ofstream out(path, std::ios::binary | std::ios::app);
    out.write((const char *) &digest, sizeof(digest));
    out.write(SEAL, sizeof(SEAL));
    out.close();
    if (!out || fs::file_size(path) != n + TQ_SEAL_SIZE) {
        throw std::runtime_error("it could not be written whole; is the disk full?");
    }
}

size_t tq_state_save(const char * path, const std::function<size_t(const char *)> & write) {
    const std::string part = std::string(path) + ".part";
    std::error_code   ignored;
    try {
        const size_t n = write(part.c_str());
        if (n > 0) {
            seal(fs::u8path(part), n);
            fs::rename(fs::u8path(part), fs::u8path(path));
        }
        return n;
    } catch (...) {
        fs::remove(fs::u8path(part), ignored);
        throw;
    }
}

void tq_state_verify(const char * path) {
    std::ifstream in(fs::u8path(path), std::ios::binary | std::ios::ate);
    if (!in) {
        throw std::runtime_error("it cannot be read");
    }
    const auto size = (size_t) in.tellg();
    uint64_t   digest;
    char       mark[sizeof(SEAL)];
    if (size <= TQ_SEAL_SIZE || !in.seekg((std::streamoff) (size - TQ_SEAL_SIZE)) ||
        !in.read((char *) &digest, sizeof(digest)) || !in.read(mark, sizeof(mark)) ||
        memcmp(mark, SEAL, sizeof(SEAL)) != 0) {
        throw std::runtime_error("it is cut short, or was not saved by tq-ggml's llama.cpp");
    }
    in.seekg(0);
    if (digest_of(in, size - TQ_SEAL_SIZE) != digest) {
        throw std::runtime_error("it is damaged");
    }
}
