// A problem of attention in floats, as an operation of ggml and in float64.
#pragma once

#include "ggml-cpu.h"
#include "ggml.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

using Numbers = std::vector<float>;

struct Problem {
    int key_size = 64, value_size = 64;
    int num_heads = 1, num_kv_heads = 1;
    int num_rows = 1, num_cells = 1, num_streams = 1;
    int num_mask_heads = 1;             // 0: no mask
    bool are_values_in_keys = false;    // V is the beginning of K, as latent attention has it
    ggml_type key_type = GGML_TYPE_F16, value_type = GGML_TYPE_F16;
    float scale = 1.0f, max_bias = 0.0f, softcap = 0.0f;
    Numbers queries;  // [stream][head][row][key_size]
    Numbers keys;     // [stream][cell][KV head][key_size]
    Numbers values;   // [stream][cell][KV head][value_size]
    Numbers masks;    // [stream][mask head][row][cell]
    Numbers sinks;    // [head], or none

    size_t query_at(int stream, int head, int row) const {
        return (((size_t) stream * num_heads + head) * num_rows + row) * key_size;
    }

    size_t cell_at(int stream, int cell) const { return ((size_t) stream * num_cells + cell) * num_kv_heads; }

    size_t mask_at(int stream, int head, int row) const {
        return (((size_t) stream * num_mask_heads + head % num_mask_heads) * num_rows + row) * num_cells;
    }

    size_t result_at(int stream, int row, int head) const {
        return (((size_t) stream * num_rows + row) * num_heads + head) * value_size;
    }

    size_t num_results() const { return result_at(num_streams, 0, 0); }
};

// Rows as they lie in a cache. Where a row begins with what is not a number, all of its bytes are ones, which is no
// number in any type.
inline std::vector<char> packed(const Numbers & numbers, ggml_type type, int size) {
    const size_t row_bytes = ggml_row_size(type, size), num_rows = numbers.size() / size;
    std::vector<char> bytes(num_rows * row_bytes);
    for (size_t row = 0; row < num_rows; ++row) {
        const float * from = numbers.data() + row * size;
        char * to = bytes.data() + row * row_bytes;
        if (std::isnan(from[0])) {
            memset(to, 0xff, row_bytes);
        } else if (type == GGML_TYPE_F32) {
            memcpy(to, from, row_bytes);
        } else {
            ggml_get_type_traits(type)->from_float_ref(from, to, size);
        }
    }
    return bytes;
}

inline Numbers rounded_as_in_cache(const Numbers & numbers, ggml_type type, int size) {
    if (type == GGML_TYPE_F32) {
        return numbers;
    }
    const std::vector<char> bytes = packed(numbers, type, size);
    Numbers rounded(numbers.size());
    for (size_t row = 0; row < numbers.size() / size; ++row) {
        const char * from = bytes.data() + row * ggml_row_size(type, size);
        ggml_get_type_traits(type)->to_float(from, rounded.data() + row * size, size);
    }
    return rounded;
}

// The operation, ready to be computed again and again.
class Graph {
public:
    explicit Graph(const Problem & problem) {
        const std::vector<char> keys = packed(problem.keys, problem.key_type, problem.key_size);
        const std::vector<char> values = packed(problem.values, problem.value_type, problem.value_size);
        const size_t num_floats = problem.queries.size() + problem.num_results() + problem.masks.size();
        const size_t overhead = 4 << 20;
        context_ = ggml_init({keys.size() + values.size() + num_floats * sizeof(float) + overhead, nullptr, false});
        ggml_tensor * q = ggml_new_tensor_4d(
            context_, GGML_TYPE_F32, problem.key_size, problem.num_rows, problem.num_heads, problem.num_streams);
        memcpy(q->data, problem.queries.data(), problem.queries.size() * sizeof(float));
        ggml_tensor * k = cache(problem, problem.key_type, problem.key_size, keys);
        ggml_tensor * v = nullptr;
        if (problem.are_values_in_keys) {
            v = ggml_view_4d(
                context_, k, problem.value_size, k->ne[1], k->ne[2], k->ne[3], k->nb[1], k->nb[2], k->nb[3], 0);
        } else {
            v = cache(problem, problem.value_type, problem.value_size, values);
        }
        result_ = ggml_flash_attn_ext(
            context_, q, k, v, mask(problem), problem.scale, problem.max_bias, problem.softcap);
        if (!problem.sinks.empty()) {
            ggml_tensor * sinks = ggml_new_tensor_1d(context_, GGML_TYPE_F32, problem.num_heads);
            memcpy(sinks->data, problem.sinks.data(), problem.sinks.size() * sizeof(float));
            ggml_flash_attn_ext_add_sinks(result_, sinks);
        }
        graph_ = ggml_new_graph(context_);
        ggml_build_forward_expand(graph_, result_);
    }

