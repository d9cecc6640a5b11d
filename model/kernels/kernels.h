/* What the kernels share: element types of weights and caches, vectors of floats, and the matrix product.
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

enum { F32, BF16, F16, I8 };

INLINE long bytes_of(int type) { return type == F32 ? 4 : type == I8 ? 1 : 2; }

/* A row of K weights. Behind those of I8 is the float that they are to be multiplied by. */
INLINE long row_bytes(int type, long K) { return type == I8 ? ((K + 3) & -4) + 4 : K * bytes_of(type); }

/* A vector of WIDTH floats: the widest that the build is for. */
#ifdef __AVX512F__
typedef __m512 vector;
typedef __m256i halves; /* as many elements of two bytes */
enum { WIDTH = 16 };
INLINE vector vall(float x) { return _mm512_set1_ps(x); }
INLINE vector vload(const float *from) { return _mm512_loadu_ps(from); }
INLINE void vstore(float *to, vector v) { _mm512_storeu_ps(to, v); }
INLINE vector vadd(vector a, vector b) { return _mm512_add_ps(a, b); }
INLINE vector vsub(vector a, vector b) { return _mm512_sub_ps(a, b); }
INLINE vector vmul(vector a, vector b) { return _mm512_mul_ps(a, b); }
INLINE vector vdiv(vector a, vector b) { return _mm512_div_ps(a, b); }
INLINE vector vmin(vector a, vector b) { return _mm512_min_ps(a, b); }
INLINE vector vmax(vector a, vector b) { return _mm512_max_ps(a, b); }
INLINE vector vfma(vector a, vector b, vector c) { return _mm512_fmadd_ps(a, b, c); } /* a b + c */
INLINE vector vround(vector v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE vector where_at_least(vector a, vector b, vector v) { /* v where a >= b, else 0 */
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, b, _CMP_GE_OQ), v);
}
INLINE vector power_of_two(vector n) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}
INLINE __mmask16 first_of_16(long n) { return n >= 16 ? 0xffff : n <= 0 ? 0 : (1 << n) - 1; }
INLINE halves load_halves(const char *from) { return _mm256_loadu_si256((const __m256i *)from); }
INLINE vector load_bytes(const char *from) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
}
INLINE vector from_f16(halves h) { return _mm512_cvtph_ps(h); }
INLINE vector from_bf16(halves h) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}
INLINE __m256 fold_sum(vector v) { return _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1)); }
INLINE __m256 fold_most(vector v) { return _mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1)); }
#else
typedef __m256 vector;
typedef __m128i halves;
enum { WIDTH = 8 };
INLINE vector vall(float x) { return _mm256_set1_ps(x); }
INLINE vector vload(const float *from) { return _mm256_loadu_ps(from); }
INLINE void vstore(float *to, vector v) { _mm256_storeu_ps(to, v); }
INLINE vector vadd(vector a, vector b) { return _mm256_add_ps(a, b); }
INLINE vector vsub(vector a, vector b) { return _mm256_sub_ps(a, b); }
INLINE vector vmul(vector a, vector b) { return _mm256_mul_ps(a, b); }
INLINE vector vdiv(vector a, vector b) { return _mm256_div_ps(a, b); }
INLINE vector vmin(vector a, vector b) { return _mm256_min_ps(a, b); }
INLINE vector vmax(vector a, vector b) { return _mm256_max_ps(a, b); }
INLINE vector vfma(vector a, vector b, vector c) { return _mm256_fmadd_ps(a, b, c); }
INLINE vector vround(vector v) { return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE vector where_at_least(vector a, vector b, vector v) {
    return _mm256_and_ps(_mm256_cmp_ps(a, b, _CMP_GE_OQ), v);
}
INLINE vector power_of_two(vector n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
INLINE halves load_halves(const char *from) { return _mm_loadu_si128((const __m128i *)from); }
INLINE vector load_bytes(const char *from) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from)));
}
INLINE vector from_f16(halves h) { return _mm256_cvtph_ps(h); }
INLINE vector from_bf16(halves h) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16)); }
INLINE __m256 fold_sum(vector v) { return v; }
INLINE __m256 fold_most(vector v) { return v; }
#endif

INLINE vector load_as(int type, const char *from) {
    if (type == F32) return vload((const float *)from);
    if (type == I8) return load_bytes(from);
    return type == F16 ? from_f16(load_halves(from)) : from_bf16(load_halves(from));
}

