/* What `stages.stop_tap` gives llama.cpp as its `cb_eval`: called for each node of each graph, some hundred
 * times a decode, so it is not Python. Every call out of C into Python would wait for the interpreter's lock,
 * which the event loop holds just when many sessions run. */

#include <stdbool.h>
#include <stddef.h>
#include <string.h>

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

struct stop_tap {
    const char *(*name_of)(const void *tensor);
    size_t (*num_bytes_of)(const void *tensor);
    void (*copy)(const void *tensor, void *to, size_t offset_bytes, size_t num_bytes);
    const char *wanted;
    char *rows;
    size_t capacity_bytes;
    size_t filled_bytes;
};

/* Asked before a node is computed: whether to see its result. Told after: false ends the graph there. */
EXPORT bool stop_tap_on_node(const void *tensor, bool ask, void *data) {
    struct stop_tap *tap = data;
    if (ask) {
        return strcmp(tap->name_of(tensor), tap->wanted) == 0;
    }
    const size_t num_bytes = tap->num_bytes_of(tensor);
    /* Micro-batches follow one another; more rows than there is room for would be a graph of another shape. */
    if (num_bytes <= tap->capacity_bytes - tap->filled_bytes) {
        tap->copy(tensor, tap->rows + tap->filled_bytes, 0, num_bytes);
        tap->filled_bytes += num_bytes;
    }
    return false;
}
