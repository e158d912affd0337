/* Pooling of an image's candidates by attention, the second half of Component 1: see compiled.py.
 *
 * There are few of them, so what depends on them alone is computed again for the gradients.
 */

#include "common.h"

typedef struct {
    int64_t images, channels, candidates;
    float factor;          /* scores are factor mu . x / |x| */
    float eps;             /* |x| is at least so long */
    float length;          /* taken instead of |x| if it is not 0 */
    const float *mu;       /* (channel,) */
    const float *x;        /* (image, candidate, channel) */
    float *pooled;         /* (image, channel) */
    const float *d_pooled; /* (image, channel) */
    float *d_mu;           /* from each image: (image, channel) */
    float *d_x;            /* (image, candidate, channel) */
    float *scratch;        /* (part, 4, candidate) */
} Candidates;

INLINE float dot(const float *a, const float *b, int64_t n) {
#pragma clang fp reassociate(on) contract(fast)
    float sum = 0;
    for (int64_t i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

/* Norms, scores and weights of the candidates x of an image. */
static void weigh(const Candidates *t, const float *x, float *norms, float *scores, float *w) {
    int64_t D = t->candidates, C = t->channels;
    float top = -1e30f, sum = 0;
    for (int64_t j = 0; j < D; j++) {
        float norm = t->length ? t->length : __builtin_sqrtf(dot(x + j * C, x + j * C, C));
        norms[j] = norm > t->eps ? norm : t->eps;
        scores[j] = dot(t->mu, x + j * C, C) * (t->factor / norms[j]);
        top = scores[j] > top ? scores[j] : top;
    }
    for (int64_t j = 0; j < D; j++) sum += w[j] = exp_of((V){} + (scores[j] - top))[0];
    for (int64_t j = 0; j < D; j++) w[j] /= sum;
}

EXPORT void candidates_forward(const Candidates *t, int64_t part, int64_t parts) {
#pragma clang fp contract(fast)
    int64_t D = t->candidates, C = t->channels;
    float *norms = t->scratch + part * 4 * D, *scores = norms + D, *w = scores + D;
    for (int64_t n = t->images * part / parts; n < t->images * (part + 1) / parts; n++) {
        const float *x = t->x + n * D * C;
        float *restrict out = t->pooled + n * C;
        weigh(t, x, norms, scores, w);
        for (int64_t c = 0; c < C; c++) out[c] = 0;
        for (int64_t j = 0; j < D; j++)
            for (int64_t c = 0; c < C; c++) out[c] += w[j] * x[j * C + c];
    }
}

/* Candidates take part in the sum, in the dot products and in the norms. */
EXPORT void candidates_backward(const Candidates *t, int64_t part, int64_t parts) {
#pragma clang fp contract(fast)
    int64_t D = t->candidates, C = t->channels;
    float *norms = t->scratch + part * 4 * D, *scores = norms + D, *w = scores + D, *d_w = w + D;
    for (int64_t n = t->images * part / parts; n < t->images * (part + 1) / parts; n++) {
        const float *x = t->x + n * D * C, *grad = t->d_pooled + n * C;
        float *restrict d_mu = t->d_mu + n * C, mean = 0;
        weigh(t, x, norms, scores, w);
        for (int64_t j = 0; j < D; j++) {
            d_w[j] = dot(grad, x + j * C, C);
            mean += w[j] * d_w[j];
        }
        for (int64_t c = 0; c < C; c++) d_mu[c] = 0;
        for (int64_t j = 0; j < D; j++) {
            float d_score = w[j] * (d_w[j] - mean), slope = d_score * t->factor / norms[j];
            float by_norm = t->length ? 0 : d_score * scores[j] / (norms[j] * norms[j]);
            float *restrict d_x = t->d_x + (n * D + j) * C;
            for (int64_t c = 0; c < C; c++) {
                float xc = x[j * C + c];
                d_mu[c] += slope * xc;
                d_x[c] = w[j] * grad[c] + (slope * t->mu[c] - by_norm * xc);
            }
        }
    }
}
