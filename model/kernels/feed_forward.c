#include "kernels.h"
#include <math.h>

/* E experts of one layer: gate and up are [I, K], down is [K, I]. Rows [start[e], start[e + 1]) of x[P, K] belong to
 * expert e. hidden is [2, P, I]: gates, then ups. Experts without rows are not read. */
struct experts {
    const float *x;
    long E, K, I;
    int type;
    const char *const *gate, *const *up, *const *down;
    const long *start;
    float *hidden, *y;
    int add;
    long piece, num_pieces; /* rows of a matrix, and pieces of one */
};

INLINE void silu_times8(float *gate, const float *up) {
    __m256 v = _mm256_loadu_ps(gate);
    __m256 divisor = _mm256_add_ps(_mm256_set1_ps(1), exp8(_mm256_sub_ps(_mm256_setzero_ps(), v)));
    _mm256_storeu_ps(gate, _mm256_mul_ps(_mm256_div_ps(v, divisor), _mm256_loadu_ps(up)));
}

/* gate = silu(gate) * up for M rows of n, ld apart */
static void silu_times(float *gate, const float *up, long ld, long M, long n) {
    for (long m = 0; m < M; m++, gate += ld, up += ld) {
        long i = 0;
        for (; i + 8 <= n; i += 8) silu_times8(gate + i, up + i);
        if (i < n) {
            float last[16] = {0};
            memcpy(last, gate + i, (n - i) * sizeof(float)), memcpy(last + 8, up + i, (n - i) * sizeof(float));
            silu_times8(last, last + 8);
            memcpy(gate + i, last, (n - i) * sizeof(float));
        }
    }
}

/* Some columns of silu(gate(x)) * up(x) of one expert, into the gates of hidden. */
static void up_piece(const void *job, long p) {
    const struct experts *e = job;
    const long expert = p / e->num_pieces, row = p % e->num_pieces * e->piece, n = MIN(e->piece, e->I - row);
    const long first = e->start[expert], M = e->start[expert + 1] - first, offset = row * e->K * bytes_of(e->type);
    if (M == 0) return;
    const float *x = e->x + first * e->K;
    float *gate = e->hidden + first * e->I + row, *up = gate + e->start[e->E] * e->I;
    multiply(e->type, x, e->K, M, e->gate[expert] + offset, n, e->K, gate, e->I, 0);
    multiply(e->type, x, e->K, M, e->up[expert] + offset, n, e->K, up, e->I, 0);
    silu_times(gate, up, e->I, M, n);
}

/* Some columns of what one expert gives. */
static void down_piece(const void *job, long p) {
    const struct experts *e = job;
    const long expert = p / e->num_pieces, row = p % e->num_pieces * e->piece, n = MIN(e->piece, e->K - row);
    const long first = e->start[expert], M = e->start[expert + 1] - first;
    if (M == 0) return;
    const char *w = e->down[expert] + row * e->I * bytes_of(e->type);
    multiply(e->type, e->hidden + first * e->I, e->I, M, w, n, e->I, e->y + first * e->K + row, e->K, e->add);
}

static void swiglu(struct experts e, int num_threads) {
    e.piece = rows_per_piece(e.type, e.I, e.K, num_threads), e.num_pieces = ceil_div(e.I, e.piece);
    in_pieces(up_piece, &e, e.E * e.num_pieces, num_threads);
    e.piece = rows_per_piece(e.type, e.K, e.I, num_threads), e.num_pieces = ceil_div(e.K, e.piece);
    in_pieces(down_piece, &e, e.E * e.num_pieces, num_threads);
}

/* The dense net: y[T, K] += down(silu(gate(x)) * up(x)) for x[T, K]. hidden is [2, T, I]. */
void feed_forward(const float *x, long T, long K, long I, int type, const char *gate, const char *up, const char *down,
                  float *hidden, float *y, int num_threads) {
    const long start[] = {0, T};
    swiglu((struct experts){x, 1, K, I, type, &gate, &up, &down, start, hidden, y, 1, 0, 0},
           threads_for(T * K * I, num_threads));
}

