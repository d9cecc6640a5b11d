#include "kernels.h"
#include <math.h>

/* E experts of one layer: gate and up are [I, K], down is [K, I]. Rows [start[e], start[e + 1]) of x[P, K] belong to
 * expert e. hidden is [2, P, I]: gates, then ups. Experts without rows are not read. With packed weights x and hidden
 * are packed: those of expert e begin at the group of row begin[e], a multiple of TOKENS. */
struct experts {
    const void *x;
    long E, K, I;
    int type;
    const char *const *gate, *const *up, *const *down;
    const long *start, *begin;
    void *hidden;
    float *y;
    int add;
    long piece, num_pieces; /* rows of a matrix, and pieces of one */
};

/* gate = silu(gate) * up for M rows of n, ld apart */
static void silu_times_rows(float *gate, const float *up, long ld, long M, long n) {
    for (long m = 0; m < M; m++, gate += ld, up += ld) {
        long i = 0;
        for (; i + WIDTH <= n; i += WIDTH) vstore(gate + i, silu_times(vload(gate + i), vload(up + i)));
        if (i < n) {
            float last[2 * WIDTH] = {0};
            memcpy(last, gate + i, (n - i) * sizeof(float)), memcpy(last + WIDTH, up + i, (n - i) * sizeof(float));
            vstore(last, silu_times(vload(last), vload(last + WIDTH)));
            memcpy(gate + i, last, (n - i) * sizeof(float));
        }
    }
}

/* Some columns of silu(gate(x)) * up(x) of one expert, into the gates of hidden. */
static void up_piece(const void *job, long p) {
    const struct experts *e = job;
    const long expert = p / e->num_pieces, row = p % e->num_pieces * e->piece, n = MIN(e->piece, e->I - row);
    const long first = e->start[expert], M = e->start[expert + 1] - first, offset = row * row_bytes(e->type, e->K);
    if (M == 0) return;
    if (is_packed(e->type)) {
        const char *x = (const char *)e->x + packed_bytes(e->begin[expert], e->K);
        char *hidden = (char *)e->hidden + packed_bytes(e->begin[expert], e->I);
        gate_packed(x, M, e->gate[expert], e->up[expert], row, n, e->K, e->I, hidden);
        return;
    }
    const float *x = (const float *)e->x + first * e->K;
    float *gate = (float *)e->hidden + first * e->I + row, *up = gate + e->start[e->E] * e->I;
    multiply(e->type, x, e->K, M, e->gate[expert] + offset, n, e->K, gate, e->I, 0);
    multiply(e->type, x, e->K, M, e->up[expert] + offset, n, e->K, up, e->I, 0);
    silu_times_rows(gate, up, e->I, M, n);
}

/* Some columns of what one expert gives. */
static void down_piece(const void *job, long p) {
    const struct experts *e = job;
    const long expert = p / e->num_pieces, row = p % e->num_pieces * e->piece, n = MIN(e->piece, e->K - row);
    const long first = e->start[expert], M = e->start[expert + 1] - first;
    if (M == 0) return;
    const char *w = e->down[expert] + row * row_bytes(e->type, e->I);
    float *y = e->y + first * e->K + row;
    if (is_packed(e->type))
        multiply_packed((char *)e->hidden + packed_bytes(e->begin[expert], e->I), M, w, n, e->I, y, e->K, e->add);
    else
        multiply(e->type, (float *)e->hidden + first * e->I, e->I, M, w, n, e->I, y, e->K, e->add);
}

static void swiglu(struct experts e, int num_threads) {
    e.piece = rows_per_piece(e.type, e.I, e.K, num_threads), e.num_pieces = ceil_div(e.I, e.piece);
    in_pieces(up_piece, &e, e.E * e.num_pieces, num_threads);
    e.piece = rows_per_piece(e.type, e.K, e.I, num_threads), e.num_pieces = ceil_div(e.K, e.piece);
    in_pieces(down_piece, &e, e.E * e.num_pieces, num_threads);
}

/* The dense net: y[T, K] += down(silu(gate(x)) * up(x)) for x[T, K]. work has room for T rows of K + 2 I floats, T
 * rounded up to TOKENS, K and I to STEP. */
void feed_forward(const float *x, long T, long K, long I, int type, const char *gate, const char *up, const char *down,
                  char *work, float *y, int num_threads) {
    const long start[] = {0, T};
    num_threads = threads_for(T * K * I, num_threads);
    char *hidden = work + packed_bytes(T, K);
    if (is_packed(type)) pack_all(x, T, K, work, num_threads);
    const void *input = is_packed(type) ? (const void *)work : x;
    swiglu((struct experts){input, 1, K, I, type, &gate, &up, &down, start, start, hidden, y, 1, 0, 0}, num_threads);
}

