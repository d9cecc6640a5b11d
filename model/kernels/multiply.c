#include "kernels.h"

/* The most sums that the registers hold beside what they are computed from. */
#ifdef __AVX512F__
enum { MOST_SUMS = 24, MOST_ROWS = 8 };
#else
enum { MOST_SUMS = 12, MOST_ROWS = 6 };
#endif
/* Without AMX, whose own kernels are faster, a build for bfloat16 rounds activations to it. */
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
#define DOT_PRODUCTS
enum { PAIRED = 32 };
#endif
enum { K_BLOCK = 768, AHEAD = 32, WORTH_WIDENING = 48 };

/* Makes the compiler keep v in a register where it would rather load (and convert) it again for each use. */
#define KEEP(v) __asm__("" : "+v"(v))

/* One vector of K: m x n products of WIDTH. */
INLINE void step(int type, int m, int n, const float *x, long ldx, const char *w, long ldw, vector *sum) {
    vector weights[8];
#pragma GCC unroll 8
    for (int j = 0; j < n; j++) {
        weights[j] = load_as(type, w + j * ldw);
        KEEP(weights[j]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < m; i++) {
        vector v = vload(x + i * ldx);
        KEEP(v);
#pragma GCC unroll 8
        for (int j = 0; j < n; j++) sum[i * n + j] = vfma(v, weights[j], sum[i * n + j]);
    }
}

INLINE float scale_at(const char *from) {
    float scale;
    memcpy(&scale, from, sizeof scale);
    return scale;
}

INLINE __m128 sum4(const vector *v) {
    __m256 a = fold_sum(v[0]), b = fold_sum(v[1]), c = fold_sum(v[2]), d = fold_sum(v[3]);
    __m256 s = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    return _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
}

/* What m * n vectors sum up to, into y; of weights of I8 by their scales, which are ldw bytes apart. */
INLINE void put(int m, int n, const vector *sum, const char *scales, long ldw, float *y, long ldy, int add) {
    float product[MOST_SUMS];
#pragma GCC unroll 6
    for (int i = 0; i < m * n; i += 4) _mm_storeu_ps(product + i, sum4(sum + i));
    if (scales != NULL)
        for (int j = 0; j < n; j++)
            for (int i = 0; i < m; i++) product[i * n + j] *= scale_at(scales + j * ldw);
#pragma GCC unroll 8
    for (int i = 0; i < m; i++)
#pragma GCC unroll 8
        for (int j = 0; j < n; j++) y[i * ldy + j] = add ? y[i * ldy + j] + product[i * n + j] : product[i * n + j];
}

/* m rows of x times n rows of w, ldw bytes apart. Rows of w that come next are fetched meanwhile: the hardware does not
 * see that far. */
INLINE void tile(int type, int m, int n, const float *x, long ldx, const char *w, const char *scales, long ldw, long K,
                 float *y, long ldy, int add) {
    const long size = bytes_of(type);
    vector sum[MOST_SUMS];
#pragma GCC unroll 24
    for (int i = 0; i < MOST_SUMS; i++) sum[i] = vall(0);
    long k = 0;
    for (; k + AHEAD <= K; k += AHEAD) {
#pragma GCC unroll 8
        for (int j = 0; j < n; j++) _mm_prefetch(w + (n + j) * ldw + k * size, _MM_HINT_T1);
#pragma GCC unroll 4
        for (int i = 0; i < AHEAD; i += WIDTH) step(type, m, n, x + k + i, ldx, w + (k + i) * size, ldw, sum);
    }
    for (; k + WIDTH <= K; k += WIDTH) step(type, m, n, x + k, ldx, w + k * size, ldw, sum);
    if (k < K) {
        float last_x[MOST_ROWS * WIDTH] = {0};
        char last_w[8 * 4 * WIDTH] = {0};
        for (int i = 0; i < m; i++) memcpy(last_x + i * WIDTH, x + i * ldx + k, (K - k) * sizeof(float));
        for (int j = 0; j < n; j++) memcpy(last_w + j * 4 * WIDTH, w + j * ldw + k * size, (K - k) * size);
        step(type, m, n, last_x, WIDTH, last_w, 4 * WIDTH, sum);
    }
    put(m, n, sum, type == I8 ? scales : NULL, ldw, y, ldy, add);
}

/* m rows of x times all N rows of w, n at a time: m * n sums, n weights and one x fit the 16 (or 32) registers. */
typedef void rows_of_x(const float *x, long ldx, const char *w, const char *scales, long N, long ldw, long K, float *y,
                       long ldy, int add);
#define ROWS(type, m, n)                                                                                        \
    static void rows_##type##_##m(const float *x, long ldx, const char *w, const char *scales, long N, long ldw, \
                                  long K, float *y, long ldy, int add) {                                        \
        long j = 0;                                                                                             \
        for (; j + n <= N; j += n)                                                                              \
            tile(type, m, n, x, ldx, w + j * ldw, scales + j * ldw, ldw, K, y + j, ldy, add);                   \
        for (; j < N; j++) tile(type, m, 1, x, ldx, w + j * ldw, scales + j * ldw, ldw, K, y + j, ldy, add);    \
    }
