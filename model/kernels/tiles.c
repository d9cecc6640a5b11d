/* The matrix product for weights of bfloat16 on a CPU with AMX, which multiplies tiles of 16 x 32 by 32 x 16.
 *
 * It has products of bfloat16 only, so an activation goes in as the sum of two, which keeps 16 bits of its 24. Rows of
 * w are tiles as they are stored; x is packed into tiles first, once for all products that it goes into. Both parts of
 * x and all of K are summed in one order in one place, so a token's result does not depend on what else is there. */
#include "kernels.h"

#ifdef __AMX_BF16__

enum { TILE = 1024, K_BLOCK = 768 };
#define ALIGNED __attribute__((aligned(64)))

static void configure(void) {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t bytes_per_row[16];
        uint8_t num_rows[16];
    } config = {.palette = 1};
    for (int i = 0; i < 8; i++) config.bytes_per_row[i] = 64, config.num_rows[i] = 16;
    _tile_loadconfig(&config);
}

INLINE void transpose(__m512i *v) {
    __m512i t[16];
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        __m512i a = _mm512_unpacklo_epi32(v[i], v[i + 1]), b = _mm512_unpackhi_epi32(v[i], v[i + 1]);
        __m512i c = _mm512_unpacklo_epi32(v[i + 2], v[i + 3]), d = _mm512_unpackhi_epi32(v[i + 2], v[i + 3]);
        t[i] = _mm512_unpacklo_epi64(a, c), t[i + 1] = _mm512_unpackhi_epi64(a, c);
        t[i + 2] = _mm512_unpacklo_epi64(b, d), t[i + 3] = _mm512_unpackhi_epi64(b, d);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        __m512i a = _mm512_shuffle_i32x4(t[i], t[i + 4], 0x88), b = _mm512_shuffle_i32x4(t[i], t[i + 4], 0xdd);
        __m512i c = _mm512_shuffle_i32x4(t[i + 8], t[i + 12], 0x88), d = _mm512_shuffle_i32x4(t[i + 8], t[i + 12], 0xdd);
        v[i] = _mm512_shuffle_i32x4(a, c, 0x88), v[i + 8] = _mm512_shuffle_i32x4(a, c, 0xdd);
        v[i + 4] = _mm512_shuffle_i32x4(b, d, 0x88), v[i + 12] = _mm512_shuffle_i32x4(b, d, 0xdd);
    }
}

/* first and second as bfloat16, in the lower and upper half of *high, and what that leaves of them in *low */
INLINE void split(__m512 first, __m512 second, __m512i *high, __m512i *low) {
    *high = (__m512i)_mm512_cvtne2ps_pbh(second, first);
    first = _mm512_sub_ps(first, from_bf16(_mm512_castsi512_si256(*high)));
    second = _mm512_sub_ps(second, from_bf16(_mm512_extracti64x4_epi64(*high, 1)));
    *low = (__m512i)_mm512_cvtne2ps_pbh(second, first);
}

void pack(const float *const *x, long M, long K, char *to) {
    for (long k = 0; k < K; k += STEP, to += 2 * TILE) {
        const __mmask16 some = first_of_16(K - k), more = first_of_16(K - k - 16);
        __m512i high[TOKENS], low[TOKENS];
        for (long m = 0; m < M; m++)
            split(_mm512_maskz_loadu_ps(some, x[m] + k), _mm512_maskz_loadu_ps(more, x[m] + k + 16), high + m, low + m);
        for (long m = M; m < TOKENS; m++) high[m] = low[m] = _mm512_setzero_si512();
        transpose(high), transpose(low);
        for (long i = 0; i < 16; i++) _mm512_storeu_si512(to + i * 64, high[i]);
        for (long i = 0; i < 16; i++) _mm512_storeu_si512(to + TILE + i * 64, low[i]);
    }
}

struct packing {
    const float *x;
    long M, K;
    char *to;
};

