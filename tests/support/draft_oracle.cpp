// Reference drafts: llama.cpp's own common_speculative on the whole model, in step.
//
// Arguments: target file, drafter file or "-" for the target's own head, type of speculation, tokens drafted a
// round, number of rounds, verdicts, least probability of a drafted token, type of the KV caches. Verdicts are
// "greedy", those of the target; "scripted", which do not depend on it, so that each number of tokens is accepted
// and rejected; or "all", by which all drafted tokens are accepted.
// Standard input: one text a line, as token ids; the last id is the token to follow.
// Output: for each text a line a round, then an empty line. A round is
//
//     position of the last token, the last token | drafted ids | number of accepted ones
//
// After a rejection a target with recurrent layers goes back to a copy of its state from before the round, and
// computes the accepted tokens again, without the drafter, which has seen them.
//
// Numerics are those of the exact mode, of which GGML_CPU_TILED_MM=0 belongs into the environment.

#include "common.h"
#include "llama-cpp.h"
#include "log.h"
#include "speculative.h"

#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

// llama.cpp's log, without the thread and the JSON library of its own: nothing is printed.
common_log * common_log_main() {
    return nullptr;
}

int common_log_get_verbosity_thold() {
    return -1;
}

void common_log_add(common_log *, ggml_log_level, const char *, ...) {}

namespace {

constexpr llama_seq_id SEQUENCE = 0;
// From 64 rows on llama.cpp's attention works in tiles and rounds differently: the exact mode computes fewer at once.
constexpr uint32_t MAX_ROWS = 63;

struct Setup {
    llama_model * target;
    llama_model * drafter;
    common_speculative_type type;
    int num_drafted;
    int num_rounds;
    std::string verdicts;
    float p_min;
    uint32_t num_positions;
    ggml_type kv_type;
};

void require(bool holds, const char * what) {
    if (!holds) {
        throw std::runtime_error(what);
    }
}

llama_model_ptr load(const std::string & path, bool has_head) {
    llama_model_params params = llama_model_default_params();
    params.n_gpu_layers = 0;
    params.use_extra_bufts = false;
    params.load_mtp = has_head;
    llama_model_ptr model(llama_model_load_from_file(path.c_str(), params));
    require(model != nullptr, "a model was not loaded");
    return model;
}

ggml_type type_of(const std::string & name) {
    for (const ggml_type type : { GGML_TYPE_F16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0 }) {
        if (name == ggml_type_name(type)) {
            return type;
        }
    }
    throw std::runtime_error("the KV cache is f16, q8_0 or q4_0");
}

llama_context_params context_params(uint32_t num_positions, ggml_type kv_type) {
    llama_context_params params = llama_context_default_params();
    params.n_ctx = num_positions;
    params.type_k = params.type_v = kv_type;
    params.n_batch = num_positions;
    params.n_ubatch = MAX_ROWS;
    params.n_threads = params.n_threads_batch = 1;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    return params;
}

void trim(llama_context * context, llama_pos stop) {
    require(llama_memory_seq_rm(llama_get_memory(context), SEQUENCE, stop, -1), "a cache was not trimmed");
}

bool is_recurrent(const llama_model * model) {
    return llama_model_is_recurrent(model) || llama_model_is_hybrid(model);
}

// Copy of what cannot be trimmed.
std::vector<uint8_t> recurrent_state(llama_context * context) {
    constexpr auto PART = LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY;
    std::vector<uint8_t> copy(llama_state_seq_get_size_ext(context, SEQUENCE, PART));
    const size_t written = llama_state_seq_get_data_ext(context, copy.data(), copy.size(), SEQUENCE, PART);
    require(written == copy.size(), "a state was not copied");
    return copy;
}

void restore(llama_context * context, const std::vector<uint8_t> & copy) {
    constexpr auto PART = LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY;
    const size_t read = llama_state_seq_set_data_ext(context, copy.data(), copy.size(), SEQUENCE, PART);
    require(read == copy.size(), "a state was not restored");
}

llama_token likeliest(llama_context * context, int32_t row) {
    const float * logits = llama_get_logits_ith(context, row);
    require(logits != nullptr, "a row has no logits");
    const int32_t count = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(context)));
    llama_token best = 0;
    for (llama_token id = 1; id < count; ++id) {
        best = logits[id] > logits[best] ? id : best;
    }
    return best;
}

// A whole model, its drafter, and the text that both have computed.
class Line {
  public:
    Line(const Setup & setup, llama_tokens text) : setup(setup), text(std::move(text)) {
        llama_context_params params = context_params(setup.num_positions, setup.kv_type);
        target.reset(llama_init_from_model(setup.target, params));
        require(target != nullptr, "the target has no context");
        params.ctx_other = target.get();
        if (setup.type == COMMON_SPECULATIVE_TYPE_DRAFT_MTP) {
            params.ctx_type = LLAMA_CONTEXT_TYPE_MTP;
        }
        drafter.reset(llama_init_from_model(setup.drafter, params));
        require(drafter != nullptr, "the drafter has no context");
        options.types = { setup.type };
        options.draft.ctx_tgt = target.get();
        options.draft.ctx_dft = drafter.get();
        options.draft.n_max = setup.num_drafted;
        options.draft.n_min = 0;
        options.draft.p_min = setup.p_min;
        options.draft.backend_sampling = false;
        speculative.reset(common_speculative_init(options, 1));
        require(speculative != nullptr, "there is no such speculation");
    }