#ifdef __AVX512F__
#define ALL_ROWS(type, n4) \
    ROWS(type, 1, 8) ROWS(type, 2, 8) ROWS(type, 3, 8) ROWS(type, 4, 6) ROWS(type, 5, 4) ROWS(type, 6, 4) \
    ROWS(type, 7, 3) ROWS(type, 8, 3)
#define MORE_NAMES(type) , rows_##type##_7, rows_##type##_8
#else
#define ALL_ROWS(type, n4) \
    ROWS(type, 1, 4) ROWS(type, 2, 4) ROWS(type, 3, 3) ROWS(type, 4, n4) ROWS(type, 5, 2) ROWS(type, 6, 2)
#define MORE_NAMES(type)
#endif
#define NAMES(type)                                                                                                \
    {                                                                                                              \
        rows_##type##_1, rows_##type##_2, rows_##type##_3, rows_##type##_4, rows_##type##_5, rows_##type##_6       \
        MORE_NAMES(type)                                                                                           \
    }
ALL_ROWS(F32, 3)
ALL_ROWS(BF16, 2)
ALL_ROWS(F16, 2)
ALL_ROWS(I8, 2)
static rows_of_x *const rows[4][MOST_ROWS] = {NAMES(F32), NAMES(BF16), NAMES(F16), NAMES(I8)};

/* The fastest tiles are the largest; of those with AVX2 4 x 3, and 6 x 2 where weights have to be widened. */
static void all_rows(int type, const float *x, long ldx, long M, const char *w, const char *scales, long N, long ldw,
                     long K, float *y, long ldy, int add) {
    const long num_tiles = ceil_div(M, type == F32 && WIDTH == 8 ? 4 : MOST_ROWS);
    for (long i = 0, first = 0, next; i < num_tiles; i++, first = next) {
        next = M * (i + 1) / num_tiles;
        rows[type][next - first - 1](x + first * ldx, ldx, w, scales, N, ldw, K, y + first * ldy, ldy, add);
    }
}

/* The scale of the first row, if it has one. */
INLINE const char *scales_of(const char *w, long K) { return w + row_bytes(I8, K) - sizeof(float); }

#ifdef DOT_PRODUCTS

/* The same for activations that were rounded to bfloat16: products in pairs, and nothing to widen. Rows of x are ldx
 * apart and filled up with zeros. */
INLINE __m512bh load_pairs(int type, __mmask32 some, const char *from) { /* I8 fits bfloat16 without loss */
    if (type == BF16) return (__m512bh)_mm512_maskz_loadu_epi16(some, from);
    const __m256i bytes = _mm256_maskz_loadu_epi8(some, from);
    const __m512i first = _mm512_cvtepi8_epi32(_mm256_castsi256_si128(bytes));
    const __m512i second = _mm512_cvtepi8_epi32(_mm256_extracti128_si256(bytes, 1));
    return _mm512_cvtne2ps_pbh(_mm512_cvtepi32_ps(second), _mm512_cvtepi32_ps(first));
}

INLINE void dot_step(int type, int m, int n, const uint16_t *x, long ldx, const char *w, long ldw, __mmask32 some,
                     vector *sum) {
    __m512bh weights[8];
#pragma GCC unroll 8
    for (int j = 0; j < n; j++) {
        weights[j] = load_pairs(type, some, w + j * ldw);
        KEEP(weights[j]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < m; i++) {
        __m512bh v = (__m512bh)_mm512_loadu_si512(x + i * ldx);
        KEEP(v);
#pragma GCC unroll 8
        for (int j = 0; j < n; j++) sum[i * n + j] = _mm512_dpbf16_ps(sum[i * n + j], v, weights[j]);
    }
}

INLINE void dot_tile(int type, int m, int n, const uint16_t *x, long ldx, const char *w, const char *scales, long ldw,
                     long K, float *y, long ldy, int add) {
    const long size = bytes_of(type);
    vector sum[MOST_SUMS];
#pragma GCC unroll 24
    for (int i = 0; i < MOST_SUMS; i++) sum[i] = vall(0);
    long k = 0;
    for (; k + PAIRED <= K; k += PAIRED) {
#pragma GCC unroll 8
        for (int j = 0; j < n; j++) _mm_prefetch(w + (n + j) * ldw + k * size, _MM_HINT_T1);
        dot_step(type, m, n, x + k, ldx, w + k * size, ldw, -1, sum);
    }
    if (k < K) dot_step(type, m, n, x + k, ldx, w + k * size, ldw, (1u << (K - k)) - 1, sum);
    put(m, n, sum, type == I8 ? scales : NULL, ldw, y, ldy, add);
}

typedef void dot_rows_of_x(const uint16_t *x, long ldx, const char *w, const char *scales, long N, long ldw, long K,
                           float *y, long ldy, int add);
#define DOT_ROWS(type, m, n)                                                                                           \
    static void dot_rows_##type##_##m(const uint16_t *x, long ldx, const char *w, const char *scales, long N,          \
                                      long ldw, long K, float *y, long ldy, int add) {                                 \
        long j = 0;                                                                                                    \
        for (; j + n <= N; j += n)                                                                                     \
            dot_tile(type, m, n, x, ldx, w + j * ldw, scales + j * ldw, ldw, K, y + j, ldy, add);                      \
        for (; j < N; j++) dot_tile(type, m, 1, x, ldx, w + j * ldw, scales + j * ldw, ldw, K, y + j, ldy, add);       \
    }