/* The mixture: k of the E experts for each token. Pair p is token p / k and one of its experts; pairs are sorted by
 * expert. */
struct mixture {
    const float *x;
    long T, K, E, k;
    int type;
    const char *router;                       /* [E, K] */
    float *y, *sorted, *out, *share, *logits; /* [T, K], [P, K], [P, K], [P], [T, E] */
    int *chosen, *row;                        /* of each pair: expert, and row in `sorted` and `out` */
};

enum { TOKENS = 16 };

/* The k likeliest experts of each token, likeliest first, and their shares, which sum to 1. */
static void choose_piece(const void *job, long piece) {
    const struct mixture *m = job;
    for (long t = piece * TOKENS; t < MIN(m->T, (piece + 1) * TOKENS); t++) {
        float *logits = m->logits + t * m->E, *share = m->share + t * m->k, sum = 0, highest = 0;
        multiply(m->type, m->x + t * m->K, m->K, 1, m->router, m->E, m->K, logits, m->E, 0);
        for (long i = 0; i < m->k; i++) {
            long best = 0;
            for (long e = 1; e < m->E; e++)
                if (logits[e] > logits[best]) best = e;
            if (i == 0) highest = logits[best];
            m->chosen[t * m->k + i] = best;
            sum += share[i] = expf(logits[best] - highest);
            logits[best] = -INFINITY;
        }
        for (long i = 0; i < m->k; i++) share[i] /= sum;
    }
}

static void sort_by_expert(const struct mixture *m, long *start) {
    long next[m->E];
    memset(start, 0, (m->E + 1) * sizeof(long));
    for (long p = 0; p < m->T * m->k; p++) start[m->chosen[p] + 1]++;
    for (long e = 0; e < m->E; e++) start[e + 1] += start[e];
    memcpy(next, start, sizeof next);
    for (long p = 0; p < m->T * m->k; p++) m->row[p] = next[m->chosen[p]]++;
}

static void gather_piece(const void *job, long piece) {
    const struct mixture *m = job;
    for (long p = piece * TOKENS * m->k; p < MIN(m->T, (piece + 1) * TOKENS) * m->k; p++)
        memcpy(m->sorted + m->row[p] * m->K, m->x + p / m->k * m->K, m->K * sizeof(float));
}

static void scatter_piece(const void *job, long piece) {
    const struct mixture *m = job;
    for (long p = piece * TOKENS * m->k; p < MIN(m->T, (piece + 1) * TOKENS) * m->k; p++) {
        float *y = m->y + p / m->k * m->K, *out = m->out + m->row[p] * m->K;
        for (long i = 0; i < m->K; i++) y[i] += m->share[p] * out[i];
    }
}

/* y[T, K] += what the experts of each token give, by their shares. work has room for P = T * k rows of 2 K + 2 I + 3
 * floats and T rows of E; load[E] returns the tokens of each expert. */
void mixture(const float *x, long T, long K, long I, long E, long k, int type, const char *router,
             const char *const *gate, const char *const *up, const char *const *down, float *work, long *load, float *y,
             int num_threads) {
    const long P = T * k, num_pieces = ceil_div(T, TOKENS);
    float *sorted = work, *out = sorted + P * K, *hidden = out + P * K, *share = hidden + 2 * P * I,
          *logits = share + P;
    int *chosen = (int *)(logits + T * E);
    const struct mixture m = {x, T, K, E, k, type, router, y, sorted, out, share, logits, chosen, chosen + P};
    long start[E + 1];
    in_pieces(choose_piece, &m, num_pieces, threads_for(P * K, num_threads));
    sort_by_expert(&m, start);
    in_pieces(gather_piece, &m, num_pieces, threads_for(P * K, num_threads));
    swiglu((struct experts){sorted, E, K, I, type, gate, up, down, start, hidden, out, 0, 0, 0},
           threads_for(P * K * I, num_threads));
    in_pieces(scatter_piece, &m, num_pieces, threads_for(P * K, num_threads));
    for (long e = 0; e < E; e++) load[e] = start[e + 1] - start[e];
}