/* The mixture: k of the E experts for each token. Pair p is token p / k and one of its experts; pairs are sorted by
 * expert. */
struct mixture {
    const float *x;
    long T, K, E, k;
    int type;
    const char *router;                       /* [E, K] */
    float *y, *sorted, *out, *share, *logits; /* [T, K], [P, K], [P, K], [P], [T, E] */
    int *chosen, *row, *token;                /* of each pair: expert, and row in `out`; of each row: token */
    long *start, *begin;                      /* [E + 1] see struct experts */
};

/* The k likeliest experts of each token, likeliest first, and their shares, which sum to 1. */
static void choose_piece(const void *job, long piece) {
    const struct mixture *m = job;
    const long first = piece * TOKENS, num = MIN(TOKENS, m->T - first);
    multiply(m->type, m->x + first * m->K, m->K, num, m->router, m->E, m->K, m->logits + first * m->E, m->E, 0);
    for (long t = first; t < first + num; t++) {
        float *logits = m->logits + t * m->E, *share = m->share + t * m->k, sum = 0, highest = 0;
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

static void sort_by_expert(const struct mixture *m) {
    long next[m->E];
    memset(m->start, 0, (m->E + 1) * sizeof(long));
    for (long p = 0; p < m->T * m->k; p++) m->start[m->chosen[p] + 1]++;
    m->begin[0] = 0;
    for (long e = 0; e < m->E; e++) {
        m->begin[e + 1] = m->begin[e] + ceil_div(m->start[e + 1], TOKENS) * TOKENS;
        m->start[e + 1] += m->start[e];
        next[e] = m->start[e];
    }
    for (long p = 0; p < m->T * m->k; p++) m->token[m->row[p] = next[m->chosen[p]]++] = p / m->k;
}

/* TOKENS rows of one expert, and the place of them. */
static void gather_piece(const void *job, long piece) {
    const struct mixture *m = job;
    long e = 0;
    while (m->begin[e + 1] <= piece * TOKENS) e++;
    const long first = m->start[e] + piece * TOKENS - m->begin[e], num = MIN(TOKENS, m->start[e + 1] - first);
    const float *rows[TOKENS];
    for (long i = 0; i < num; i++) rows[i] = m->x + m->token[first + i] * m->K;
    if (is_packed(m->type))
        pack(rows, num, m->K, (char *)m->sorted + packed_bytes(piece * TOKENS, m->K));
    else
        for (long i = 0; i < num; i++) memcpy(m->sorted + (first + i) * m->K, rows[i], m->K * sizeof(float));
}

static void scatter_piece(const void *job, long piece) {
    const struct mixture *m = job;
    for (long p = piece * TOKENS * m->k; p < MIN(m->T, (piece + 1) * TOKENS) * m->k; p++) {
        float *y = m->y + p / m->k * m->K, *out = m->out + m->row[p] * m->K;
        for (long i = 0; i < m->K; i++) y[i] += m->share[p] * out[i];
    }
}

/* y[T, K] += what the experts of each token give, by their shares. work has room for P = T * k rows of K + 4 floats, T
 * rows of E, 16 floats, and R rows of K + 2 I with K and I rounded up to STEP, where R counts TOKENS - 1 more for each
 * expert that can have a token; load[E] returns the tokens of each expert. */
void mixture(const float *x, long T, long K, long I, long E, long k, int type, const char *router,
             const char *const *gate, const char *const *up, const char *const *down, float *work, long *load, float *y,
             int num_threads) {
    const long P = T * k, num_pieces = ceil_div(T, TOKENS);
    float *out = work, *share = out + P * K, *logits = share + P;
    int *chosen = (int *)(logits + T * E);
    float *sorted = (float *)(((uintptr_t)(chosen + 3 * P) + 63) & -64); /* tiles are slow anywhere else */
    long start[E + 1], begin[E + 1];
    const struct mixture m = {x,     T,      K,      E,          k,              type,  router, y, sorted, out,
                              share, logits, chosen, chosen + P, chosen + 2 * P, start, begin};
    in_pieces(choose_piece, &m, num_pieces, threads_for(P * K, num_threads));
    sort_by_expert(&m);
    in_pieces(gather_piece, &m, begin[E] / TOKENS, threads_for(P * K, num_threads));
    void *hidden = (char *)sorted + packed_bytes(begin[E], K);
    swiglu((struct experts){sorted, E, K, I, type, gate, up, down, start, begin, hidden, out, 0, 0, 0},
           threads_for(P * K * I, num_threads));
    in_pieces(scatter_piece, &m, num_pieces, threads_for(P * K, num_threads));
    for (long e = 0; e < E; e++) load[e] = start[e + 1] - start[e];
}
