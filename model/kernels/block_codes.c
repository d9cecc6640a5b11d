#include "kernels.h"
#include <math.h>

/* KV of blocks in eight bits: of each of G groups of n values a scale, then the codes of each; a value is code times scale.
 * A code is an integer, or a number of four bits of exponent and three of fraction (e4m3). */
enum { INTEGER, E4M3 };
enum { CHUNK = 1024 }; /* values at once: a multiple of every WIDTH */

static const float MAGIC = 0x1.8p23f; /* a small number added to it is rounded to an integer, ties to even */

INLINE uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

INLINE float of_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

/* The largest of them, without its sign; NaN if one is not finite. */
static float largest_of(const char *values, int type, long n) {
    uint32_t most = 0; /* the bits of numbers without sign are in their order, and what is not finite is above all */
    float x[CHUNK];
    for (long at = 0; at < n; at += CHUNK) {
        const long count = MIN(CHUNK, n - at);
        widen(type, values + at * bytes_of(type), count, x);
        for (long i = 0; i < count; i++) {
            const uint32_t bits = bits_of(x[i]) & 0x7fffffff;
            most = MAX(most, bits);
        }
    }
    return most >= 0x7f800000 ? NAN : of_bits(most);
}

INLINE uint8_t integer_code(float x) { return bits_of(x + MAGIC); }

INLINE uint8_t e4m3_code(float x) {
    const int32_t bits = bits_of(x) & 0x7fffffff, sign = bits_of(x) >> 24 & 0x80;
    const int32_t normal = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3);
    const int32_t small = bits_of(of_bits(bits) * 512 + MAGIC) & 0xf; /* steps of 2^-9, below 2^-6 */
    const int32_t is_small = -(bits < 121 << 23); /* all bits or none: a branch would keep this from being vectorised */
    return sign | (small & is_small) | (normal & ~is_small);
}

static void encode(const char *values, int type, long n, float scale, int coding, uint8_t *codes) {
    float x[CHUNK];
    for (long at = 0; at < n; at += CHUNK) {
        const long count = MIN(CHUNK, n - at);
        widen(type, values + at * bytes_of(type), count, x);
        if (coding == INTEGER)
            for (long i = 0; i < count; i++) codes[at + i] = integer_code(x[i] / scale);
        else
            for (long i = 0; i < count; i++) codes[at + i] = e4m3_code(x[i] / scale);
    }
}

static void decode(const uint8_t *codes, long n, float scale, int coding, float *x) {
    if (coding == INTEGER)
        for (long i = 0; i < n; i++) x[i] = (float)(int8_t)codes[i] * scale;
    else
        for (long i = 0; i < n; i++) {
            const uint32_t code = codes[i];
            x[i] = of_bits((code & 0x80) << 24 | (code & 0x7f) << 20) * 0x1p120f * scale;
        }
}

static void narrow(const float *x, long n, int type, char *to) {
    long i = 0;
    if (type == F32) {
        memcpy(to, x, n * 4);
        i = n;
    } else if (type == F16) {
        for (; i + 8 <= n; i += 8)
            _mm_storeu_si128(
                (__m128i *)(to + 2 * i), _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT)
            );
    } else {
        for (; i < n; i++) {
            const uint32_t bits = bits_of(x[i]), rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
            const uint16_t half = (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded;
            memcpy(to + 2 * i, &half, 2);
        }
    }
    for (; i < n; i++) store1(type, to + i * bytes_of(type), x[i]);
}

/* Of a layer [N, G, n] these blocks, to packed[count, packed_bytes]. Of the last one only the first `used` values of each
 * group count; the codes of the others are 0. What is not finite makes its group's scale NaN. */
void pack_blocks(
    const char *layer, int type, long G, long n, const long *blocks, long count, long used, int coding,
    float smallest_scale, float largest_scale, char *packed, long packed_bytes
) {
    const float largest_code = coding == INTEGER ? 127 : 448;
    for (long b = 0; b < count; b++) {
        const char *block = layer + blocks[b] * G * n * bytes_of(type);
        char *to = packed + b * packed_bytes;
        uint8_t *codes = (uint8_t *)to + G * sizeof(float);
        const long m = b == count - 1 ? used : n;
        for (long g = 0; g < G; g++, codes += n) {
            const char *values = block + g * n * bytes_of(type);
            float scale = largest_of(values, type, m) / largest_code;
            scale = scale < smallest_scale ? smallest_scale : scale > largest_scale ? largest_scale : scale;
            memcpy(to + g * sizeof(float), &scale, sizeof scale);
            if (scale != scale)
                memset(codes, 0, m);
            else
                encode(values, type, m, scale, coding, codes);
            memset(codes + m, 0, n - m);
        }
        memset(codes, 0, to + packed_bytes - (char *)codes);
    }
}

/* The other way round: whole blocks. */
void unpack_blocks(
    const char *packed, long packed_bytes, int coding, long G, long n, char *layer, int type, const long *blocks,
    long count
) {
    float x[CHUNK];
    for (long b = 0; b < count; b++) {
        const char *from = packed + b * packed_bytes;
        const uint8_t *codes = (const uint8_t *)from + G * sizeof(float);
        char *to = layer + blocks[b] * G * n * bytes_of(type);
        for (long g = 0; g < G; g++) {
            float scale;
            memcpy(&scale, from + g * sizeof(float), sizeof scale);
            for (long at = 0; at < n; at += CHUNK) {
                const long some = MIN(CHUNK, n - at);
                decode(codes + g * n + at, some, scale, coding, x);
                narrow(x, some, type, to + (g * n + at) * bytes_of(type));
            }
        }
    }
}
