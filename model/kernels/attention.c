#include "kernels.h"
#include <math.h>

/* The cache of a layer is [N, H, 2, B, D] of `type`: blocks, KV heads, keys and values, tokens of a block, head size.
 * Q query heads; G = Q / H of them share a KV head. Heads are padded to a multiple of 8 in scratch memory. */
enum { MAX_D = 256, KEYS = 64, MAX_ROWS = 48 };

/* Norm over one head, if the family has one (weight), then the rotation. */
static void rotate(const float *in, const float *weight, float eps, const float *cosine, const float *sine, long D, float *out) {
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

/* qkv[T, Q + 2 H, D] -> rotated queries[T, Q, D]; rotated keys, and values, into their slots[T] of the cache. */
void store(const float *qkv, long T, long Q, long H, long D, long B, const float *cosines, const float *sines,
           const float *query_norm, const float *key_norm, float eps, const int64_t *slots, int type, char *cache,
           float *queries, int num_threads) {
    const long size = bytes_of(type);
#pragma omp parallel for num_threads(threads_for(T * (Q + 2 * H) * D, num_threads))
    for (long t = 0; t < T; t++) {
        const float *in = qkv + t * (Q + 2 * H) * D, *cosine = cosines + t * D / 2, *sine = sines + t * D / 2;
        for (long q = 0; q < Q; q++) rotate(in + q * D, query_norm, eps, cosine, sine, D, queries + (t * Q + q) * D);
        for (long h = 0; h < H; h++) {
            char *keys = cache + (((slots[t] / B * H + h) * 2) * B + slots[t] % B) * D * size, *values = keys + B * D * size;
            const float *value = in + (Q + H + h) * D;
            float key[MAX_D];
            rotate(in + (Q + h) * D, key_norm, eps, cosine, sine, D, key);
            for (long d = 0; d < D; d++) store1(type, keys + d * size, key[d]);
            for (long d = 0; d < D; d++) store1(type, values + d * size, value[d]);
        }
    }
}

/* D elements to floats, and zeros up to the next multiple of 8. */
INLINE void widen(int type, const char *from, long D, float *to) {
    long d = 0;
    for (; d + 8 <= D; d += 8) _mm256_storeu_ps(to + d, load8(type, from + d * bytes_of(type)));
    if (d < D) {
        char padded[32] = {0};
        memcpy(padded, from + d * bytes_of(type), (D - d) * bytes_of(type));
        _mm256_storeu_ps(to + d, load8(type, padded));
    }
}

/* out[m rows, n vectors] += weights[m rows, KEYS] times values[num_keys, ld], for the columns at `out` and `values`. */
INLINE void add_values(int m, int n, const float *weights, const float *values, long num_keys, float *out, long ld) {
    __m256 sum[8];
#pragma GCC unroll 8
    for (int i = 0; i < m * n; i++) sum[i] = _mm256_loadu_ps(out + i / n * ld + i % n * 8);
    for (long key = 0; key < num_keys; key++) {
        __m256 value[2];
#pragma GCC unroll 2
        for (int j = 0; j < n; j++) value[j] = _mm256_loadu_ps(values + key * ld + j * 8);
#pragma GCC unroll 8
        for (int i = 0; i < m * n; i++)
            sum[i] = _mm256_fmadd_ps(_mm256_broadcast_ss(weights + i / n * KEYS + key), value[i % n], sum[i]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < m * n; i++) _mm256_storeu_ps(out + i / n * ld + i % n * 8, sum[i]);
}

static void add_weighted(const float *weights, const float *values, long num_rows, long num_keys, float *out, long ld) {
    long row = 0;
#define COLUMNS(m)                                                                                         \
    for (long d = 0; d < ld; d += 16)                                                                      \
        if (d + 16 <= ld) add_values(m, 2, weights + row * KEYS, values + d, num_keys, out + row * ld + d, ld); \
        else add_values(m, 1, weights + row * KEYS, values + d, num_keys, out + row * ld + d, ld);
    for (; row + 4 <= num_rows; row += 4) { COLUMNS(4) }
    if (num_rows - row == 3) { COLUMNS(3) }
    if (num_rows - row == 2) { COLUMNS(2) }
    if (num_rows - row == 1) { COLUMNS(1) }
}

/* Scores of one row over `count` keys, of which it sees the first `num_seen`, become weights e^(score - highest); those of
 * the rest 0. `highest` and `total` go on from the keys before; returns what to scale the sum so far by. */
static float soften(float *scores, long num_seen, long count, float *highest, float *total) {
    const long padded = (MAX(num_seen, 0) + 7) & ~7L;
    for (long key = padded; key < count; key++) scores[key] = 0;
    if (padded == 0) return 1;
    for (long key = num_seen; key < padded; key++) scores[key] = -INFINITY;
    __m256 most = _mm256_set1_ps(*highest);
    for (long key = 0; key < padded; key += 8) most = _mm256_max_ps(most, _mm256_loadu_ps(scores + key));
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(most), _mm256_extractf128_ps(most, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    const float now = _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
    const float scale = *highest == now ? 1 : expf(*highest - now);
    __m256 sum = _mm256_setzero_ps();
    for (long key = 0; key < padded; key += 8) {
        __m256 weight = exp8(_mm256_sub_ps(_mm256_loadu_ps(scores + key), _mm256_set1_ps(now)));
        _mm256_storeu_ps(scores + key, weight);
        sum = _mm256_add_ps(sum, weight);
    }
    *highest = now;
    *total = *total * scale + sum8(sum);
    return scale;
}

/* `num_tokens` consecutive queries, the first at `position`, over the keys and values of one KV head. queries and out are
 * [num_tokens, Q, D], at the first of the G heads; cache is that of the layer, at the KV head. */
static void attend(const float *queries, long num_tokens, long position, const int *table, const char *cache, int type, long Q,
                   long H, long G, long B, long D, float *out) {
    const long ld = (D + 7) & ~7L, num_rows = num_tokens * G, num_keys = position + num_tokens, size = bytes_of(type);
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
        for (long i = 0; i < count; i++) {
            const long token = first + i;
            const char *key = cache + ((long)table[token / B] * H * 2 * B + token % B) * D * size;
            widen(type, key, D, keys + i * ld);
            widen(type, key + B * D * size, D, values + i * ld);
        }
        multiply(F32, query, ld, num_rows, (const char *)keys, count, ld, scores, KEYS, 0);
        for (long row = 0; row < num_rows; row++) {
            const long num_seen = MIN(count, position + row / G + 1 - first);
            const float less = soften(scores + row * KEYS, num_seen, count, highest + row, total + row);
            if (less != 1)
                for (long d = 0; d < ld; d++) sum[row * ld + d] *= less;
        }
        add_weighted(scores, values, num_rows, count, sum, ld);
    }
    for (long row = 0; row < num_rows; row++)
        for (long d = 0; d < D; d++) out[(row / G * Q + row % G) * D + d] = sum[row * ld + d] / total[row];
}

/* Every token of S chunks over its context. Chunk s has queries [starts[s], starts[s + 1]), the last of them at position
 * context_lens[s] - 1, and block table tables[s, :]. queries and out are [T, Q, D]. */
void attention(const float *queries, long Q, long H, long D, long B, int type, const char *cache, long S, const int *starts,
               const int *context_lens, const int *tables, long table_len, float *out, int num_threads) {
    const long G = Q / H, most = MAX(1, MAX_ROWS / G); /* tokens whose queries are worked on together */
    long first_piece[S + 1];
    first_piece[0] = 0;
    long work = 0;
    for (long s = 0; s < S; s++) {
        first_piece[s + 1] = first_piece[s] + (starts[s + 1] - starts[s] + most - 1) / most;
        work += (starts[s + 1] - starts[s]) * context_lens[s] * Q * D;
    }
    num_threads = threads_for(work, num_threads);
#pragma omp parallel for schedule(dynamic) num_threads(num_threads)
    for (long i = first_piece[S] * H - 1; i >= 0; i--) { /* last pieces first: they have the longest context */
        const long piece = i / H, h = i % H;
        long s = 0, end = S;
        while (end - s > 1) *(piece < first_piece[(s + end) / 2] ? &end : &s) = (s + end) / 2;
        const long token = starts[s] + (piece - first_piece[s]) * most, count = MIN(most, starts[s + 1] - token);
        attend(queries + (token * Q + h * G) * D, count, context_lens[s] - (starts[s + 1] - token), tables + s * table_len,
               cache + h * 2 * B * D * bytes_of(type), type, Q, H, G, B, D, out + (token * Q + h * G) * D);
    }
}
