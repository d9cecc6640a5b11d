#include "kernels.h"

enum { LANES = 8 };

/* Eight words, widened to 64 bits, and sums of such. */
#ifdef __AVX512F__
typedef __m512i lanes;
INLINE lanes none(void) { return _mm512_setzero_si512(); }
INLINE lanes plus(lanes a, lanes b) { return _mm512_add_epi64(a, b); }
INLINE lanes read(const uint32_t *w) { return _mm512_cvtepu32_epi64(_mm256_loadu_si256((const __m256i *)w)); }
#else
typedef struct { __m256i low, high; } lanes;
INLINE lanes none(void) { return (lanes){_mm256_setzero_si256(), _mm256_setzero_si256()}; }
INLINE lanes plus(lanes a, lanes b) {
    return (lanes){_mm256_add_epi64(a.low, b.low), _mm256_add_epi64(a.high, b.high)};
}
INLINE lanes read(const uint32_t *w) {
    return (lanes){_mm256_cvtepu32_epi64(_mm_loadu_si128((const __m128i *)w)),
                   _mm256_cvtepu32_epi64(_mm_loadu_si128((const __m128i *)(w + 4)))};
}
#endif

/* Adds up words w_0 .. w_(n-1), of which the first is the one with this index in its block: s1 by w_i, s2 by
 * (index + i + 1) w_i, modulo 2^64. Lane j sees w_(8r+j) in row r: a_j adds them up and b_j adds a_j up, so that of R rows
 * b_j has R - r times w_(8r+j). */
static void add_words(const uint32_t *w, long n, uint64_t index, uint64_t *s1, uint64_t *s2) {
    lanes a = none(), b = none();
    const long R = n / LANES;
    for (long r = 0; r < R; r++) {
        a = plus(a, read(w + r * LANES));
        b = plus(b, a);
    }
    uint64_t as[LANES], bs[LANES], sum = 0, weighted = 0; /* the latter with w_0 counted once */
    memcpy(as, &a, sizeof as);
    memcpy(bs, &b, sizeof bs);
    for (int j = 0; j < LANES; j++) {
        sum += as[j];
        weighted += LANES * ((uint64_t)R * as[j] - bs[j]) + (j + 1) * as[j];
    }
    for (long i = R * LANES; i < n; i++) {
        sum += w[i];
        weighted += (uint64_t)(i + 1) * w[i];
    }
    *s1 += sum;
    *s2 += weighted + index * sum;
}

/* Of each of `count` blocks of the cache [L, N, W], W words, the layers from `first` up to `end`: added to the two sums
 * at its slot of sums[.., 2]. From a layer to the next it is `per_layer` words, from a block to the next `per_block`. */
void block_sums(
    const uint32_t *cache, long per_layer, long per_block, long W, long first, long end, const long *blocks,
    const long *slots, long count, uint64_t *sums
) {
    for (long layer = first; layer < end; layer++)
        for (long i = 0; i < count; i++) {
            uint64_t *into = sums + 2 * slots[i];
            add_words(cache + layer * per_layer + blocks[i] * per_block, W, (uint64_t)layer * W, into, into + 1);
        }
}
