/* Pooling of patches by attention, Component 1: `pool_patches` in formulas.py.
 *
 * Patches are in single or half precision, (image, patch, channel), one array per candidate. What
 * there is of each patch (scale, weight) lies in one array (image, patches of all candidates).
 * Patches are most of what a step reads: they pass once forward and once backward, four at a time,
 * which stay in the processor's nearest cache while they are used twice.
 */

#include "common.h"

enum { GROUP = 4 };

typedef struct {
    int64_t images, channels, candidates, half;
    const int64_t *rows;    /* (image,): where each image stands in x and scale */
    const int64_t *patches; /* of each candidate */
    const void *const *x;
    const float *scale;  /* (row, patch) */
    const float *vector; /* forward: theta (channel,); backward: gradient of pooled */
    float *weights;      /* (image, patch) */
    float *pooled;       /* (image, candidate, channel) */
    float *sums;         /* backward: gradient of theta from each image, (image, channel) */
    float *scratch;      /* (part, 4, channel) */
} Pooling;

/* Patches p .. p + 3 in single precision; beyond the last one, zeros. */
static const float *read(const Pooling *t, int64_t part, int64_t j, int64_t n, int64_t p) {
    int64_t C = t->channels, first = (t->rows[n] * t->patches[j] + p) * C, left = (t->patches[j] - p) * C;
    if (!t->half && left >= GROUP * C) return (const float *)t->x[j] + first;
    float *restrict out = t->scratch + part * GROUP * C;
    int64_t there = left < GROUP * C ? left : GROUP * C;
    if (t->half) {
        const _Float16 *x = (const _Float16 *)t->x[j] + first;
        for (int64_t i = 0; i < there; i++) out[i] = (float)x[i];
    } else {
        const float *x = (const float *)t->x[j] + first;
        for (int64_t i = 0; i < there; i++) out[i] = x[i];
    }
    for (int64_t i = there; i < GROUP * C; i++) out[i] = 0;
    return out;
}

/* y . x for the patches x of a group */
INLINE void dots(float *out, const float *y, const float *x, int64_t C) {
#pragma clang fp reassociate(on) contract(fast)
    float a = 0, b = 0, c = 0, d = 0;
    for (int64_t i = 0; i < C; i++) {
        a += y[i] * x[i], b += y[i] * x[C + i];
        c += y[i] * x[2 * C + i], d += y[i] * x[3 * C + i];
    }
    out[0] = a, out[1] = b, out[2] = c, out[3] = d;
}

/* sum += w x over the patches x of a group */
INLINE void add(float *restrict sum, V w, const float *x, int64_t C) {
#pragma clang fp contract(fast)
    for (int64_t i = 0; i < C; i++)
        sum[i] += w[0] * x[i] + w[1] * x[C + i] + (w[2] * x[2 * C + i] + w[3] * x[3 * C + i]);
}

INLINE void scaled(float *x, float factor, int64_t n) {
    for (int64_t i = 0; i < n; i++) x[i] *= factor;
}

/* pooled: sum of patches, weighted with softmax(theta . x scale). What is summed up so far is
 * relative to the largest score so far. */
static void forward(const Pooling *t, int64_t part, int64_t j, int64_t n, const float *scale,
                    float *w) {
    int64_t C = t->channels, P = t->patches[j];
    float *out = t->pooled + (n * t->candidates + j) * C, top = -1e30f, sum = 0;
    for (int64_t c = 0; c < C; c++) out[c] = 0;
    for (int64_t p = 0; p < P; p += GROUP) {
        const float *x = read(t, part, j, n, p);
        V score = (V){} - 1e30f;
        float found[GROUP], high = top;
        dots(found, t->vector, x, C);
        for (int64_t i = 0; i < GROUP && p + i < P; i++) {
            w[p + i] = score[i] = found[i] * scale[p + i];
            high = score[i] > high ? score[i] : high;
        }
        score = exp_of(score - high);
        if (high > top) {
            float factor = exp_of((V){} + (top - high))[0];
            scaled(out, factor, C), sum *= factor, top = high;
        }
        for (int64_t i = 0; i < GROUP && p + i < P; i++) sum += score[i];
        add(out, score, x, C);
    }
    scaled(out, 1 / sum, C);
    for (int64_t p = 0; p < P; p += LANES) {
        V score = {};
        int64_t there = P - p < LANES ? P - p : LANES;
        for (int64_t i = 0; i < there; i++) score[i] = w[p + i];
        score = exp_of(score - top) / sum;
        for (int64_t i = 0; i < there; i++) w[p + i] = score[i];
    }
}

/* The gradient of theta is the sum of patches, weighted with the gradients of their scores:
 * w (grad . x - grad . pooled) scale. */
static void backward(const Pooling *t, int64_t part, int64_t j, int64_t n, const float *scale,
                     float *w) {
#pragma clang fp reassociate(on) contract(fast)
    int64_t C = t->channels, P = t->patches[j], row = (n * t->candidates + j) * C;
    const float *grad = t->vector + row, *pooled = t->pooled + row;
    float *out = t->sums + n * C, mean = 0;
    for (int64_t c = 0; c < C; c++) {
        if (j == 0) out[c] = 0;
        mean += grad[c] * pooled[c];
    }
    for (int64_t p = 0; p < P; p += GROUP) {
        const float *x = read(t, part, j, n, p);
        float found[GROUP];
        V d_score = {};
        dots(found, grad, x, C);
        for (int64_t i = 0; i < GROUP && p + i < P; i++)
            d_score[i] = w[p + i] * (found[i] - mean) * scale[p + i];
        add(out, d_score, x, C);
    }
}

typedef void Kernel(const Pooling *, int64_t part, int64_t j, int64_t n, const float *scale,
                    float *w);

/* All candidates j of a part's images n. */
INLINE void each(const Pooling *t, int64_t part, int64_t parts, Kernel *kernel) {
    int64_t total = 0;
    for (int64_t j = 0; j < t->candidates; j++) total += t->patches[j];
    for (int64_t n = t->images * part / parts; n < t->images * (part + 1) / parts; n++)
        for (int64_t j = 0, at = 0; j < t->candidates; at += t->patches[j++])
            kernel(t, part, j, n, t->scale + t->rows[n] * total + at, t->weights + n * total + at);
}

EXPORT void pool_forward(const Pooling *t, int64_t part, int64_t parts) {
    each(t, part, parts, forward);
}

EXPORT void pool_backward(const Pooling *t, int64_t part, int64_t parts) {
    each(t, part, parts, backward);
}
