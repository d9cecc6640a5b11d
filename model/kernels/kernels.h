/* What the kernels share: element types of weights and caches, vectors of eight floats, and the matrix product.
 *
 * Activations are float. Weights and caches are read as they are stored and widened in registers. Sums are taken in an
 * order that depends on the length of a row alone, so a token's result does not depend on what else is in the batch.
 * Matrices are row-major; a shape in brackets follows the name. */
#pragma once
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

enum { F32, BF16, F16 };

INLINE long bytes_of(int type) { return type == F32 ? 4 : 2; }

INLINE __m256 load8(int type, const char *from) {
    if (type == F32) return _mm256_loadu_ps((const float *)from);
    __m128i half = _mm_loadu_si128((const __m128i *)from);
    if (type == F16) return _mm256_cvtph_ps(half);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

/* n elements to floats, and zeros up to the next multiple of 8. */
INLINE void widen(int type, const char *from, long n, float *to) {
    long i = 0;
    for (; i + 8 <= n; i += 8) _mm256_storeu_ps(to + i, load8(type, from + i * bytes_of(type)));
    if (i < n) {
        char padded[32] = {0};
        memcpy(padded, from + i * bytes_of(type), (n - i) * bytes_of(type));
        _mm256_storeu_ps(to + i, load8(type, padded));
    }
}

INLINE void store1(int type, char *to, float value) {
    if (type == F32) {
        memcpy(to, &value, 4);
    } else if (type == F16) {
        uint16_t half = _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT);
        memcpy(to, &half, 2);
    } else { /* to nearest, ties to even; a NaN stays one */
        uint32_t bits;
        memcpy(&bits, &value, 4);
        uint16_t half = value != value ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        memcpy(to, &half, 2);
    }
}

INLINE float sum8(__m256 v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

/* e^x: 2^n times a polynomial on [-ln2/2, ln2/2], good to 1e-7; exactly 0 below -87, e^88 above 88. */
INLINE __m256 exp8(__m256 x) {
    __m256 not_zero = _mm256_cmp_ps(x, _mm256_set1_ps(-87.0f), _CMP_GE_OQ);
    x = _mm256_min_ps(_mm256_max_ps(x, _mm256_set1_ps(-87.0f)), _mm256_set1_ps(88.0f));
    __m256 n =
        _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
    r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
    const float taylor[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
    __m256 p = _mm256_set1_ps(1.0f / 5040);
    for (int i = 0; i < 7; i++) p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(taylor[i]));
    __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_and_ps(_mm256_mul_ps(p, _mm256_castsi256_ps(power)), not_zero);
}

/* y[m, n] (+)= x[m, :] . w[n, :] for m < M, n < N, on the calling thread. Rows of x, w and y are ldx, K and ldy
 * elements apart; w is of `type`. With `add` the product is added to y. */
void multiply(int type, const float *x, long ldx, long M, const char *w, long N, long K, float *y, long ldy, int add);

/* Calls function(job, 0) to function(job, num_pieces - 1), in any order, on up to num_threads threads, and returns when
 * all have. */
typedef void piece_of_job(const void *job, long piece);
void in_pieces(piece_of_job *function, const void *job, long num_pieces, int num_threads);

INLINE long ceil_div(long a, long b) { return (a + b - 1) / b; }

/* Threads worth waking for so many multiplications. */
INLINE int threads_for(long work, int num_threads) { return work < 1 << 17 ? 1 : num_threads; }

/* Rows of w that one thread takes at a time: they stay in its cache while all rows of x pass by, every thread gets
 * several such pieces, and they can be worked on by two, three or four. */
INLINE long rows_per_piece(int type, long N, long K, int num_threads) {
    const long in_cache = (128 << 10) / (K * bytes_of(type)), most = MIN(in_cache, N / (4 * num_threads));
    return MAX(24, most / 24 * 24);
}
