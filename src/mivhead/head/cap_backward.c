/* Gradients of the cosines of queries with the prototypes of all classes: `cosines_backward` in formulas.py. */

#include "tile.h"

typedef int32_t VI8 __attribute__((vector_size(32)));
typedef float V4Any __attribute__((vector_size(16), aligned(4))); /* at any address */

/* x with the sign of y, 0 where y is 0 */
INLINE V8 signed_by(V8 x, V8 y) {
    return (V8)(((VI8)x ^ ((VI8)y & (int32_t)0x80000000)) & (y != 0.0f));
}

INLINE V8 half_of(V x, int upper) {
    return upper ? __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15)
                 : __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7);
}

/* sums over the lanes of four vectors */
INLINE V4 lane_sums(V8 a, V8 b, V8 c, V8 d) {
    V8 ab = __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13) +
            __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
    V8 cd = __builtin_shufflevector(c, d, 0, 1, 8, 9, 4, 5, 12, 13) +
            __builtin_shufflevector(c, d, 2, 3, 10, 11, 6, 7, 14, 15);
    V8 abcd = __builtin_shufflevector(ab, cd, 0, 2, 8, 10, 4, 6, 12, 14) +
              __builtin_shufflevector(ab, cd, 1, 3, 9, 11, 5, 7, 13, 15);
    return __builtin_shufflevector(abcd, abcd, 0, 1, 2, 3) +
           __builtin_shufflevector(abcd, abcd, 4, 5, 6, 7);
}

static void store(float *x, const V *tile, int64_t first, int64_t queries, int64_t channels) {
    int64_t lanes = queries - first < LANES ? queries - first : LANES;
    for (int64_t i = 0; i < lanes; i++)
        for (int64_t c = 0; c < channels; c++)
            x[(first + i) * channels + c] = ((const float *)tile)[c * LANES + i];
}

/* One class of (query, class). */
static V column(const Cap *t, const float *x, int64_t k, int64_t first) {
    V out = {};
    for (int64_t q = first; q < t->queries && q < first + LANES; q++)
        out[q - first] = x[q * t->classes + k];
    return out;
}

/* Sums over the classes of the factors of u: in the gradients of prototypes, and in its own. */
typedef struct {
    V in_prototypes, in_itself;
} Sums;

/* Factors of u and p in the gradient of each prototype.
 *
 * With p = v^P - m and u = v^Q - m, cos = p.u / (|p| |u|) has the derivatives
 * u / (|p| |u|) - p cos / |p|^2 by p and p / (|p| |u|) - u cos / |u|^2 by u. */
static Sums factors(const Cap *t, Tile *s, int64_t first) {
    Sums sums = {};
    for (int64_t k = 0; k < t->classes; k++) {
        V grad = column(t, t->d_cosines, k, first), cosine = column(t, t->cosines, k, first);
        s->by_u[k] = grad / (s->norms[k] * s->length);
        s->by_p[k] = -grad * cosine / (s->norms[k] * s->norms[k]);
        sums.in_prototypes += s->by_u[k];
        sums.in_itself -= grad * cosine / (s->length * s->length);
    }
    return sums;
}

/* Turn p and A V in channel c into the gradients of A K and of A V, and add to those of A. */
INLINE void backward_channel(const Cap *t, Tile *s, Sums sums, int64_t c) {
#pragma clang fp contract(fast)
    int64_t K = t->classes;
    const float *w = t->w + c * t->support, *z = t->z + c * t->support;
    V *p = s->p + c * K, *av = s->av + c * K;
    V u = s->u[c], d_u = u * sums.in_itself, share = {}, d_gate = {};
    for (int64_t k = 0; k < K; k++) d_u += p[k] * s->by_u[k], share += p[k] * s->by_p[k];
    share += u * sums.in_prototypes + d_u; /* of m: it is in every p, and in u */
    share /= (float)K;
    for (int64_t k = 0; k < K; k++) {
        V d_ak = p[k] * s->by_p[k] + (u * s->by_u[k] - share), d_av = d_ak * s->gate[c];
        d_gate += d_ak * av[k];
        p[k] = d_ak, av[k] = d_av;
        for (int64_t i = t->starts[k]; i < t->starts[k + 1]; i++)
            s->d_scores[i] += d_av * w[i] + d_ak * z[i];
    }
    s->d_y[c] = d_u; /* v^Q = v gate + y */
    s->d_gate[c] = d_gate + d_u * s->v[c];
    s->d_v[c] = d_u * s->gate[c];
}

