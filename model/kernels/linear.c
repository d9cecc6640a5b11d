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
    char *packed;
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
    const char *w = l->w[part] + first * row_bytes(l->type, l->K);
    if (is_packed(l->type))
        multiply_packed(l->packed, l->M, w, n, l->K, y, l->ldy, l->add || bias != NULL);
    else
        multiply(l->type, l->x, l->K, l->M, w, n, l->K, y, l->ldy, l->add || bias != NULL);
}

/* y[M, sum of N] (+)= x[M, K] times the rows of several matrices w[i][N[i], K] side by side, plus bias[i][N[i]] or
 * NULL. work has room for M rows of K floats, M rounded up to TOKENS and K to STEP. */
void linear(const float *x, long M, long K, int type, int num_parts, const char *const *w, const float *const *bias,
            const long *N, char *work, float *y, int add, int num_threads) {
    long num_rows = 0, num_pieces = 0;
    for (int i = 0; i < num_parts; i++) num_rows += N[i];
    num_threads = threads_for(M * num_rows * K, num_threads);
    const long piece = rows_per_piece(type, num_rows, K, num_threads);
    for (int i = 0; i < num_parts; i++) num_pieces += ceil_div(N[i], piece);
    const struct linear job = {x, M, K, type, num_parts, w, bias, N, y, num_rows, add, piece, work};
    if (is_packed(type)) pack_all(x, M, K, work, num_threads);
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
        vector squares = vall(0);
        long k = 0;
        for (; k + WIDTH <= n->K; k += WIDTH) squares = vfma(vload(x + k), vload(x + k), squares);
        float sum = sum_of(squares);
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
