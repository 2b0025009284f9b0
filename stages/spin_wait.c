/* Length of a step in the loops with which libgomp waits for other threads: see stages/openmp_tuning.py. */

#include <stdint.h>
#include <time.h>

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

#if defined(__x86_64__) || defined(__i386__)
#define RELAX() __builtin_ia32_pause()
#else
#define RELAX() __asm volatile("" : : : "memory")
#endif

#define NUM_STEPS 4000
#define NUM_TRIES 5

static double now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1e9 + now.tv_nsec;
}

/* The shortest of a few tries, in nanoseconds: others may interrupt one. */
EXPORT double nanoseconds_per_spin(void) {
    static volatile int32_t awaited = 0;
    double shortest_ns = 1e9;
    for (int i = 0; i < NUM_TRIES; i++) {
        double start_ns = now_ns();
        for (int step = 0; step < NUM_STEPS && awaited == 0; step++) {
            RELAX();
        }
        double step_ns = (now_ns() - start_ns) / NUM_STEPS;
        shortest_ns = step_ns < shortest_ns ? step_ns : shortest_ns;
    }
    return shortest_ns;
}
