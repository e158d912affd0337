/* What the kernels share: vectors of 16 numbers, the exponential function. */

#pragma once
#include <stdint.h>

enum { LANES = 16 };
typedef float V __attribute__((vector_size(4 * LANES)));
typedef int32_t VI __attribute__((vector_size(4 * LANES)));
typedef float V8 __attribute__((vector_size(32)));
typedef float V4 __attribute__((vector_size(16)));

#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))

/* Every exported function works on one part of its task; what a part is depends on the number of
 * parts alone, so that results do not depend on the threads that take them. */

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
