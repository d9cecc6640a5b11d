#include "kernels.h"
#include <math.h>

struct linear {
    const float *x;
    long M, K;
    int type, num_parts;
    const char *const *w;
    const float *const *bias;
    const long *N;
    float *y;
    long ldy;
    int add;
    long piece; /* rows of w */
};

static void linear_piece(const void *job, long p) {
    const struct linear *l = job;
    int part = 0;
    float *y = l->y;
    for (long num; p >= (num = ceil_div(l->N[part], l->piece)); part++) p -= num, y += l->N[part];
    const long first = p * l->piece, n = MIN(l->piece, l->N[part] - first);
    const float *bias = l->bias[part];
    y += first;
    if (bias != NULL)
        for (long m = 0; m < l->M; m++)
            for (long j = 0; j < n; j++) y[m * l->ldy + j] = bias[first + j] + (l->add ? y[m * l->ldy + j] : 0);
    const char *w = l->w[part] + first * l->K * bytes_of(l->type);
    multiply(l->type, l->x, l->K, l->M, w, n, l->K, y, l->ldy, l->add || bias != NULL);
}

/* y[M, sum of N] (+)= x[M, K] times the rows of several matrices w[i][N[i], K] side by side, plus bias[i][N[i]] or
 * NULL. */
void linear(const float *x, long M, long K, int type, int num_parts, const char *const *w, const float *const *bias,
            const long *N, float *y, int add, int num_threads) {
    long num_rows = 0, num_pieces = 0;
    for (int i = 0; i < num_parts; i++) num_rows += N[i];
    num_threads = threads_for(M * num_rows * K, num_threads);
    const long piece = rows_per_piece(type, num_rows, K, num_threads);
    for (int i = 0; i < num_parts; i++) num_pieces += ceil_div(N[i], piece);
    const struct linear job = {x, M, K, type, num_parts, w, bias, N, y, num_rows, add, piece};
    in_pieces(linear_piece, &job, num_pieces, num_threads);
}

enum { NORM_ROWS = 16 };

struct norm {
    const float *x, *weight;
    float eps;
    long M, K;
    float *y;
};

static void norm_piece(const void *job, long p) {
    const struct norm *n = job;
    for (long m = p * NORM_ROWS; m < MIN(n->M, (p + 1) * NORM_ROWS); m++) {
        const float *x = n->x + m * n->K;
        __m256 squares = _mm256_setzero_ps();
        long k = 0;
        for (; k + 8 <= n->K; k += 8) {
            __m256 v = _mm256_loadu_ps(x + k);
            squares = _mm256_fmadd_ps(v, v, squares);
        }
        float sum = sum8(squares);
        for (; k < n->K; k++) sum += x[k] * x[k];
        const float scale = 1 / sqrtf(sum / n->K + n->eps);
        for (k = 0; k < n->K; k++) n->y[m * n->K + k] = x[k] * scale * n->weight[k];
    }
}

/* y[m, :] = x[m, :] * weight / rms(x[m, :]) */
void rms_norm(const float *x, const float *weight, float eps, long M, long K, float *y, int num_threads) {
    const struct norm job = {x, weight, eps, M, K, y};
    in_pieces(norm_piece, &job, ceil_div(M, NORM_ROWS), threads_for(M * K, num_threads));
}
