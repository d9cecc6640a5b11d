#include "kernels.h"
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Helper threads that take pieces of the caller's job. Nobody waits for a helper that has not started a piece: on a
 * machine whose cores are busy with other processes the caller goes on alone, where a barrier would wait for the
 * scheduler. An idle helper looks for work for some 90 us, which spans the gap between two kernels of a step even on a
 * slow core, and then sleeps, since waking one takes as long as a kernel. The caller yields sooner. */
enum { MAX_HELPERS = 255, LOOKS = 3000, LOOKS_BEFORE_YIELD = 1000 };

static pthread_mutex_t one_job = PTHREAD_MUTEX_INITIALIZER;
static int num_helpers;
static struct {
    piece_of_job *function;
    const void *job;
    long num_pieces;
} current; /* valid for whoever has claimed a piece, until that piece is finished */
static atomic_long unclaimed, unfinished;
static atomic_int calls, num_asleep, num_wanted; /* of the helpers, the first so many take part */

static int claim_and_run(void) {
    long left = atomic_load(&unclaimed);
    do
        if (left <= 0) return 0;
    while (!atomic_compare_exchange_weak(&unclaimed, &left, left - 1));
    current.function(current.job, current.num_pieces - left);
    atomic_fetch_sub(&unfinished, 1);
    return 1;
}

static void *help(void *number) {
    for (;;) {
        const int seen = atomic_load(&calls);
        int looks = 0;
        while (looks < LOOKS) {
            if ((intptr_t)number < atomic_load(&num_wanted) && claim_and_run()) looks = -1;
            _mm_pause(), looks++;
        }
        atomic_fetch_add(&num_asleep, 1);
        if (seen == atomic_load(&calls)) syscall(SYS_futex, &calls, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
        atomic_fetch_sub(&num_asleep, 1);
    }
    return NULL;
}

static void start_helpers(int wanted) {
    for (pthread_t thread; num_helpers < MIN(wanted, MAX_HELPERS); num_helpers++) {
        if (pthread_create(&thread, NULL, help, (void *)(intptr_t)num_helpers) != 0) return; /* fewer are only slower */
        pthread_detach(thread);
    }
}

void in_pieces(piece_of_job *function, const void *job, long num_pieces, int num_threads) {
    const int alone = num_threads < 2 || num_pieces < 2;
    if (alone || pthread_mutex_trylock(&one_job) != 0) { /* or another caller has the helpers */
        for (long piece = 0; piece < num_pieces; piece++) function(job, piece);
        return;
    }
    start_helpers(num_threads - 1);
    current.function = function, current.job = job, current.num_pieces = num_pieces;
    atomic_store(&num_wanted, num_threads - 1);
    atomic_store(&unfinished, num_pieces);
    atomic_store(&unclaimed, num_pieces);
    atomic_fetch_add(&calls, 1);
    if (atomic_load(&num_asleep) > 0) syscall(SYS_futex, &calls, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
    while (claim_and_run()) continue;
    for (int looks = 0; atomic_load(&unfinished) > 0; looks++) {
        _mm_pause();
        if (looks > LOOKS_BEFORE_YIELD) sched_yield(); /* a helper was interrupted within its piece */
    }
    pthread_mutex_unlock(&one_job);
}
