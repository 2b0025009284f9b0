// Included ahead of the C source in which ggml dispatches its operations, and of no other: attention goes to
// attention_rows.cpp, which passes on what it does not take. The definition of ggml's kernel is in C++ and keeps its
// name.
#ifndef __cplusplus
#define ggml_compute_forward_flash_attn_ext attention_rows
#endif
