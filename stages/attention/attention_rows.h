// What ggml's library for processors exports of its attention kernel.
#pragma once

#include "ggml-backend.h"

#ifdef __cplusplus
extern "C" {
#endif

struct ggml_compute_params;
struct ggml_tensor;

// In place of ggml_compute_forward_flash_attn_ext: all of an operation's threads call it.
void attention_rows(const struct ggml_compute_params * params, struct ggml_tensor * result);

// Names the operations that make a result, in hundreds, and how wide vectors are: hosts that differ in it differ in
// bits. 0 where ggml's own kernel runs.
GGML_BACKEND_API int attention_rows_version(void);

// For tests: 0 lets ggml's own kernel compute everything. Not while a graph is computed. It begins with 1, and with
// 0 where the environment has SPANMESH_ATTENTION=ggml.
GGML_BACKEND_API void attention_rows_enable(int is_enabled);

#ifdef __cplusplus
}
#endif
