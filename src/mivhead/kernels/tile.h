/* Tiles of queries, and their prototypes: what cap_forward.c and cap_backward.c share.
 *
 * Queries pass in tiles of 16, one in each lane of a vector: nothing is ever summed over lanes but
 * gradients of the support, so that a query's answer is the same whatever is beside it. Prototypes
 * exist for one tile at a time, and are made again for their gradients: that costs less than to
 * write all of them to memory and to read them.
 */

#pragma once
#include "common.h"

enum { UNIFORM, L1, DOT };

typedef struct {
    int64_t queries, channels, heads, classes, support;
    int64_t attention;     /* UNIFORM, L1 or DOT */
    int64_t skip, centred; /* whether prototypes have A K; whether cosines are around their mean */
    float factor, eps;     /* scores are factor times distance or dot product; of norms */
    const float *y, *v, *gate; /* keys, values, gates of queries: (query, channel); gate: or NULL */
    const float *z, *w;        /* keys and values of shots, class after class: (channel, shot) */
    const int64_t *starts;     /* (class + 1,): where the shots of each class start */
    const int64_t *hidden;     /* (query,): the shot that a query does not see, or -1; or NULL */
    float *weights;         /* A: (tile, head, shot, lane), or NULL if nobody wants it afterwards */
    float *cosines;         /* (query, class) */
    const float *d_cosines; /* (query, class) */
    float *d_y, *d_v, *d_gate; /* (query, channel) */
    float *d_z, *d_w;          /* (part, channel, shot) */
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
    V *u, *mean;           /* v^Q less the mean; the mean of the prototypes */
    V *p, *av;             /* v^P less the mean, and A V: (class, channel, lane) */
    V *d_y, *d_u, *d_gate; /* gradients */
    V *share;              /* what the mean takes off a prototype's gradient */
    V *norms;              /* of prototypes: (class, lane) */
    V *d_scores;           /* of one head and class: (shot, lane) */
    V *weights;            /* A: (head, shot, lane) */
    V length;              /* |v^Q - mean| */
} Tile;

static V *take(V **from, int64_t count) {
    V *taken = *from;
    *from += count;
    return taken;
}

static Tile tile_of(const Cap *t, int64_t part) {
    uintptr_t start = (uintptr_t)(t->scratch + part * t->scratch_size);
    V *x = (V *)((start + sizeof(V) - 1) / sizeof(V) * sizeof(V));
    int64_t C = t->channels;
    return (Tile){
        .y = take(&x, C),
        .v = take(&x, C),
        .gate = take(&x, C),
        .u = take(&x, C),
        .mean = take(&x, C),
        .p = take(&x, C * t->classes),
        .av = take(&x, C * t->classes),
        .d_y = take(&x, C),
        .d_u = take(&x, C),
        .d_gate = take(&x, C),
        .share = take(&x, C),
        .norms = take(&x, t->classes),
        .d_scores = take(&x, t->support),
        .weights = take(&x, t->heads * t->support),
    };
}

/* v^P = (A V) gate + (A K) of all classes, with A V beside it, and the mean over the classes. */
static void prototypes(const Cap *t, Tile *s) {
#pragma clang fp contract(fast)
    int64_t S = t->support, C = t->channels, d = C / t->heads;
    for (int64_t k = 0; k < t->classes; k++)
        for (int64_t h = 0; h < t->heads; h++) {
            const V *a = s->weights + h * S;
            int64_t from = t->starts[k], to = t->starts[k + 1];
            for (int64_t c = h * d; c < (h + 1) * d; c++) {
                const float *w = t->w + c * S, *z = t->z + c * S;
                V av = {}, ak = {};
                if (t->skip)
                    for (int64_t i = from; i < to; i++) av += a[i] * w[i], ak += a[i] * z[i];
                else
                    for (int64_t i = from; i < to; i++) av += a[i] * w[i];
                s->av[k * C + c] = av;
                s->p[k * C + c] = av = t->gate ? av * s->gate[c] + ak : av + ak;
                s->mean[c] = k ? s->mean[c] + av : av;
            }
        }
    for (int64_t c = 0; c < C; c++)
        s->mean[c] = t->centred ? s->mean[c] / (float)t->classes : (V){};
}

static void load_queries(const Cap *t, Tile *s, int64_t first) {
    load(s->y, t->y, first, t->queries, t->channels);
    load(s->v, t->v, first, t->queries, t->channels);
    if (t->gate) load(s->gate, t->gate, first, t->queries, t->channels);
}

/* v^Q and v^P, less the mean, and their norms. */
static void centre(const Cap *t, Tile *s) {
#pragma clang fp contract(fast)
    int64_t C = t->channels;
    V square = {};
    for (int64_t c = 0; c < C; c++) {
        V u = t->gate ? s->v[c] * s->gate[c] : s->v[c];
        if (t->skip) u += s->y[c];
        s->u[c] = u -= s->mean[c];
        square += u * u;
    }
    s->length = __builtin_elementwise_max(__builtin_elementwise_sqrt(square), all(t->eps));
    for (int64_t k = 0; k < t->classes; k++) {
        V sum = {}, *p = s->p + k * C;
        for (int64_t c = 0; c < C; c++) p[c] -= s->mean[c], sum += p[c] * p[c];
        s->norms[k] = __builtin_elementwise_max(__builtin_elementwise_sqrt(sum), all(t->eps));
    }
}