static void pack_piece(const void *job, long group) {
    const struct packing *p = job;
    const long first = group * TOKENS, num = MIN(TOKENS, p->M - first);
    const float *rows[TOKENS];
    for (long i = 0; i < num; i++) rows[i] = p->x + (first + i) * p->K;
    pack(rows, num, p->K, p->to + packed_bytes(first, p->K));
}

void pack_all(const float *x, long M, long K, char *to, int num_threads) {
    const struct packing job = {x, M, K, to};
    in_pieces(pack_piece, &job, ceil_div(M, TOKENS), threads_for(M * K, num_threads));
}

/* Bytes between rows of w once they are laid out: lines of rows one below the other have different places in the first
 * cache. */
INLINE long laid_out_bytes(long K) { return (ceil_div(K, STEP) | 1) * 64; }

/* Up to 16 rows of w, ldw bytes apart, to 16 rows of tiles. Nothing else is as slow as a tile whose rows are not at
 * multiples of 64 bytes, and a checkpoint puts them anywhere. As many rows at `next` are fetched meanwhile. */
static void lay_out(const char *w, long ldw, long num_rows, long K, const char *next, char *rows) {
    const long whole = K / STEP * STEP, size = laid_out_bytes(K);
    for (long row = 0; row < 16; row++, w += ldw, next += ldw, rows += size) {
        if (row >= num_rows) {
            memset(rows, 0, size);
            continue;
        }
        for (long k = 0; k < whole; k += STEP) {
            _mm_prefetch(next + 2 * k, _MM_HINT_T0);
            _mm512_store_si512(rows + 2 * k, _mm512_loadu_si512(w + 2 * k));
        }
        if (whole < K)
            _mm512_store_si512(rows + 2 * whole, _mm512_maskz_loadu_epi16((1u << (K - whole)) - 1, w + 2 * whole));
    }
}

