/* Tiles of queries, and their prototypes: what cap_forward.c and cap_backward.c share.
 *
 * Queries pass in tiles of 16, one in each lane of a vector: nothing is ever summed over lanes but
 * gradients of the support, so that a query's answer is the same whatever is next to it. Channels
 * pass one by one, with the prototypes of all classes: their mean, which is taken off them, is then
 * at hand. Prototypes exist for one channel, or, where gradients are made, for one tile at a time.
 */

#pragma once
#include "common.h"

typedef struct {
    int64_t queries, channels, heads, classes, support;
    float factor, eps;         /* scores are factor times distance; eps of norms */
    const float *y, *v, *gate; /* keys, values, gates of queries: (query, channel) */
    const float *z, *w;        /* keys and values of shots, class after class: (channel, shot) */
    const int64_t *starts;     /* (class + 1,): where the shots of each class start */
    const int64_t *hidden;     /* (query,): the shot that a query does not see, or -1; or NULL */
    float *weights;         /* A: (tile, head, shot, lane), or NULL if nobody wants it afterwards */
    float *cosines;         /* (query, class) */
    const float *d_cosines; /* (query, class) */
    float *d_y, *d_v, *d_gate; /* (query, channel) */
    float *d_shots;            /* of z and w: (part, channel, shot, 2) */
    float *scratch;            /* (part, number) */
    int64_t scratch_size;      /* of a part, in numbers */
} Cap;

INLINE V all(float x) { return (V){} + x; }

/* A tile of (query, channel): (channel, lane); lanes without a query are 0. */
static void load(V *tile, const float *x, int64_t first, int64_t queries, int64_t channels) {
    int64_t lanes = queries - first < LANES ? queries - first : LANES;
    for (int64_t c = 0; c < channels; c++) tile[c] = (V){};
    for (int64_t i = 0; i < lanes; i++)
        for (int64_t c = 0; c < channels; c++)
            ((float *)tile)[c * LANES + i] = x[(first + i) * channels + c];
}

/* What a part works with: vectors (channel, lane) unless said otherwise. */
typedef struct {
    V *y, *v, *gate;       /* of the queries */
    V *u;                  /* v^Q less the mean of the prototypes */
    V *p, *av;             /* v^P less the mean, and A V: (channel, class, lane) */
    V *d_y, *d_v, *d_gate; /* gradients */
    V *norms;              /* of prototypes: (class, lane) */
    V *products;           /* p.u: (class, lane) */
    V *by_u, *by_p;        /* factors of u and p in the gradients of prototypes: (class, lane) */
    V *d_scores;           /* of one head: (shot, lane) */
    V *weights;            /* A: (head, shot, lane) */
    int64_t *class_of;     /* (shot,) */
    V length;              /* |u| */
} Tile;

static V *take(V **from, int64_t count) {
    V *taken = *from;
    *from += count;
    return taken;
}

static Tile tile_of(const Cap *t, int64_t part) {
    uintptr_t start = (uintptr_t)(t->scratch + part * t->scratch_size);
    V *x = (V *)((start + sizeof(V) - 1) / sizeof(V) * sizeof(V));
    int64_t C = t->channels, K = t->classes;
    int64_t kept = t->d_cosines ? C : 1; /* channels whose prototypes exist at once */
    Tile tile = {
        .y = take(&x, C),
        .v = take(&x, C),
        .gate = take(&x, C),
        .u = take(&x, C),
        .p = take(&x, kept * K),
        .av = take(&x, kept * K),
        .d_y = take(&x, C),
        .d_v = take(&x, C),
        .d_gate = take(&x, C),
        .norms = take(&x, K),
        .products = take(&x, K),
        .by_u = take(&x, K),
        .by_p = take(&x, K),
        .d_scores = take(&x, t->support),
        .weights = take(&x, t->heads * t->support),
        .class_of = (int64_t *)x,
    };
    for (int64_t k = 0; k < K; k++)
        for (int64_t i = t->starts[k]; i < t->starts[k + 1]; i++) tile.class_of[i] = k;
    return tile;
}

static void load_queries(const Cap *t, Tile *s, int64_t first) {
    load(s->y, t->y, first, t->queries, t->channels);
    load(s->v, t->v, first, t->queries, t->channels);
    load(s->gate, t->gate, first, t->queries, t->channels);
}

INLINE V norm(V square, float eps) {
    return __builtin_elementwise_max(__builtin_elementwise_sqrt(square), all(eps));
}

/* v^P = (A V) gate + (A K) of all classes in channel c, and A V; returns their mean. */
INLINE V prototypes(const Cap *t, const Tile *s, const V *a, int64_t c, V *p, V *av) {
#pragma clang fp contract(fast)
    const float *w = t->w + c * t->support, *z = t->z + c * t->support;
    V sum = {};
    for (int64_t k = 0; k < t->classes; k++) {
        V of_values = {}, of_keys = {};
        int64_t from = t->starts[k], to = t->starts[k + 1];
        for (int64_t i = from; i < to; i++) of_values += a[i] * w[i], of_keys += a[i] * z[i];
        av[k] = of_values;
        p[k] = of_values * s->gate[c] + of_keys;
        sum += p[k];
    }
    return sum / (float)t->classes;
}

/* Norms and products of queries and prototypes, less the mean. With `keep`, p, A V and u stay. */
INLINE void compare(const Cap *t, Tile *s, int keep) {
#pragma clang fp contract(fast)
    int64_t K = t->classes, d = t->channels / t->heads;
    V square = {};
    for (int64_t k = 0; k < K; k++) s->norms[k] = s->products[k] = (V){};
    for (int64_t c = 0; c < t->channels; c++) {
        V *p = s->p + keep * c * K, *av = s->av + keep * c * K;
        V mean = prototypes(t, s, s->weights + c / d * t->support, c, p, av);
        V u = s->v[c] * s->gate[c];
        u += s->y[c];
        u -= mean;
        square += u * u;
        if (keep) s->u[c] = u;
        for (int64_t k = 0; k < K; k++) {
            V x = p[k] - mean;
            if (keep) p[k] = x;
            s->norms[k] += x * x;
            if (!keep) s->products[k] += x * u;
        }
    }
    s->length = norm(square, t->eps);
    for (int64_t k = 0; k < K; k++) s->norms[k] = norm(s->norms[k], t->eps);
}
