/* Candidates of an image: its map, max-pooled to several sizes: `derive_candidates` in formulas.py. */

#include "common.h"

typedef struct {
    int64_t images, channels, height, width, candidates, half;
    int64_t image_step, channel_step, pixel_step; /* of the maps, in numbers */
    const void *maps;     /* (image, channel, height, width), in any order of memory */
    const int64_t *sizes; /* (candidate, 2): height and width */
    void *const *patches; /* of each candidate: (image, patch, channel) */
    float *norms;         /* (image, patches of all candidates) */
    float *scratch;       /* (part, height, width, channel) */
} Derive;

enum { SIDE = 8 };
typedef float Row __attribute__((vector_size(4 * SIDE), aligned(4)));
typedef _Float16 HalfRow __attribute__((vector_size(2 * SIDE), aligned(2)));

INLINE float number(const Derive *t, int64_t i, int half) {
    return half ? (float)((const _Float16 *)t->maps)[i] : ((const float *)t->maps)[i];
}

INLINE V8 row(const Derive *t, int64_t i, int half) {
    if (half) return __builtin_convertvector(*(const HalfRow *)((const _Float16 *)t->maps + i), V8);
    return *(const Row *)((const float *)t->maps + i);
}

/* Turn 8 rows of a matrix into its 8 columns: pairs, fours and halves change places. */
INLINE void turn(V8 x[SIDE]) {
    V8 y[SIDE];
    for (int i = 0; i < SIDE; i += 2) {
        y[i] = __builtin_shufflevector(x[i], x[i + 1], 0, 8, 2, 10, 4, 12, 6, 14);
        y[i + 1] = __builtin_shufflevector(x[i], x[i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
    }
    for (int i = 0; i < SIDE; i += i % 4 == 1 ? 3 : 1) {
        x[i] = __builtin_shufflevector(y[i], y[i + 2], 0, 1, 8, 9, 4, 5, 12, 13);
        x[i + 2] = __builtin_shufflevector(y[i], y[i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    }
    for (int i = 0; i < SIDE / 2; i++) {
        V8 low = x[i], high = x[i + 4];
        x[i] = __builtin_shufflevector(low, high, 0, 1, 2, 3, 8, 9, 10, 11);
        x[i + 4] = __builtin_shufflevector(low, high, 4, 5, 6, 7, 12, 13, 14, 15);
    }
}

/* A map in single precision, channel after channel of each pixel. */
INLINE void read(const Derive *t, int64_t n, float *restrict out, int half) {
    int64_t C = t->channels, pixels = t->height * t->width, from = n * t->image_step;
    int64_t a = t->channel_step, b = t->pixel_step;
    if (a == 1) {
        for (int64_t p = 0; p < pixels; p++)
            for (int64_t c = 0; c < C; c++) out[p * C + c] = number(t, from + c + p * b, half);
        return;
    }
    if (b != 1 || C < SIDE || pixels < SIDE) {
        for (int64_t p = 0; p < pixels; p++)
            for (int64_t c = 0; c < C; c++) out[p * C + c] = number(t, from + c * a + p * b, half);
        return;
    }
    for (int64_t p = 0; p < pixels; p += SIDE) /* the last tiles overlap those before */
        for (int64_t c = 0; c < C; c += SIDE) {
            int64_t p0 = p + SIDE < pixels ? p : pixels - SIDE, c0 = c + SIDE < C ? c : C - SIDE;
            V8 x[SIDE];
            for (int i = 0; i < SIDE; i++) x[i] = row(t, from + (c0 + i) * a + p0, half);
            turn(x);
            for (int i = 0; i < SIDE; i++) *(Row *)(out + (p0 + i) * C + c0) = x[i];
        }
}

/* The largest numbers of a window of the map, whose pixels are C numbers; returns their norm. */
INLINE float largest(const float *map, void *out, int64_t C, int64_t width, int64_t height,
                     int64_t stride, int half) {
#pragma clang fp reassociate(on) contract(fast)
    V8 squares = {};
    float sum = 0;
    int64_t c = 0;
    for (; c + SIDE <= C; c += SIDE) {
        V8 top = *(const Row *)(map + c);
        for (int64_t y = 0; y < height; y++)
            for (int64_t x = 0; x < width; x++)
                top = __builtin_elementwise_max(top,
                                                (V8) * (const Row *)(map + y * stride + x * C + c));
        squares += top * top;
        if (half)
            *(HalfRow *)((_Float16 *)out + c) = __builtin_convertvector(top, HalfRow);
        else
            *(Row *)((float *)out + c) = top;
    }
    for (; c < C; c++) {
        float top = map[c];
        for (int64_t y = 0; y < height; y++)
            for (int64_t x = 0; x < width; x++) {
                float other = map[y * stride + x * C + c];
                top = other > top ? other : top;
            }
        sum += top * top;
        if (half)
            ((_Float16 *)out)[c] = (_Float16)top;
        else
            ((float *)out)[c] = top;
    }
    for (int i = 0; i < SIDE; i++) sum += squares[i];
    return __builtin_sqrtf(sum);
}

INLINE void derive_image(const Derive *t, int64_t n, float *map, float *norms, int half) {
    int64_t C = t->channels, H = t->height, W = t->width, size = half ? 2 : 4;
    read(t, n, map, half);
    for (int64_t j = 0; j < t->candidates; j++) {
        int64_t h = t->sizes[2 * j], w = t->sizes[2 * j + 1];
        char *out = (char *)t->patches[j] + n * h * w * C * size;
        for (int64_t i = 0; i < h; i++)
            for (int64_t k = 0; k < w; k++, out += C * size) {
                int64_t top = i * H / h, bottom = ((i + 1) * H + h - 1) / h;
                int64_t left = k * W / w, right = ((k + 1) * W + w - 1) / w;
                const float *from = map + (top * W + left) * C;
                *norms++ = largest(from, out, C, right - left, bottom - top, W * C, half);
            }
    }
}

EXPORT void derive(const Derive *t, int64_t part, int64_t parts) {
    int64_t total = 0;
    float *map = t->scratch + part * t->height * t->width * t->channels;
    for (int64_t j = 0; j < t->candidates; j++) total += t->sizes[2 * j] * t->sizes[2 * j + 1];
    for (int64_t n = t->images * part / parts; n < t->images * (part + 1) / parts; n++)
        if (t->half)
            derive_image(t, n, map, t->norms + n * total, 1);
        else
            derive_image(t, n, map, t->norms + n * total, 0);
}