/* Two tiles of w by one or two groups of tokens: tiles 0 to 3 += 4, 5 times 6, 7. */
INLINE void step(int groups, const char *w, long ldw, const char *x0, const char *x1) {
    _tile_loadd(4, w, ldw);
    _tile_loadd(5, w + 16 * ldw, ldw);
#pragma GCC unroll 2
    for (int part = 0; part < 2; part++, x0 += TILE, x1 += TILE) {
        _tile_loadd(6, x0, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 5, 6);
        if (groups < 2) continue;
        _tile_loadd(7, x1, 64);
        _tile_dpbf16ps(2, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
    }
}

/* sum[groups][2][16][16] = two times 16 rows of w by one or two groups of packed tokens, group bytes apart. */
INLINE void products(int groups, const char *w, const char *x, long group, long K, float *sum) {
    const long ldw = laid_out_bytes(K);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    __asm__ volatile("" ::: "memory"); /* the compiler does not know that tiles are read from memory */
    for (long k = 0; k < K; k += STEP, w += 64, x += 2 * TILE) step(groups, w, ldw, x, x + group);
    _tile_stored(0, sum, 64);
    _tile_stored(1, sum + 256, 64);
    if (groups > 1) {
        _tile_stored(2, sum + 512, 64);
        _tile_stored(3, sum + 768, 64);
    }
    __asm__ volatile("" ::: "memory");
}

/* y[M, n] (+)= sum[n, 16] transposed */
static void put(const float *sum, long M, long n, float *y, long ldy, int add) {
    __m512i v[16];
    for (int i = 0; i < 16; i++) v[i] = _mm512_loadu_si512(sum + i * 16);
    transpose(v);
    const __mmask16 some = first_of_16(n);
    for (long m = 0; m < MIN(M, TOKENS); m++) {
        __m512 result = (__m512)v[m];
        if (add) result = _mm512_add_ps(result, _mm512_maskz_loadu_ps(some, y + m * ldy));
        _mm512_mask_storeu_ps(y + m * ldy, some, result);
    }
}

void multiply_packed(const char *x, long M, const char *w, long N, long K, float *y, long ldy, int add) {
    const long group = packed_bytes(TOKENS, K), num_blocks = ceil_div(K, K_BLOCK);
    const long block = ceil_div(ceil_div(K, num_blocks), STEP) * STEP;
    char ALIGNED rows[32 * laid_out_bytes(block)];
    float ALIGNED sum[4 * 256];
    configure();
    for (long k = 0; k < K; k += block, x += packed_bytes(TOKENS, block)) {
        const long length = MIN(block, K - k);
        for (long j = 0; j < N; j += 32) {
            const char *from = w + (j * K + k) * 2;
            lay_out(from, 2 * K, N - j, length, from + 64 * K, rows);
            lay_out(from + 32 * K, 2 * K, N - j - 16, length, from + 96 * K, rows + 16 * laid_out_bytes(length));
            for (long m = 0; m < M; m += TOKENS) {
                const char *tokens = x + packed_bytes(m, K);
                float *to = y + m * ldy + j;
                if (m % 32 == 0 && M - m > TOKENS) products(2, rows, tokens, group, length, sum);
                if (m % 32 == 0 && M - m <= TOKENS) products(1, rows, tokens, group, length, sum);
                const float *these = sum + m % 32 * 32;
                put(these, M - m, N - j, to, ldy, add || k > 0);
                if (N - j > 16) put(these + 256, M - m, N - j - 16, to + 16, ldy, add || k > 0);
            }
        }
    }
    _tile_release();
}

/* silu(gate[16, 16]) * up[16, 16], as 16 of the inputs of one group of packed tokens */
static void put_silu(const float *gate, const float *up, char *to) {
    static const uint16_t in_turn[] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                       8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i order = _mm512_loadu_si512(in_turn);
    for (int row = 0; row < 16; row += 2, to += 64) {
        __m512i high, low;
        const vector first = silu_times(vload(gate + row * 16), vload(up + row * 16));
        const vector second = silu_times(vload(gate + row * 16 + 16), vload(up + row * 16 + 16));
        split(first, second, &high, &low);
        _mm512_storeu_si512(to, _mm512_permutexvar_epi16(order, high));
        _mm512_storeu_si512(to + TILE, _mm512_permutexvar_epi16(order, low));
    }
}

void gate_packed(const char *x, long M, const char *gate, const char *up, long first, long n, long K, long I,
                 char *hidden) {
    const long group = packed_bytes(TOKENS, K);
    char ALIGNED rows[32 * laid_out_bytes(K)];
    float ALIGNED sum[4 * 256];
    configure();
    for (long j = first; j < ceil_div(first + n, STEP) * STEP; j += 16) {
        const long num_rows = MIN(16, first + n - j);
        lay_out(gate + j * 2 * K, 2 * K, num_rows, K, gate + (j + 16) * 2 * K, rows);
        lay_out(up + j * 2 * K, 2 * K, num_rows, K, up + (j + 16) * 2 * K, rows + 16 * laid_out_bytes(K));
        for (long m = 0; m < M; m += TOKENS) {
            const char *tokens = x + packed_bytes(m, K);
            if (m % 32 == 0 && M - m > TOKENS) products(2, rows, tokens, group, K, sum);
            if (m % 32 == 0 && M - m <= TOKENS) products(1, rows, tokens, group, K, sum);
            const float *these = sum + m % 32 * 32;
            put_silu(these, these + 256, hidden + packed_bytes(m, I) + j / STEP * 2 * TILE + j % STEP * 32);
        }
    }
    _tile_release();
}
#else
void pack(const float *const *x, long M, long K, char *to) {}
void pack_all(const float *x, long M, long K, char *to, int num_threads) {}
void multiply_packed(const char *x, long M, const char *w, long N, long K, float *y, long ldy, int add) {}
void gate_packed(const char *x, long M, const char *gate, const char *up, long first, long n, long K, long I,
                 char *hidden) {}
#endif
