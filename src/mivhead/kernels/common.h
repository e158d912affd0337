/* What the kernels share: vectors of 16 numbers, work in parts, the exponential function. */

#pragma once
#include <stdint.h>

enum { LANES = 16 };
typedef float V __attribute__((vector_size(4 * LANES)));
typedef int32_t VI __attribute__((vector_size(4 * LANES)));
typedef float V8 __attribute__((vector_size(32)));
typedef float V4 __attribute__((vector_size(16)));

#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))

/* OpenMP's way of running a function in several threads at once: that of PyTorch, whose threads
 * then also do our work, or NULL for one thread. */
typedef void (*Fork)(void (*work)(void *), void *data, unsigned threads, unsigned flags);

typedef struct {
    void (*work)(void *task, int64_t part, int64_t parts);
    void *task;
    int64_t parts, next;
} Parts;

static void take_parts(void *data) {
    Parts *all = data;
    for (;;) {
        int64_t part = __atomic_fetch_add(&all->next, 1, __ATOMIC_RELAXED);
        if (part >= all->parts) return;
        all->work(all->task, part, all->parts);
    }
}

/* Work on every part; what a part is depends on their number alone, not on who takes it. */
static void each_part(Fork fork, int64_t parts, void (*work)(void *, int64_t, int64_t),
                      void *task) {
    Parts all = {work, task, parts, 0};
    if (fork && parts > 1) fork(take_parts, &all, (unsigned)parts, 0);
    take_parts(&all); /* whatever is left */
}

/* exp(x) for x <= 0 to about one unit in the last place; 0 below -87. */
INLINE V exp_of(V x) {
    V shifted = x * 1.44269504f + 12582912.0f; /* its last bits: n, the nearest integer */
    V n = shifted - 12582912.0f;
    V r = x - n * 0.693145752f; /* ln 2 in two parts, the first with trailing zeros */
    r = r - n * 1.42860677e-6f;
    V p = r * 1.98412698e-4f + 1.38888889e-3f; /* 1 / 7!, 1 / 6!, ... */
    p = p * r + 8.33333333e-3f;
    p = p * r + 4.16666667e-2f;
    p = p * r + 1.66666667e-1f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    V power = (V)(((VI)shifted << 23) + (127 << 23)); /* 2^n */
    return (V)((VI)(p * power) & (x > -87.0f));
}