    void run() {
        last = text.back();
        text.pop_back();
        // In one piece: between two, common_speculative_process of EAGLE-3 computes a row with a feature that it has
        // overwritten.
        compute(text, 0, false);
        common_speculative_begin(speculative.get(), SEQUENCE, text);
        for (int round = 0; round < setup.num_rounds; ++round) {
            step(round);
        }
    }

  private:
    void compute(const llama_tokens & tokens, llama_pos start, bool has_outputs) {
        const common_batch batch = computed_by_target(tokens, start, has_outputs);
        require(common_speculative_process(speculative.get(), batch), "the drafter failed");
    }

    common_batch computed_by_target(const llama_tokens & tokens, llama_pos start, bool has_outputs) {
        common_batch batch(target.get());
        for (llama_token id : tokens) {
            batch.add(id, start++, SEQUENCE, has_outputs);
        }
        require(llama_process(target.get(), LLAMA_PROCESS_TYPE_DECODE, batch.get()) == 0, "the target failed");
        return batch;
    }

    // As tests.support.scripted_rounds has it.
    llama_token scripted(int round, size_t num_accepted) {
        const int count = llama_vocab_n_tokens(llama_model_get_vocab(setup.target));
        return (7 * round + 3 * int(num_accepted) + last) % (count - 4) + 3;
    }

    void step(int round) {
        const llama_pos position = text.size();
        llama_tokens drafted;
        common_speculative_draft_params & wanted = common_speculative_get_draft_params(speculative.get(), SEQUENCE);
        wanted.drafting = true;
        wanted.n_max = setup.num_drafted;
        wanted.pos0 = position;
        wanted.id_last = last;
        wanted.prompt = &text;
        wanted.result = &drafted;
        common_speculative_draft(speculative.get());
        // Rows of the draft: verification computes them again, with features of the target.
        trim(drafter.get(), position);

        llama_tokens window = { last };
        window.insert(window.end(), drafted.begin(), drafted.end());
        std::vector<uint8_t> before;
        if (is_recurrent(setup.target)) {
            before = recurrent_state(target.get());
        }
        compute(window, position, true);
        size_t num_accepted = 0;
        llama_token next = LLAMA_TOKEN_NULL;
        if (setup.verdicts == "greedy") {
            next = likeliest(target.get(), 0);
            while (num_accepted < drafted.size() && next == drafted[num_accepted]) {
                ++num_accepted;
                next = likeliest(target.get(), num_accepted);
            }
        } else {
            const int round_part = 5 * round + round * round / 3;
            num_accepted = setup.verdicts == "all" ? drafted.size() : round_part % (drafted.size() + 1);
            next = scripted(round, num_accepted);
        }
        common_speculative_accept(speculative.get(), SEQUENCE, num_accepted);

        printf("%d %d |", position, last);
        for (llama_token id : drafted) {
            printf(" %d", id);
        }
        printf(" | %zu\n", num_accepted);

        const llama_tokens accepted(window.begin(), window.begin() + 1 + num_accepted);
        text.insert(text.end(), accepted.begin(), accepted.end());
        last = next;
        trim(drafter.get(), text.size());
        if (before.empty()) {
            trim(target.get(), text.size());
        } else if (accepted.size() < window.size()) {
            restore(target.get(), before);
            trim(target.get(), position);
            computed_by_target(accepted, position, false);
        }
    }

    Setup setup;
    llama_tokens text;
    llama_token last = LLAMA_TOKEN_NULL;
    common_params_speculative options;
    llama_context_ptr target;
    llama_context_ptr drafter;
    common_speculative_ptr speculative;
};

void print_errors(ggml_log_level level, const char * text, void *) {
    if (level == GGML_LOG_LEVEL_ERROR) {
        fputs(text, stderr);
    }
}

}  // namespace

int main(int argc, char ** argv) {
    try {
        require(argc == 9, "usage: draft_oracle TARGET DRAFTER|- TYPE DRAFTED ROUNDS VERDICTS P_MIN KV < TEXTS");
        llama_log_set(print_errors, nullptr);
        llama_backend_init();
        Setup setup{};
        setup.type = common_speculative_type_from_name(argv[3]);
        setup.num_drafted = std::stoi(argv[4]);
        setup.num_rounds = std::stoi(argv[5]);
        setup.verdicts = argv[6];
        setup.p_min = std::stof(argv[7]);
        setup.kv_type = type_of(argv[8]);
        const bool has_head = setup.type == COMMON_SPECULATIVE_TYPE_DRAFT_MTP;
        const llama_model_ptr target = load(argv[1], has_head);
        llama_model_ptr drafter;
        if (std::string(argv[2]) != "-") {
            drafter = load(argv[2], has_head);
        }
        setup.target = target.get();
        setup.drafter = drafter ? drafter.get() : target.get();
        for (std::string line; std::getline(std::cin, line);) {
            std::istringstream ids(line);
            llama_tokens text;
            for (llama_token id; ids >> id;) {
                text.push_back(id);
            }
            require(text.size() > 1, "a text has two tokens or more");
            setup.num_positions = text.size() + setup.num_rounds * (setup.num_drafted + 1);
            Line(setup, text).run();
            printf("\n");
        }
        return 0;
    } catch (const std::exception & error) {
        fprintf(stderr, "draft_oracle: %s\n", error.what());
        return 1;
    }
}
