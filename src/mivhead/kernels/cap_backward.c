/* Gradients of the cosines of queries with the prototypes of all classes: see cap.py. */

#include "tile.h"

typedef int32_t VI8 __attribute__((vector_size(32)));

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

/* Factors of u and p in the gradient of a prototype.
 *
 * With p = v^P - m and u = v^Q - m, cos = p.u / (|p| |u|) has the derivatives
 * u / (|p| |u|) - p cos / |p|^2 by p and p / (|p| |u|) - u cos / |u|^2 by u. */
INLINE void factors(const Cap *t, const Tile *s, int64_t k, int64_t first, V *by_u, V *by_p) {
    V grad = column(t, t->d_cosines, k, first);
    *by_u = grad / (s->norms[k] * s->length);
    *by_p = -grad * column(t, t->cosines, k, first) / (s->norms[k] * s->norms[k]);
}

/* The gradient of u, and the share of m in the gradient of each prototype. */
static void backward_mean(const Cap *t, Tile *s, int64_t first) {
#pragma clang fp contract(fast)
    V by_itself = {}, by_u_sum = {}, by_u, by_p;
    for (int64_t c = 0; c < t->channels; c++) s->d_u[c] = s->share[c] = (V){};
    for (int64_t k = 0; k < t->classes; k++) {
        V *p = s->p + k * t->channels;
        factors(t, s, k, first, &by_u, &by_p);
        by_u_sum += by_u;
        by_itself += by_p * s->norms[k] * s->norms[k];
        for (int64_t c = 0; c < t->channels; c++)
            s->d_u[c] += p[c] * by_u, s->share[c] += p[c] * by_p;
    }
    by_itself /= s->length * s->length;
    for (int64_t c = 0; c < t->channels; c++) {
        s->d_u[c] += s->u[c] * by_itself;
        V total = s->share[c] + s->u[c] * by_u_sum + s->d_u[c];
        s->share[c] = t->centred ? total / (float)t->classes : (V){};
    }
}

/* Turn p and A V of a class into the gradients of A K and of A V. */
static void backward_prototype(const Cap *t, Tile *s, int64_t k, int64_t first) {
#pragma clang fp contract(fast)
    V by_u, by_p, *p = s->p + k * t->channels, *av = s->av + k * t->channels;
    factors(t, s, k, first, &by_u, &by_p);
    for (int64_t c = 0; c < t->channels; c++) {
        V grad = p[c] * by_p + (s->u[c] * by_u - s->share[c]);
        p[c] = grad;
        if (t->gate) s->d_gate[c] += grad * av[c], grad *= s->gate[c];
        av[c] = grad;
    }
}

/* Gradients of one head's scores of a class: through A, and through the softmax. */
INLINE void backward_scores(const Cap *t, Tile *s, int64_t k, int64_t h) {
#pragma clang fp contract(fast)
    int64_t S = t->support, d = t->channels / t->heads;
    int64_t from = t->starts[k], to = t->starts[k + 1];
    const V *a = s->weights + h * S, *av = s->av + k * t->channels, *ak = s->p + k * t->channels;
    V inner = {};
    for (int64_t i = from; i < to; i += 2) {
        int64_t next = i + 1 < to; /* without a next one, the last is taken twice */
        V s0 = {}, s1 = {};
        for (int64_t c = h * d; c < (h + 1) * d; c++) {
            const float *w = t->w + c * S + i, *z = t->z + c * S + i;
            s0 += av[c] * w[0], s1 += av[c] * w[next];
            if (t->skip) s0 += ak[c] * z[0], s1 += ak[c] * z[next];
        }
        s->d_scores[i] = s0, s->d_scores[i + next] = s1;
    }
    for (int64_t i = from; i < to; i++) inner += s->d_scores[i] * a[i];
    for (int64_t i = from; i < to; i++)
        s->d_scores[i] = a[i] * (s->d_scores[i] - inner) * t->factor;
}

/* Gradients of two shots (or of one) in channel c, and of the queries' keys through the attention.
 * Half of the lanes at a time: the processor has registers for those. */