#define ALL_DOT_ROWS(type)                                                                                             \
    DOT_ROWS(type, 1, 8) DOT_ROWS(type, 2, 8) DOT_ROWS(type, 3, 8) DOT_ROWS(type, 4, 6) DOT_ROWS(type, 5, 4)           \
    DOT_ROWS(type, 6, 4) DOT_ROWS(type, 7, 3) DOT_ROWS(type, 8, 3)
#define DOT_NAMES(type)                                                                                                \
    {                                                                                                                  \
        dot_rows_##type##_1, dot_rows_##type##_2, dot_rows_##type##_3, dot_rows_##type##_4, dot_rows_##type##_5,       \
        dot_rows_##type##_6, dot_rows_##type##_7, dot_rows_##type##_8                                                  \
    }
ALL_DOT_ROWS(BF16)
ALL_DOT_ROWS(I8)
static dot_rows_of_x *const dot_rows[2][MOST_ROWS] = {DOT_NAMES(BF16), DOT_NAMES(I8)};

static void round_rows(const float *x, long ldx, long M, long K, uint16_t *to, long ldto) {
    for (long i = 0; i < M; i++, x += ldx, to += ldto)
        for (long k = 0; k < K; k += PAIRED) {
            const __m512 first = _mm512_maskz_loadu_ps(first_of_16(K - k), x + k);
            const __m512 second = _mm512_maskz_loadu_ps(first_of_16(K - k - 16), x + k + 16);
            _mm512_storeu_si512(to + k, (__m512i)_mm512_cvtne2ps_pbh(second, first));
        }
}

static void multiply_rounded(int type, const float *x, long ldx, long M, const char *w, long N, long K, float *y,
                             long ldy, int add) {
    uint16_t rounded[MOST_ROWS * K_BLOCK];
    const long num_tiles = ceil_div(M, MOST_ROWS), size = bytes_of(type), ldw = row_bytes(type, K);
    for (long k = 0; k < K; k += K_BLOCK) {
        const long n = MIN(K_BLOCK, K - k);
        for (long i = 0, first = 0, next; i < num_tiles; i++, first = next) {
            next = M * (i + 1) / num_tiles;
            round_rows(x + first * ldx + k, ldx, next - first, n, rounded, K_BLOCK);
            dot_rows[type == I8][next - first - 1](rounded, K_BLOCK, w + k * size, scales_of(w, K), N, ldw, n,
                                                   y + first * ldy, ldy, add || k > 0);
        }
    }
}

#endif

void multiply(int type, const float *x, long ldx, long M, const char *w, long N, long K, float *y, long ldy, int add) {
#ifdef DOT_PRODUCTS
    if (type == BF16 || type == I8) return multiply_rounded(type, x, ldx, M, w, N, K, y, ldy, add);
#endif
    const long size = bytes_of(type), ldw = row_bytes(type, K), num_blocks = ceil_div(K, K_BLOCK);
    const long block = (ceil_div(K, num_blocks) + AHEAD - 1) & -AHEAD; /* a tile of x stays in the first cache */
    const int widened = bytes_of(type) == 2 && M >= WORTH_WIDENING;
    float wide[widened ? N * block : 1]; /* and these rows of w in the second */
    const char *scales = scales_of(w, K);
    for (long k = 0; k < K; k += block) {
        const long n = MIN(block, K - k);
        if (widened) {
            for (long j = 0; j < N; j++) widen(type, w + j * ldw + k * size, n, wide + j * block);
            all_rows(F32, x + k, ldx, M, (const char *)wide, NULL, N, block * sizeof(float), n, y, ldy, add || k > 0);
        } else {
            all_rows(type, x + k, ldx, M, w + k * size, scales, N, ldw, n, y, ldy, add || k > 0);
        }
    }
}
