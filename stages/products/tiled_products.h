// What ggml's library for processors exports of llamafile's matrix products.
#pragma once

#include "ggml-backend.h"

#ifdef __cplusplus
extern "C" {
#endif

// Whether products of whole matrices are llamafile's from now on. It begins with 0. Not while a graph is computed.
GGML_BACKEND_API void tiled_products_enable(int is_enabled);

GGML_BACKEND_API int tiled_products_is_enabled(void);

#ifdef __cplusplus
}
#endif