INLINE V backward_shots(const Cap *t, const Tile *s, const V *a, int64_t k, int64_t c, int64_t i,
                        float *d_z, float *d_w, int attention, int two) {
#pragma clang fp contract(fast)
    int64_t n = c * t->support + i;
    float first = t->z[n], second = two ? t->z[n + 1] : 0;
    V8 w0 = {}, w1 = {}, z0 = {}, z1 = {}, d_y[2] = {};
    for (int half = 0; half < 2; half++) {
        V8 y = half_of(s->y[c], half), av = half_of(s->av[k * t->channels + c], half);
        V8 a0 = half_of(a[i], half), a1 = two ? half_of(a[i + 1], half) : (V8){};
        w0 += a0 * av, w1 += a1 * av;
        if (t->skip) {
            V8 ak = half_of(s->p[k * t->channels + c], half);
            z0 += a0 * ak, z1 += a1 * ak;
        }
        if (attention == UNIFORM) continue;
        V8 g0 = half_of(s->d_scores[i], half);
        V8 g1 = two ? half_of(s->d_scores[i + 1], half) : (V8){};
        if (attention == L1) {
            g0 = signed_by(g0, y - first), g1 = two ? signed_by(g1, y - second) : g1;
            z0 -= g0, z1 -= g1, d_y[half] = g0 + g1;
        } else {
            z0 += g0 * y, z1 += g1 * y, d_y[half] = g0 * first + g1 * second;
        }
    }
    V4 sums = lane_sums(w0, w1, z0, z1);
    d_w[n] += sums[0], d_z[n] += sums[2];
    if (two) d_w[n + 1] += sums[1], d_z[n + 1] += sums[3];
    return __builtin_shufflevector(d_y[0], d_y[1], 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14,
                                   15);
}

/* Gradients of the shots of a class. */
INLINE void backward_class(const Cap *t, Tile *s, int64_t k, float *d_z, float *d_w,
                           int attention) {
    int64_t d = t->channels / t->heads, from = t->starts[k], to = t->starts[k + 1];
    for (int64_t h = 0; h < t->heads; h++) {
        const V *a = s->weights + h * t->support;
        if (attention != UNIFORM) backward_scores(t, s, k, h);
        for (int64_t c = h * d; c < (h + 1) * d; c++) {
            V d_y = s->d_y[c];
            int64_t i = from;
            for (; i + 2 <= to; i += 2)
                d_y += backward_shots(t, s, a, k, c, i, d_z, d_w, attention, 1);
            if (i < to) d_y += backward_shots(t, s, a, k, c, i, d_z, d_w, attention, 0);
            s->d_y[c] = d_y;
        }
    }
}

static void backward_part(void *task, int64_t part, int64_t parts) {
#pragma clang fp contract(fast)
    const Cap *t = task;
    Tile s = tile_of(t, part);
    int64_t C = t->channels, S = t->support;
    float *d_z = t->d_z + part * C * S, *d_w = t->d_w + part * C * S;
    for (int64_t i = 0; i < C * S; i++) d_z[i] = d_w[i] = 0;
    for (int64_t first = part * LANES; first < t->queries; first += parts * LANES) {
        s.weights = (V *)t->weights + first / LANES * t->heads * S;
        load_queries(t, &s, first);
        prototypes(t, &s);
        centre(t, &s);
        backward_mean(t, &s, first);
        for (int64_t c = 0; c < C; c++) s.d_y[c] = s.d_gate[c] = (V){};
        for (int64_t k = 0; k < t->classes; k++) {
            backward_prototype(t, &s, k, first);
            if (t->attention == L1)
                backward_class(t, &s, k, d_z, d_w, L1);
            else if (t->attention == DOT)
                backward_class(t, &s, k, d_z, d_w, DOT);
            else
                backward_class(t, &s, k, d_z, d_w, UNIFORM);
        }
        for (int64_t c = 0; c < C; c++) { /* v^Q = v gate + y */
            if (t->skip) s.d_y[c] += s.d_u[c];
            if (t->gate) s.d_gate[c] += s.d_u[c] * s.v[c], s.d_u[c] *= s.gate[c];
        }
        store(t->d_y, s.d_y, first, t->queries, C);
        store(t->d_v, s.d_u, first, t->queries, C);
        if (t->gate) store(t->d_gate, s.d_gate, first, t->queries, C);
    }
}

EXPORT void cap_backward(Fork fork, int64_t parts, Cap *task) {
    each_part(fork, parts, backward_part, task);
}
