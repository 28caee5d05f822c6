/* Times one kernel on a few threads: what `tune` and the benchmarks of recommendation measure with. As in ONNX Runtime,
 * each thread has a range of chunks of its own, and takes over those of others when it has done them. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

#include "tile_chunks.h"

enum { MAX_THREADS = 256 };

typedef struct timing {
    const tile_kernel* kernel;
    const int64_t* symbols;
    const void* const* inputs;
    void* const* outputs;
    tile_chunks chunks;
    int32_t threads;
    atomic_llong next[MAX_THREADS]; /* chunk to take of each thread's range */
    atomic_int round;       /* that threads may work on */
    atomic_int done;        /* threads that have finished it */
    double busy[MAX_THREADS]; /* processor seconds of each thread in this round */
} timing;

typedef struct worker {
    timing* shared;
    char* scratch;
    int32_t number;
    int32_t rounds;
} worker;

static double processor_time(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Where the range of thread `number` begins. */
static int64_t first_chunk(const timing* t, int32_t number) { return t->chunks.count * number / t->threads; }

static void work(timing* t, const worker* own) {
    const double start = processor_time();
    int64_t copied = -1;
    for (int32_t i = 0; i < t->threads; i++) {
        const int32_t owner = (own->number + i) % t->threads;
        const int64_t stop = first_chunk(t, owner + 1);
        for (int64_t chunk; (chunk = atomic_fetch_add(&t->next[owner], 1)) < stop;) {
            t->kernel->run(t->symbols, t->inputs, t->outputs, own->scratch, &copied, tile_first_task(&t->chunks, chunk),
                           tile_first_task(&t->chunks, chunk + 1));
        }
    }
    t->busy[own->number] = processor_time() - start;
    atomic_fetch_add(&t->done, 1);
}

static void* follow(void* data) {
    const worker* own = data;
    for (int32_t round = 1; round <= own->rounds; round++) {
        while (atomic_load(&own->shared->round) < round) {
        }
        work(own->shared, own);
    }
    return NULL;
}

/* The seconds of the best of `rounds` calls. Of one call they are the processor time of its busiest thread, so that
 * what else runs on the machine counts little. `scratch` has `stride` bytes for each thread. Negative when threads
 * cannot be started. */
__attribute__((visibility("default"))) double tile_time(const tile_kernel* kernel, const int64_t* symbols,
                                                         const void* const* inputs, void* const* outputs, char* scratch,
                                                         int64_t stride, int32_t threads, int32_t rounds) {
    timing t = {.kernel = kernel, .symbols = symbols, .inputs = inputs, .outputs = outputs, .threads = threads};
    const int64_t tasks = kernel->tasks(symbols);
    if (tasks <= 0 || threads < 1 || threads > MAX_THREADS) return tasks <= 0 ? 0.0 : -1.0;
    t.chunks = tile_cut(kernel, symbols, tasks, threads);
    pthread_t handles[MAX_THREADS];
    worker workers[MAX_THREADS];
    for (int32_t i = 0; i < threads; i++) workers[i] = (worker){&t, scratch + i * stride, i, rounds};
    int32_t started = 1;
    while (started < threads && pthread_create(&handles[started], NULL, follow, &workers[started]) == 0) started++;
    double best = started == threads ? 1e30 : -1.0;
    for (int32_t round = 1; round <= rounds; round++) {
        for (int32_t i = 0; i < threads; i++) {
            atomic_store(&t.next[i], first_chunk(&t, started == threads ? i : threads));
        }
        atomic_store(&t.done, 0);
        atomic_store(&t.round, round);
        work(&t, &workers[0]);
        while (atomic_load(&t.done) < started) {
        }
        double busiest = 0;
        for (int32_t i = 0; i < started; i++) busiest = t.busy[i] > busiest ? t.busy[i] : busiest;
        if (busiest < best) best = busiest;
    }
    for (int32_t i = 1; i < started; i++) pthread_join(handles[i], NULL);
    return best;
}