/* From gradients of one head's weights to those of its scores, through the softmax. */
static void backward_softmax(const Cap *t, Tile *s, const V *a) {
    for (int64_t k = 0; k < t->classes; k++) {
        int64_t from = t->starts[k], to = t->starts[k + 1];
        V inner = {};
        for (int64_t i = from; i < to; i++) inner += s->d_scores[i] * a[i];
        for (int64_t i = from; i < to; i++)
            s->d_scores[i] = a[i] * (s->d_scores[i] - inner) * t->factor;
    }
}

/* Gradients of two shots (or of one) in channel c, and of the queries' keys through the attention.
 * Half of the lanes at a time: the processor has registers for those. */
INLINE V backward_shots(const Cap *t, const Tile *s, const V *a, int64_t c, int64_t i,
                        float *d_shots, int two) {
#pragma clang fp contract(fast)
    float first = t->z[c * t->support + i], second = two ? t->z[c * t->support + i + 1] : 0;
    int64_t p0 = c * t->classes + s->class_of[i];
    int64_t p1 = two ? c * t->classes + s->class_of[i + 1] : p0;
    V8 w0 = {}, w1 = {}, z0 = {}, z1 = {}, d_y[2] = {};
    for (int half = 0; half < 2; half++) {
        V8 y = half_of(s->y[c], half);
        V8 a0 = half_of(a[i], half), a1 = two ? half_of(a[i + 1], half) : (V8){};
        w0 += a0 * half_of(s->av[p0], half), w1 += a1 * half_of(s->av[p1], half);
        z0 += a0 * half_of(s->p[p0], half), z1 += a1 * half_of(s->p[p1], half);
        V8 g0 = half_of(s->d_scores[i], half);
        V8 g1 = two ? half_of(s->d_scores[i + 1], half) : (V8){};
        g0 = signed_by(g0, y - first), g1 = two ? signed_by(g1, y - second) : g1;
        z0 -= g0, z1 -= g1, d_y[half] = g0 + g1;
    }
    V4 sums = lane_sums(z0, w0, z1, w1);
    if (two)
        *(V4Any *)(d_shots + 2 * i) += sums;
    else
        d_shots[2 * i] += sums[0], d_shots[2 * i + 1] += sums[1];
    return __builtin_shufflevector(d_y[0], d_y[1], 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14,
                                   15);
}

/* Gradients of one tile; those of the shots are added to d_shots. */
INLINE void backward_tile(const Cap *t, Tile *s, Sums sums, float *d_shots) {
    int64_t S = t->support, d = t->channels / t->heads;
    for (int64_t h = 0; h < t->heads; h++) {
        const V *a = s->weights + h * S;
        for (int64_t i = 0; i < S; i++) s->d_scores[i] = (V){};
        for (int64_t c = h * d; c < (h + 1) * d; c++) backward_channel(t, s, sums, c);
        backward_softmax(t, s, a);
        for (int64_t c = h * d; c < (h + 1) * d; c++) {
            V d_y = s->d_y[c];
            float *here = d_shots + c * S * 2;
            int64_t i = 0;
            for (; i + 2 <= S; i += 2) d_y += backward_shots(t, s, a, c, i, here, 1);
            if (i < S) d_y += backward_shots(t, s, a, c, i, here, 0);
            s->d_y[c] = d_y;
        }
    }
}

EXPORT void cap_backward(const Cap *t, int64_t part, int64_t parts) {
    Tile s = tile_of(t, part);
    int64_t C = t->channels, S = t->support;
    float *d_shots = t->d_shots + part * C * S * 2;
    for (int64_t i = 0; i < C * S * 2; i++) d_shots[i] = 0;
    for (int64_t first = part * LANES; first < t->queries; first += parts * LANES) {
        s.weights = (V *)t->weights + first / LANES * t->heads * S;
        load_queries(t, &s, first);
        compare(t, &s, 1);
        Sums sums = factors(t, &s, first);
        backward_tile(t, &s, sums, d_shots);
        store(t->d_y, s.d_y, first, t->queries, C);
        store(t->d_v, s.d_v, first, t->queries, C);
        store(t->d_gate, s.d_gate, first, t->queries, C);
    }
}