INLINE long padded(long n) { return (n + WIDTH - 1) & -WIDTH; }

/* n elements to floats, and zeros up to the next multiple of WIDTH. */
INLINE void widen(int type, const char *from, long n, float *to) {
    long i = 0;
    for (; i + WIDTH <= n; i += WIDTH) vstore(to + i, load_as(type, from + i * bytes_of(type)));
    if (i < n) {
        char last[4 * WIDTH] = {0};
        memcpy(last, from + i * bytes_of(type), (n - i) * bytes_of(type));
        vstore(to + i, load_as(type, last));
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

INLINE float sum_of(vector v) {
    const __m256 eight = fold_sum(v);
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

INLINE float most_of(vector v) {
    const __m256 eight = fold_most(v);
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}

/* e^x: 2^n times a polynomial on [-ln2/2, ln2/2], good to 1e-7; exactly 0 below -87, e^88 above 88. */
INLINE vector exp_of(vector x) {
    const vector given = x;
    x = vmin(vmax(x, vall(-87.0f)), vall(88.0f));
    const vector n = vround(vmul(x, vall(1.44269504f)));
    vector r = vfma(n, vall(-0.693359375f), x);
    r = vfma(n, vall(2.12194440e-4f), r);
    const float taylor[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
    vector p = vall(1.0f / 5040);
    for (int i = 0; i < 7; i++) p = vfma(p, r, vall(taylor[i]));
    return where_at_least(given, vall(-87.0f), vmul(p, power_of_two(n)));
}

INLINE vector silu_times(vector gate, vector up) {
    const vector divisor = vadd(vall(1), exp_of(vsub(vall(0), gate)));
    return vmul(vdiv(gate, divisor), up);
}

/* y[m, n] (+)= x[m, :] . w[n, :] for m < M, n < N, on the calling thread. Rows of x and y are ldx and ldy elements
 * apart; w is of `type`, row after row. With `add` the product is added to y. */
void multiply(int type, const float *x, long ldx, long M, const char *w, long N, long K, float *y, long ldy, int add);

/* With AMX, the same for weights of bfloat16 and rows that were packed before, in groups of TOKENS. */
enum { TOKENS = 16, STEP = 32 };

#ifdef __AMX_BF16__
INLINE int is_packed(int type) { return type == BF16; }
#else
INLINE int is_packed(int type) { return 0; }
#endif

/* Of M rows, each of which has room for K elements, rounded up. */
INLINE long packed_bytes(long M, long K) { return (M + TOKENS - 1) / TOKENS * TOKENS * ((K + STEP - 1) / STEP * STEP) * 4; }

/* Up to TOKENS rows x[M][K] to one group. */
void pack(const float *const *x, long M, long K, char *to);

/* All rows of x[M, K], M of them. */
void pack_all(const float *x, long M, long K, char *to, int num_threads);

/* y[m, n] (+)= x[m, :] . w[n, :] as `multiply` does. */
void multiply_packed(const char *x, long M, const char *w, long N, long K, float *y, long ldy, int add);

/* Columns [first, first + n) of silu(gate(x)) * up(x), packed again. gate and up are [I, K], hidden is [M, I]. `first`
 * is a multiple of STEP, and so is n, if columns follow. */
void gate_packed(const char *x, long M, const char *gate, const char *up, long first, long n, long K, long I,
                 char *hidden);

/* Calls function(job, 0) to function(job, num_pieces - 1), in any order, on up to num_threads threads, and returns when
 * all have. */
typedef void piece_of_job(const void *job, long piece);
void in_pieces(piece_of_job *function, const void *job, long num_pieces, int num_threads);

INLINE long ceil_div(long a, long b) { return (a + b - 1) / b; }

/* Threads worth waking for so many multiplications. */
INLINE int threads_for(long work, int num_threads) { return work < 1 << 17 ? 1 : num_threads; }

/* Rows of w that one thread takes at a time: they stay in its cache while all rows of x pass by, every thread gets
 * several such pieces, and they can be worked on by two, three, four or six, or by STEP if x is packed. */
INLINE long rows_per_piece(int type, long N, long K, int num_threads) {
    const long in_cache = (128 << 10) / row_bytes(type, K), most = MIN(in_cache, N / (4 * num_threads));
    const long unit = is_packed(type) ? STEP : 24;
    return MAX(unit, most / unit * unit);
}
