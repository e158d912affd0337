/* Cosines of queries with the prototypes of all classes, Components 2 and 3: `cosines` in formulas.py. */

#include "tile.h"

/* Scores of all shots, four at a time: (head, shot, lane). */
static void score(const Cap *t, Tile *s) {
#pragma clang fp contract(fast)
    int64_t S = t->support, d = t->channels / t->heads;
    for (int64_t h = 0; h < t->heads; h++)
        for (int64_t i = 0; i < S; i += 4) {
            int64_t last = S - 1 - i; /* beyond it the last shot is scored again */
            int64_t b = last < 1 ? last : 1, c = last < 2 ? last : 2, e = last < 3 ? last : 3;
            V s0 = {}, s1 = {}, s2 = {}, s3 = {};
            for (int64_t n = h * d; n < (h + 1) * d; n++) {
                const float *z = t->z + n * S + i;
                V y = s->y[n];
                s0 += __builtin_elementwise_abs(y - z[0]);
                s1 += __builtin_elementwise_abs(y - z[b]);
                s2 += __builtin_elementwise_abs(y - z[c]);
                s3 += __builtin_elementwise_abs(y - z[e]);
            }
            V *out = s->weights + h * S + i;
            out[0] = s0 * t->factor, out[b] = s1 * t->factor;
            out[c] = s2 * t->factor, out[e] = s3 * t->factor;
        }
}

/* A from the scores: softmax within each class, over the shots that a query may see. */
static void attend(const Cap *t, Tile *s, int64_t first) {
    int64_t S = t->support;
    score(t, s);
    if (t->hidden)
        for (int64_t q = first; q < t->queries && q < first + LANES; q++)
            for (int64_t h = 0; h < t->heads && t->hidden[q] >= 0; h++)
                ((float *)(s->weights + h * S + t->hidden[q]))[q - first] = -1e30f;
    for (int64_t h = 0; h < t->heads; h++)
        for (int64_t k = 0; k < t->classes; k++) {
            V *w = s->weights + h * S;
            int64_t from = t->starts[k], to = t->starts[k + 1];
            V top = w[from], sum = {};
            for (int64_t i = from; i < to; i++) top = __builtin_elementwise_max(top, w[i]);
            for (int64_t i = from; i < to; i++) sum += w[i] = exp_of(w[i] - top);
            for (int64_t i = from; i < to; i++) w[i] /= sum;
        }
}

EXPORT void cap_forward(const Cap *t, int64_t part, int64_t parts) {
    Tile s = tile_of(t, part);
    for (int64_t first = part * LANES; first < t->queries; first += parts * LANES) {
        if (t->weights) s.weights = (V *)t->weights + first / LANES * t->heads * t->support;
        load_queries(t, &s, first);
        attend(t, &s, first);
        compare(t, &s, 0);
        for (int64_t k = 0; k < t->classes; k++) {
            V cosine = s.products[k] / (s.norms[k] * s.length);
            for (int64_t q = first; q < t->queries && q < first + LANES; q++)
                t->cosines[q * t->classes + k] = cosine[q - first];
        }
    }
}
