#include "tq_constants.h"

#include "gguf.h"
#include "llama-model-loader.h"
#include "tq_conditioner.h"
#include "tq_state.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#define CALIBRATION_VERSION 2  // tq_ggml/calibration.py, VERSION
#define MAX_LAYERS          10000

static int64_t find(const gguf_context * metadata, const std::string & key, gguf_type type) {
    const int64_t at = gguf_find_key(metadata, ("tq_ggml." + key).c_str());
    return at >= 0 && gguf_get_kv_type(metadata, at) == type ? at : -1;
}

static uint32_t number(const gguf_context * metadata, const std::string & key) {
    const int64_t at = find(metadata, key, GGUF_TYPE_UINT32);
    return at >= 0 ? gguf_get_val_u32(metadata, at) : 0;
}

static std::vector<float> array(const gguf_context * metadata, const std::string & key, size_t n) {
    const int64_t at = find(metadata, key, GGUF_TYPE_ARRAY);
    if (at < 0 || gguf_get_arr_type(metadata, at) != GGUF_TYPE_FLOAT32 || gguf_get_arr_n(metadata, at) == 0 ||
        (n != 0 && gguf_get_arr_n(metadata, at) != n)) {
        throw std::runtime_error("tq_ggml." + key + " is missing or of another size");
    }
    const float *      data = (const float *) gguf_get_arr_data(metadata, at);
    std::vector<float> out(data, data + gguf_get_arr_n(metadata, at));
    for (float x : out) {
        if (!std::isfinite(x)) {
            throw std::runtime_error("tq_ggml." + key + " has values that are not finite");
        }
    }
    return out;
}

static tq_stored_moments read_layer(const gguf_context * metadata, const std::string & layer, uint32_t n_head_kv) {
    tq_stored_moments s;
    s.variance = array(metadata, layer + "key_variance", 0);
    if (s.variance.size() % n_head_kv != 0) {
        throw std::runtime_error("tq_ggml." + layer + "head_count_kv does not go with its arrays");
    }
    const size_t n  = s.variance.size();
    s.n_head_kv     = (int) n_head_kv;
    s.head_size     = (int) (n / n_head_kv);
    s.mean          = array(metadata, layer + "key_mean", n);
    s.start         = array(metadata, layer + "key_start", n);
    s.covariance    = array(metadata, layer + "key_covariance", n);
    s.query_energy  = array(metadata, layer + "query_energy", n);
    s.query_product = array(metadata, layer + "query_product", n);
    return s;
}

static bool has_constants(const gguf_context * metadata) {
    return gguf_find_key(metadata, "tq_ggml.version") >= 0;
}

static void read_constants(const gguf_context * metadata, tq_model_facts & facts) {
    try {
        if (const uint32_t version = number(metadata, "version"); version != CALIBRATION_VERSION) {
            throw std::runtime_error("it has version " + std::to_string(version) + ", and this build reads " +
                                     std::to_string(CALIBRATION_VERSION));
        }
        for (int il = 0; il < MAX_LAYERS; il++) {
            const std::string layer = "layer." + std::to_string(il) + ".";
            if (const uint32_t n_head_kv = number(metadata, layer + "head_count_kv")) {
                facts.layers[il] = read_layer(metadata, layer, n_head_kv);
            }
        }
    } catch (const std::runtime_error & problem) {
        facts.layers.clear();
        facts.problem = problem.what();
    }
}

// Of every tensor its name, type, shape and a few bytes from the middle. Read from the file, because what is in memory
// depends on the backend.
static uint64_t digest_of_tensors(llama_model_loader & loader) {
    tq_digest d;
    for (const auto & [name, weight] : loader.weights_map) {
        char         bytes[64];
        const size_t size = ggml_nbytes(weight.tensor), n = std::min(size, sizeof(bytes));
        d.add(name.data(), name.size());
        d.add(weight.tensor->type);
        d.add(weight.tensor->ne);
        if (weight.idx < loader.files.size() && n > 0) {
            llama_file & file = *loader.files[weight.idx];
            file.seek(weight.offs + (size - n) / 2, SEEK_SET);
            file.read_raw(bytes, n);
            d.add(bytes, n);
        }
    }
    return d.value;
}

std::shared_ptr<const tq_model_facts> tq_read_model(llama_model_loader & loader) {
    auto facts = std::make_shared<tq_model_facts>();
    if (has_constants(loader.metadata)) {
        read_constants(loader.metadata, *facts);
    }
    facts->digest = digest_of_tensors(loader);
    return facts;
}

std::shared_ptr<const tq_model_facts> tq_read_side_file(const char * path) {
    auto                   facts = std::make_shared<tq_model_facts>();
    const gguf_context_ptr metadata(gguf_init_from_file(path, { /* .no_alloc = */ true, /* .ctx = */ nullptr }));
    if (metadata == nullptr) {
        facts->problem = "it cannot be read as a GGUF";
    } else if (!has_constants(metadata.get())) {
        facts->problem = "it holds no calibration";
    } else {
        read_constants(metadata.get(), *facts);
    }
    return facts;
}
