#include "kernels.h"
#include <math.h>

/* The cache of a layer is [N, H, 2, B, D] of `type`: blocks, KV heads, keys and values, tokens of a block, head size.
 * Q query heads; G = Q / H of them share a KV head. Heads are padded to a multiple of WIDTH in scratch memory. */
enum { MAX_D = 256, KEYS = 64, MAX_ROWS = 48 };

/* Norm over one head, if the family has one (weight), then the rotation. */
static void rotate(const float *in, const float *weight, float eps, const float *cosine, const float *sine, long D,
                   float *out) {
    float scaled[MAX_D];
    memcpy(scaled, in, D * sizeof(float));
    if (weight != NULL) {
        float sum = 0;
        for (long d = 0; d < D; d++) sum += in[d] * in[d];
        const float scale = 1 / sqrtf(sum / D + eps);
        for (long d = 0; d < D; d++) scaled[d] *= scale * weight[d];
    }
    const float *real = scaled, *imaginary = scaled + D / 2;
    for (long d = 0; d < D / 2; d++) out[d] = real[d] * cosine[d] - imaginary[d] * sine[d];
    for (long d = 0; d < D / 2; d++) out[D / 2 + d] = imaginary[d] * cosine[d] + real[d] * sine[d];
}

struct store {
    const float *qkv;
    long T, Q, H, D, B;
    const float *cosines, *sines, *query_norm, *key_norm;
    float eps;
    const int64_t *slots;
    int type;
    char *cache;
    float *queries;
};

static void store_piece(const void *job, long piece) {
    const struct store *s = job;
    const long D = s->D, B = s->B, size = bytes_of(s->type);
    for (long t = piece * TOKENS; t < MIN(s->T, (piece + 1) * TOKENS); t++) {
        const float *in = s->qkv + t * (s->Q + 2 * s->H) * D;
        const float *cosine = s->cosines + t * D / 2, *sine = s->sines + t * D / 2;
        float *query = s->queries + t * s->Q * D, key[MAX_D];
        for (long q = 0; q < s->Q; q++, in += D, query += D) rotate(in, s->query_norm, s->eps, cosine, sine, D, query);
        for (long h = 0; h < s->H; h++, in += D) {
            char *keys = s->cache + ((s->slots[t] / B * s->H + h) * 2 * B + s->slots[t] % B) * D * size;
            char *values = keys + B * D * size;
            const float *value = in + s->H * D;
            rotate(in, s->key_norm, s->eps, cosine, sine, D, key);
            for (long d = 0; d < D; d++) store1(s->type, keys + d * size, key[d]);
            for (long d = 0; d < D; d++) store1(s->type, values + d * size, value[d]);
        }
    }
}

/* qkv[T, Q + 2 H, D] -> rotated queries[T, Q, D]; rotated keys, and values, into their slots[T] of the cache. */
void store(const float *qkv, long T, long Q, long H, long D, long B, const float *cosines, const float *sines,
           const float *query_norm, const float *key_norm, float eps, const int64_t *slots, int type, char *cache,
           float *queries, int num_threads) {
    const struct store job = {qkv,        T,        Q,   H,     D,    B,     cosines, sines,
                              query_norm, key_norm, eps, slots, type, cache, queries};
    in_pieces(store_piece, &job, ceil_div(T, TOKENS), threads_for(T * (Q + 2 * H) * D, num_threads));
}

