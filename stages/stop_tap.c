/* What `stages.runtime.hidden_tap` gives llama.cpp as its `cb_eval`: called for each node of each graph, some hundred
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

/* A tensor whose rows are copied, besides those that leave the stage. */
struct feature {
    const char *name;
    char *rows;
    size_t capacity_bytes;
    size_t filled_bytes;
};

struct stop_tap {
    const char *(*name_of)(const void *tensor);
    size_t (*num_bytes_of)(const void *tensor);
    void (*copy)(const void *tensor, void *to, size_t offset_bytes, size_t num_bytes);
    void (*put)(void *tensor, const void *from, size_t offset_bytes, size_t num_bytes);
    const char *wanted; /* may be null: nothing leaves, the graph runs to its end */
    char *rows;
    size_t capacity_bytes;
    size_t filled_bytes;
    const char *inlet; /* null: nothing enters */
    const char *given;
    size_t given_bytes;
    size_t entered_bytes;
    struct feature *features;
    size_t num_features; /* 0: none are wanted of this decode */
};

static void enter(struct stop_tap *tap, void *tensor) {
    const size_t num_bytes = tap->num_bytes_of(tensor);
    /* What is larger than the rows that are left would be a graph of another shape: Python sees it missing. */
    if (num_bytes <= tap->given_bytes - tap->entered_bytes) {
        tap->put(tensor, tap->given + tap->entered_bytes, 0, num_bytes);
        tap->entered_bytes += num_bytes;
    }
}

static struct feature *find_feature(struct stop_tap *tap, const char *name) {
    for (size_t i = 0; i < tap->num_features; i++) {
        if (strcmp(name, tap->features[i].name) == 0) {
            return &tap->features[i];
        }
    }
    return NULL;
}

/* Micro-batches follow one another; more rows than there is room for would be a graph of another shape. */
static void take(struct stop_tap *tap, const void *tensor, char *rows, size_t capacity_bytes, size_t *filled_bytes) {
    const size_t num_bytes = tap->num_bytes_of(tensor);
    if (num_bytes <= capacity_bytes - *filled_bytes) {
        tap->copy(tensor, rows + *filled_bytes, 0, num_bytes);
        *filled_bytes += num_bytes;
    }
}

/* Asked before a node is computed: whether to see its result. Told after: false ends the graph there. */
EXPORT bool stop_tap_on_graph_node(void *tensor, bool ask, void *data) {
    struct stop_tap *tap = data;
    const char *name = tap->name_of(tensor);
    const bool is_wanted = tap->wanted != NULL && strcmp(name, tap->wanted) == 0;
    const bool is_inlet = tap->inlet != NULL && strcmp(name, tap->inlet) == 0;
    struct feature *feature = find_feature(tap, name);
    if (ask) {
        return is_wanted || is_inlet || feature != NULL;
    }
    if (is_inlet) {
        enter(tap, tensor);
    }
    if (feature != NULL) {
        take(tap, tensor, feature->rows, feature->capacity_bytes, &feature->filled_bytes);
    }
    if (!is_wanted) {
        return true;
    }
    take(tap, tensor, tap->rows, tap->capacity_bytes, &tap->filled_bytes);
    return false;
}
