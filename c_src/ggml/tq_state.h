// What goes into a saved KV cache besides llama.cpp's own: by what it was written, so that another model, type,
// rotation or calibration refuses it before anything is touched, and in files a checksum.
#ifndef TQ_STATE_H
#define TQ_STATE_H

#include "llama-io.h"

#include <cstdint>
#include <functional>
#include <string>

struct llama_context;

// Both first do what the cache has put off, shifts and copies of streams: a state cannot hold them, and done after a
// restore they would hit what was restored.
void tq_state_write(llama_io_write_i & io, llama_context & ctx);
void tq_state_read(llama_io_read_i & io, llama_context & ctx);  // throws std::runtime_error, which says what differs

#define TQ_SEAL_SIZE 16  // bytes at the end of a file

// Bytes of llama.cpp's session file before the seal.
size_t tq_state_file_size(llama_context & ctx, size_t n_tokens);

// Writes a file through write(path), which returns its bytes, 0 on failure: under another name first, so that no half
// file ever has the final one. Returns what write did; throws std::runtime_error.
size_t tq_state_save(const char * path, const std::function<size_t(const char *)> & write);

// Throws std::runtime_error for a file that tq_state_save did not finish, or that has changed since.
void tq_state_verify(const char * path);

// A checksum, not a signature.
struct tq_digest {
    uint64_t value = 0x9e3779b97f4a7c15u;

    void add(const void * data, size_t n);

    template <typename T> void add(const T & number) {
        add(&number, sizeof(number));
    }
};

#endif  // TQ_STATE_H