    ~Graph() { ggml_free(context_); }

    Graph(const Graph &) = delete;
    Graph & operator=(const Graph &) = delete;

    void compute(int num_threads) {
        ggml_cplan plan = ggml_graph_plan(graph_, num_threads, nullptr);
        std::vector<uint8_t> work(plan.work_size);
        plan.work_data = work.data();
        ggml_graph_compute(graph_, &plan);
    }

    Numbers result(int num_threads) {
        compute(num_threads);
        const float * numbers = (const float *) result_->data;
        return Numbers(numbers, numbers + ggml_nelements(result_));
    }

private:
    ggml_tensor * cache(const Problem & problem, ggml_type type, int size, const std::vector<char> & bytes) {
        ggml_tensor * all = ggml_new_tensor_4d(
            context_, type, size, problem.num_kv_heads, problem.num_cells, problem.num_streams);
        memcpy(all->data, bytes.data(), bytes.size());
        return ggml_permute(context_, all, 0, 2, 1, 3);
    }

    ggml_tensor * mask(const Problem & problem) {
        if (problem.num_mask_heads == 0) {
            return nullptr;
        }
        ggml_tensor * mask = ggml_new_tensor_4d(
            context_, GGML_TYPE_F16, problem.num_cells, problem.num_rows, problem.num_mask_heads, problem.num_streams);
        ggml_fp32_to_fp16_row(problem.masks.data(), (ggml_fp16_t *) mask->data, problem.masks.size());
        return mask;
    }

    ggml_context * context_;
    ggml_cgraph * graph_;
    ggml_tensor * result_;
};

inline double slope_of_head(const Problem & problem, int head) {
    if (problem.max_bias <= 0.0f) {
        return 1.0;
    }
    const int power = 1 << (int) std::floor(std::log2(problem.num_heads));
    const double exponent = head < power ? head + 1 : (2 * (head - power) + 1) / 2.0;
    return std::exp2(-(double) problem.max_bias / power * exponent);
}

// The result in float64, of K, V and masks as they are in the cache.
inline std::vector<double> exact_result(const Problem & problem) {
    const Numbers keys = rounded_as_in_cache(problem.keys, problem.key_type, problem.key_size);
    Numbers values = rounded_as_in_cache(problem.values, problem.value_type, problem.value_size);
    std::vector<double> result(problem.num_results(), 0.0);
    std::vector<double> scores(problem.num_cells);
    const auto compute = [&](int stream, int row, int head) {
        const int kv_head = head / (problem.num_heads / problem.num_kv_heads);
        const float * query = problem.queries.data() + problem.query_at(stream, head, row);
        double top = problem.sinks.empty() ? -INFINITY : problem.sinks[head];
        for (int cell = 0; cell < problem.num_cells; ++cell) {
            float mask = 0.0f;
            if (problem.num_mask_heads > 0) {
                mask = problem.masks[problem.mask_at(stream, head, row) + cell];
                mask = ggml_fp16_to_fp32(ggml_fp32_to_fp16(mask));
            }
            const float * key = keys.data() + (problem.cell_at(stream, cell) + kv_head) * problem.key_size;
            double product = 0.0;
            for (int i = 0; i < problem.key_size; ++i) {
                product += (double) query[i] * key[i];
            }
            product *= problem.scale;
            if (problem.softcap != 0.0f) {
                product = problem.softcap * std::tanh(product / problem.softcap);
            }
            scores[cell] = mask == -INFINITY ? -INFINITY : product + slope_of_head(problem, head) * mask;
            top = std::max(top, scores[cell]);
        }
        if (top == -INFINITY) {
            return;
        }
        double sum = problem.sinks.empty() ? 0.0 : std::exp(problem.sinks[head] - top);
        double * to = result.data() + problem.result_at(stream, row, head);
        for (int cell = 0; cell < problem.num_cells; ++cell) {
            const double weight = std::exp(scores[cell] - top);
            const size_t place = problem.cell_at(stream, cell) + kv_head;
            const float * value = problem.are_values_in_keys ? keys.data() + place * problem.key_size
                                                             : values.data() + place * problem.value_size;
            sum += weight;
            for (int i = 0; i < problem.value_size; ++i) {
                to[i] += weight * value[i];
            }
        }
        for (int i = 0; i < problem.value_size; ++i) {
            to[i] /= sum;
        }
    };
    for (int stream = 0; stream < problem.num_streams; ++stream) {
        for (int row = 0; row < problem.num_rows; ++row) {
            for (int head = 0; head < problem.num_heads; ++head) {
                compute(stream, row, head);
            }
        }
    }
    return result;
}
