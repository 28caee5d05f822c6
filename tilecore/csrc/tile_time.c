/* Times one kernel on a few threads: what `tune` and the benchmarks of recommendation measure with. As in ONNX Runtime,
 * each thread has a range of chunks of its own, and takes over those of others when it has done them.
 *
 * Which thread takes over what depends on what else the machine does, so that whole calls on several threads tell little
 * on a busy machine. Here each thread does its own range, at the same time as the others do theirs; the best time of each
 * chunk counts, and the call's seconds follow from them: those of threads that hand out chunks as they come free. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

#include "tile_chunks.h"

enum { MAX_THREADS = 256 };
static const int64_t LONG = 50000; /* nanoseconds, from which processor time is asked for */

typedef struct timing {
    const tile_kernel* kernel;
    const int64_t* symbols;
    const void* const* inputs;
    void* const* outputs;
    tile_chunks chunks;
    double* best; /* seconds of each chunk */
    clockid_t clock;
    double asking; /* seconds of asking it */
    int32_t threads;
    atomic_int round; /* that threads may work on */
    atomic_int done;  /* threads that have finished it */
} timing;

typedef struct worker {
    timing* shared;
    char* scratch;
    int32_t number;
    int32_t rounds;
} worker;

static double seconds_of(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Seconds that asking a clock itself adds to what lies between two times: half a microsecond for processor time, which
 * made few long chunks 4 % slower than many short ones. */
static double cost_of(clockid_t clock) {
    double least = 1e30;
    for (int i = 0; i < 16; i++) {
        const double start = seconds_of(clock), taken = seconds_of(clock) - start;
        least = taken < least ? taken : least;
    }
    return least;
}

/* Where the range of thread `number` begins. */
static int64_t first_chunk(const timing* t, int32_t number) { return t->chunks.count * number / t->threads; }

static void work(timing* t, const worker* own) {
    int64_t copied = -1;
    for (int64_t chunk = first_chunk(t, own->number); chunk < first_chunk(t, own->number + 1); chunk++) {
        const double start = seconds_of(t->clock);
        t->kernel->run(t->symbols, t->inputs, t->outputs, own->scratch, &copied, tile_first_task(&t->chunks, chunk),
                       tile_first_task(&t->chunks, chunk + 1));
        const double taken = seconds_of(t->clock) - start - t->asking;
        if (taken < t->best[chunk]) t->best[chunk] = taken;
    }
    atomic_fetch_add(&t->done, 1);
}

static void* follow(void* data) {
    const worker* own = data;
    for (int32_t round = 1; round <= own->rounds; round++) {
        while (atomic_load(&own->shared->round) < round) sched_yield();
        work(own->shared, own);
    }
    return NULL;
}

/* The next chunk that thread `number` takes, of its own range or of one that others have not finished; -1 when none is left. */
static int64_t take(const timing* t, int64_t* next, int32_t number) {
    for (int32_t i = 0; i < t->threads; i++) {
        const int32_t owner = (number + i) % t->threads;
        if (next[owner] < first_chunk(t, owner + 1)) return next[owner]++;
    }
    return -1;
}

/* Seconds from the first chunk to the last: who is free first takes the next. */
static double call_seconds(const timing* t) {
    int64_t next[MAX_THREADS];
    double at[MAX_THREADS] = {0};
    for (int32_t i = 0; i < t->threads; i++) next[i] = first_chunk(t, i);
    for (;;) {
        int32_t first = 0;
        for (int32_t i = 1; i < t->threads; i++) first = at[i] < at[first] ? i : first;
        const int64_t chunk = take(t, next, first);
        if (chunk < 0) break;
        at[first] += t->best[chunk];
    }
    double last = 0;
    for (int32_t i = 0; i < t->threads; i++) last = at[i] > last ? at[i] : last;
    return last;
}

/* The seconds of a call, from the best of each of its chunks in `rounds` calls. `scratch` has `stride` bytes for each
 * thread. Negative when threads cannot be started or there is no memory. */
__attribute__((visibility("default"))) double tile_time(const tile_kernel* kernel, const int64_t* symbols,
                                                         const void* const* inputs, void* const* outputs, char* scratch,
                                                         int64_t stride, int32_t threads, int32_t rounds) {
    timing t = {.kernel = kernel, .symbols = symbols, .inputs = inputs, .outputs = outputs, .threads = threads};
    const int64_t tasks = kernel->tasks(symbols);
    if (tasks <= 0 || threads < 1 || threads > MAX_THREADS) return tasks <= 0 ? 0.0 : -1.0;
    t.chunks = tile_cut(kernel, symbols, tasks, threads);
    t.best = malloc(sizeof(double) * (size_t)t.chunks.count);
    if (t.best == NULL) return -1.0;
    for (int64_t i = 0; i < t.chunks.count; i++) t.best[i] = 1e30;
    t.clock = kernel->work(symbols) / t.chunks.count > LONG ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC;
    t.asking = cost_of(t.clock);
    pthread_t handles[MAX_THREADS];
    worker workers[MAX_THREADS];
    for (int32_t i = 0; i < threads; i++) workers[i] = (worker){&t, scratch + i * stride, i, rounds};
    int32_t started = 1;
    while (started < threads && pthread_create(&handles[started], NULL, follow, &workers[started]) == 0) started++;
    for (int32_t round = 1; round <= rounds; round++) {
        atomic_store(&t.done, 0);
        atomic_store(&t.round, round);
        work(&t, &workers[0]);
        while (atomic_load(&t.done) < started) sched_yield();
    }
    for (int32_t i = 1; i < started; i++) pthread_join(handles[i], NULL);
    const double seconds = started == threads ? call_seconds(&t) : -1.0;
    free(t.best);
    return seconds;
}