/* out[m rows, n vectors] += weights[m rows, KEYS] times values[num_keys, ld], for the columns at `out` and `values`. */
INLINE void add_values(int m, int n, const float *weights, const float *values, long num_keys, float *out, long ld) {
    vector sum[8];
#pragma GCC unroll 8
    for (int i = 0; i < m * n; i++) sum[i] = vload(out + i / n * ld + i % n * WIDTH);
    for (long key = 0; key < num_keys; key++) {
        vector value[2];
#pragma GCC unroll 2
        for (int j = 0; j < n; j++) value[j] = vload(values + key * ld + j * WIDTH);
#pragma GCC unroll 8
        for (int i = 0; i < m * n; i++) sum[i] = vfma(vall(weights[i / n * KEYS + key]), value[i % n], sum[i]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < m * n; i++) vstore(out + i / n * ld + i % n * WIDTH, sum[i]);
}

INLINE void add_rows(int m, const float *weights, const float *values, long num_keys, float *out, long ld) {
    long d = 0;
    for (; d + 2 * WIDTH <= ld; d += 2 * WIDTH) add_values(m, 2, weights, values + d, num_keys, out + d, ld);
    if (d < ld) add_values(m, 1, weights, values + d, num_keys, out + d, ld);
}

/* out[num_rows, ld] += weights[num_rows, KEYS] times values[num_keys, ld] */
static void add_weighted(const float *weights, const float *values, long num_rows, long num_keys, float *out, long ld) {
    for (; num_rows >= 4; num_rows -= 4, weights += 4 * KEYS, out += 4 * ld)
        add_rows(4, weights, values, num_keys, out, ld);
    if (num_rows == 3) add_rows(3, weights, values, num_keys, out, ld);
    if (num_rows == 2) add_rows(2, weights, values, num_keys, out, ld);
    if (num_rows == 1) add_rows(1, weights, values, num_keys, out, ld);
}

/* Scores of one row over `count` keys, of which it sees the first `num_seen`, become weights e^(score - highest); those
 * of the rest 0. `highest` and `total` go on from the keys before; returns what to scale the sum so far by. */
static float soften(float *scores, long num_seen, long count, float *highest, float *total) {
    const long end = padded(MAX(num_seen, 0));
    for (long key = end; key < count; key++) scores[key] = 0;
    if (end == 0) return 1;
    for (long key = num_seen; key < end; key++) scores[key] = -INFINITY;
    vector most = vall(*highest);
    for (long key = 0; key < end; key += WIDTH) most = vmax(most, vload(scores + key));
    const float now = most_of(most);
    const float scale = *highest == now ? 1 : expf(*highest - now);
    vector sum = vall(0);
    for (long key = 0; key < end; key += WIDTH) {
        const vector weight = exp_of(vsub(vload(scores + key), vall(now)));
        vstore(scores + key, weight);
        sum = vadd(sum, weight);
    }
    *highest = now;
    *total = *total * scale + sum_of(sum);
    return scale;
}

/* Of the keys from `first` on, a row sees those from `tree` on, j behind it, only if bit j of `seen` is set. */
static void hide(float *scores, long first, long num_seen, long tree, uint64_t seen) {
    for (long key = MAX(0, tree - first); key < num_seen; key++)
        if (!(seen >> (first + key - tree) & 1)) scores[key] = -INFINITY;
}

/* `num_tokens` queries, the first in the slot at `position`, over the keys and values of one KV head. queries and out
 * are [num_tokens, Q, D], at the first of the G heads; cache is that of the layer, at the KV head. With `seen`
 * [num_tokens], slots from `tree` on are those of nodes; there is one before it, which every token sees. */
static void attend(const float *queries, long num_tokens, long position, const int *table, const char *cache, int type,
                   long Q, long H, long G, long B, long D, long tree, const uint64_t *seen, float *out) {
    const long ld = padded(D), num_rows = num_tokens * G, num_keys = position + num_tokens, size = bytes_of(type);
    float query[MAX_ROWS * ld], sum[MAX_ROWS * ld], keys[KEYS * ld], values[KEYS * ld], scores[MAX_ROWS * KEYS];
    float highest[MAX_ROWS], total[MAX_ROWS];
    memset(query, 0, num_rows * ld * sizeof(float)), memset(sum, 0, num_rows * ld * sizeof(float));
    const float scale = 1 / sqrtf(D);
    for (long row = 0; row < num_rows; row++) {
        for (long d = 0; d < D; d++) query[row * ld + d] = queries[(row / G * Q + row % G) * D + d] * scale;
        highest[row] = -INFINITY, total[row] = 0;
    }
    for (long first = 0; first < num_keys; first += KEYS) {
        const long count = MIN(KEYS, num_keys - first);
        for (long token = first; token < first + count; token++) {
            const char *key = cache + ((long)table[token / B] * H * 2 * B + token % B) * D * size;
            widen(type, key, D, keys + (token - first) * ld);
            widen(type, key + B * D * size, D, values + (token - first) * ld);
        }
        multiply(F32, query, ld, num_rows, (const char *)keys, count, ld, scores, KEYS, 0);
        for (long row = 0; row < num_rows; row++) {
            const long num_seen = MIN(count, position + row / G + 1 - first);
            if (seen != NULL) hide(scores + row * KEYS, first, num_seen, tree, seen[row / G]);
            const float less = soften(scores + row * KEYS, num_seen, count, highest + row, total + row);
            if (less != 1)
                for (long d = 0; d < ld; d++) sum[row * ld + d] *= less;
        }
        add_weighted(scores, values, num_rows, count, sum, ld);
    }
    for (long row = 0; row < num_rows; row++)
        for (long d = 0; d < D; d++) out[(row / G * Q + row % G) * D + d] = sum[row * ld + d] / total[row];
}

struct attention {
    const float *queries;
    long Q, H, D, B;
    int type;
    const char *cache;
    long S;
    const int *starts, *context_lens, *tables;
    long table_len;
    const int *trees;
    const uint64_t *seen;
    float *out;
    long most;               /* tokens whose queries are worked on together */
    const long *first_piece; /* of each chunk, for one KV head */
};

static void attention_piece(const void *job, long p) {
    const struct attention *a = job;
    const long h = p % a->H;
    const long piece = a->first_piece[a->S] - 1 - p / a->H; /* the last first: it has the longest context */
    const long G = a->Q / a->H, bytes = bytes_of(a->type);
    long s = 0, end = a->S;
    while (end - s > 1) *(piece < a->first_piece[(s + end) / 2] ? &end : &s) = (s + end) / 2;
    const long token = a->starts[s] + (piece - a->first_piece[s]) * a->most, left = a->starts[s + 1] - token;
    const long offset = (token * a->Q + h * G) * a->D;
    attend(a->queries + offset, MIN(a->most, left), a->context_lens[s] - left, a->tables + s * a->table_len,
           a->cache + h * 2 * a->B * a->D * bytes, a->type, a->Q, a->H, G, a->B, a->D, a->seen ? a->trees[s] : 0,
           a->seen ? a->seen + token : NULL, a->out + offset);
}

/* Every token of S chunks over its context. Chunk s has queries [starts[s], starts[s + 1]), the last of them at
 * position context_lens[s] - 1, and block table tables[s, :]. queries and out are [T, Q, D].
 *
 * Where chunks end in trees, slots trees[s] and behind are seen by token t as the bits of seen[t] say; else both are
 * NULL. */
void attention(const float *queries, long Q, long H, long D, long B, int type, const char *cache, long S,
               const int *starts, const int *context_lens, const int *tables, long table_len, const int *trees,
               const uint64_t *seen, float *out, int num_threads) {
    const long most = MAX(1, MAX_ROWS / (Q / H));
    long first_piece[S + 1], work = 0;
    first_piece[0] = 0;
    for (long s = 0; s < S; s++) {
        first_piece[s + 1] = first_piece[s] + ceil_div(starts[s + 1] - starts[s], most);
        work += (starts[s + 1] - starts[s]) * context_lens[s] * Q * D;
    }
    const struct attention job = {queries, Q,      H,         D,     B,    type, cache, S,          starts, context_lens,
                                  tables,  table_len, trees, seen, out, most, first_piece};
    in_pieces(attention_piece, &job, first_piece[S] * H, threads_for(work, num_threads));
}
