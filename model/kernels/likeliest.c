#include "kernels.h"
#include <math.h>

enum { CHUNK = 64 };

/* The largest of n, or NaN if one of them is. */
static float most_or_nan(const float *x, long n) {
    float most = -INFINITY;
    int has_nan = 0;
    for (long i = 0; i < n; i++) {
        has_nan |= x[i] != x[i];
        most = x[i] > most ? x[i] : most;
    }
    return has_nan ? NAN : most;
}

static float sum_of_exps(const float *x, long n, float most) {
    vector sum = vall(0);
    long i = 0;
    for (; i + WIDTH <= n; i += WIDTH) sum = vadd(sum, exp_of(vsub(vload(x + i), vall(most))));
    float total = sum_of(sum);
    for (; i < n; i++) total += expf(x[i] - most);
    return total;
}

/* Puts column i where it belongs among the `num` best so far, of which there may be `count`; returns their number. */
static long insert(const float *x, long i, long *best, long num, long count) {
    long at = num < count ? num++ : num - 1;
    for (; at > 0 && x[best[at - 1]] < x[i]; at--) best[at] = best[at - 1];
    best[at] = i;
    return num;
}

/* Of each row of scores[R, D] the `count` highest, the highest first and of equals the one before: their columns, and
 * their logprobs under the row's softmax. Where a row has fewer above -infinity: -1 and -infinity. A row with NaN or
 * infinity has NaN for its logprobs. With a count of 0 nothing is written. */
void likeliest(const float *scores, long R, long D, long count, long *columns, float *logprobs) {
    if (count < 1) return;
    for (long r = 0; r < R; r++, scores += D, columns += count, logprobs += count) {
        const float most = most_or_nan(scores, D);
        const int is_whole = most < INFINITY;
        long num = 0;
        for (long first = 0; is_whole && first < D; first += CHUNK) {
            const long end = MIN(D, first + CHUNK);
            if (num == count && !(most_or_nan(scores + first, end - first) > scores[columns[num - 1]])) continue;
            for (long i = first; i < end; i++)
                if (scores[i] > (num < count ? -INFINITY : scores[columns[num - 1]]))
                    num = insert(scores, i, columns, num, count);
        }
        const float total = num > 0 ? logf(sum_of_exps(scores, D, most)) : 0; /* of e^(score - most) */
        for (long i = 0; i < count; i++) {
            logprobs[i] = !is_whole ? NAN : i < num ? scores[columns[i]] - most - total : -INFINITY;
            if (i >= num) columns[i] = -1;
        }
    }
}
