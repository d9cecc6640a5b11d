#include "kernels.h"
#include <math.h>
#include <stdlib.h>

/* E experts of one layer: gate and up are [I, K], down is [K, I]. Tokens are sorted by expert: rows [start[e], start[e + 1])
 * of a matrix belong to expert e. */
struct experts {
    long E, K, I;
    int type;
    const char *const *gate, *const *up, *const *down;
    const long *start;
};

/* gate = silu(gate) * up for M rows of n, ld apart */
static void silu_times(float *gate, const float *up, long ld, long M, long n) {
    for (long m = 0; m < M; m++) {
        float *g = gate + m * ld;
        const float *u = up + m * ld;
        for (long i = 0; i < n; i += 8) {
            float in[16] = {0};
            const long count = MIN(8, n - i);
            memcpy(in, g + i, count * sizeof(float));
            memcpy(in + 8, u + i, count * sizeof(float));
            __m256 v = _mm256_loadu_ps(in);
            __m256 divisor = _mm256_add_ps(_mm256_set1_ps(1), exp8(_mm256_sub_ps(_mm256_setzero_ps(), v)));
            _mm256_storeu_ps(in, _mm256_mul_ps(_mm256_div_ps(v, divisor), _mm256_loadu_ps(in + 8)));
            memcpy(g + i, in, count * sizeof(float));
        }
    }
}

/* Called by every thread of a parallel region: y[P, K] (+)= down(silu(gate(x)) * up(x)) for x[P, K]; hidden is [2, P, I].
 * Only experts that have rows are read. */
static void swiglu(const struct experts *e, const float *x, float *hidden, float *y, int add, int num_threads) {
    const long P = e->start[e->E], K = e->K, I = e->I, size = bytes_of(e->type);
    float *gate = hidden, *up = hidden + P * I;
    long piece = rows_per_piece(e->type, I, K, num_threads), num_pieces = (I + piece - 1) / piece;
#pragma omp for schedule(dynamic)
    for (long p = 0; p < e->E * num_pieces; p++) {
        const long expert = p / num_pieces, row = p % num_pieces * piece, n = MIN(piece, I - row);
        const long first = e->start[expert], M = e->start[expert + 1] - first;
        if (M == 0) continue;
        multiply(e->type, x + first * K, K, M, e->gate[expert] + row * K * size, n, K, gate + first * I + row, I, 0);
        multiply(e->type, x + first * K, K, M, e->up[expert] + row * K * size, n, K, up + first * I + row, I, 0);
        silu_times(gate + first * I + row, up + first * I + row, I, M, n);
    }
    piece = rows_per_piece(e->type, K, I, num_threads), num_pieces = (K + piece - 1) / piece;
#pragma omp for schedule(dynamic)
    for (long p = 0; p < e->E * num_pieces; p++) {
        const long expert = p / num_pieces, row = p % num_pieces * piece, n = MIN(piece, K - row);
        const long first = e->start[expert], M = e->start[expert + 1] - first;
        if (M == 0) continue;
        multiply(e->type, gate + first * I, I, M, e->down[expert] + row * I * size, n, I, y + first * K + row, K, add);
    }
}

/* The dense net: y[T, K] += swiglu(x[T, K]). hidden is [2, T, I]. */
void feed_forward(const float *x, long T, long K, long I, int type, const char *gate, const char *up, const char *down,
                  float *hidden, float *y, int num_threads) {
    const long start[] = {0, T};
    const struct experts only = {1, K, I, type, &gate, &up, &down, start};
    num_threads = threads_for(T * K * I, num_threads);
#pragma omp parallel num_threads(num_threads)
    swiglu(&only, x, hidden, y, 1, num_threads);
}

/* The k likeliest experts of a token, likeliest first, and their shares, which sum to 1. Changes the logits. */
static void choose(float *logits, long E, int k, int *chosen, float *share) {
    float sum = 0;
    for (int i = 0; i < k; i++) {
        int best = 0;
        for (int e = 1; e < E; e++)
            if (logits[e] > logits[best]) best = e;
        chosen[i] = best;
        share[i] = i ? expf(logits[best] - share[0]) : logits[best];
        sum += i ? share[i] : 1;
        logits[best] = -INFINITY;
    }
    share[0] = 1;
    for (int i = 0; i < k; i++) share[i] /= sum;
}

/* Sorts the T * k pairs of token and expert by expert: start[E + 1], and the row of each pair. */
static void sort_by_expert(const int *chosen, long P, long E, long *start, int *row) {
    memset(start, 0, (E + 1) * sizeof(long));
    for (long p = 0; p < P; p++) start[chosen[p] + 1]++;
    for (long e = 0; e < E; e++) start[e + 1] += start[e];
    long next[E];
    memcpy(next, start, sizeof next);
    for (long p = 0; p < P; p++) row[p] = next[chosen[p]]++;
}

/* The mixture: y[T, K] += sum over the k experts of each token, by router[E, K]. work has room for
 * P = T * k rows of 2 K + 2 I + 3 and T rows of E floats; load[E] returns the tokens of each expert. */
void mixture(const float *x, long T, long K, long I, long E, int k, int type, const char *router, const char *const *gate,
             const char *const *up, const char *const *down, float *work, long *load, float *y, int num_threads) {
    const long P = T * k;
    float *sorted = work, *out = sorted + P * K, *hidden = out + P * K, *share = hidden + 2 * P * I, *logits = share + P;
    int *chosen = (int *)(logits + T * E), *row = chosen + P;
    long start[E + 1];
    const struct experts experts = {E, K, I, type, gate, up, down, start};
    num_threads = threads_for(P * K * I, num_threads);
#pragma omp parallel num_threads(num_threads)
    {
#pragma omp for
        for (long t = 0; t < T; t++) {
            multiply(type, x + t * K, K, 1, router, E, K, logits + t * E, E, 0);
            choose(logits + t * E, E, k, chosen + t * k, share + t * k);
        }
#pragma omp single
        sort_by_expert(chosen, P, E, start, row);
#pragma omp for
        for (long p = 0; p < P; p++) memcpy(sorted + row[p] * K, x + p / k * K, K * sizeof(float));
        swiglu(&experts, sorted, hidden, out, 0, num_threads);
#pragma omp for
        for (long t = 0; t < T; t++)
            for (long p = t * k; p < (t + 1) * k; p++)
                for (long i = 0; i < K; i++) y[t * K + i] += share[p] * out[row[p] * K + i];
    }
    for (long e = 0; e < E; e++) load[e] = start[e + 1] - start[e];
}
