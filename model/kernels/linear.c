#include "kernels.h"
#include <math.h>

/* y[M, sum of N] (+)= x[M, K] times the rows of several matrices w[i][N[i], K] side by side, plus bias[i][N[i]] or NULL. */
void linear(const float *x, long M, long K, int type, int num_parts, const char *const *w, const float *const *bias,
            const long *N, float *y, int add, int num_threads) {
    long num_rows = 0, first_piece[num_parts + 1], first_row[num_parts];
    for (int i = 0; i < num_parts; i++) first_row[i] = num_rows, num_rows += N[i];
    num_threads = threads_for(M * num_rows * K, num_threads);
    const long piece = rows_per_piece(type, num_rows, K, num_threads);
    first_piece[0] = 0;
    for (int i = 0; i < num_parts; i++) first_piece[i + 1] = first_piece[i] + (N[i] + piece - 1) / piece;
#pragma omp parallel for schedule(dynamic) num_threads(num_threads)
    for (long p = 0; p < first_piece[num_parts]; p++) {
        int i = 0;
        while (p >= first_piece[i + 1]) i++;
        const long row = (p - first_piece[i]) * piece, n = MIN(piece, N[i] - row);
        float *out = y + first_row[i] + row;
        if (bias[i] != NULL)
            for (long m = 0; m < M; m++)
                for (long j = 0; j < n; j++) out[m * num_rows + j] = bias[i][row + j] + (add ? out[m * num_rows + j] : 0);
        multiply(type, x, K, M, w[i] + row * K * bytes_of(type), n, K, out, num_rows, add || bias[i] != NULL);
    }
}

/* y[m, :] = x[m, :] * weight / rms(x[m, :]) */
void rms_norm(const float *x, const float *weight, float eps, long M, long K, float *y, int num_threads) {
#pragma omp parallel for num_threads(threads_for(M * K, num_threads))
    for (long m = 0; m < M; m++) {
        const float *in = x + m * K;
        __m256 squares = _mm256_setzero_ps();
        long k = 0;
        for (; k + 8 <= K; k += 8) {
            __m256 v = _mm256_loadu_ps(in + k);
            squares = _mm256_fmadd_ps(v, v, squares);
        }
        float sum = sum8(squares);
        for (; k < K; k++) sum += in[k] * in[k];
        const float scale = 1 / sqrtf(sum / K + eps);
        for (k = 0; k < K; k++) y[m * K + k] = in[k] * scale * weight[k];
    }
}
