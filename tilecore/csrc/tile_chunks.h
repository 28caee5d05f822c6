/* How the tasks of one call are cut into chunks for threads: what every host of kernels does alike. */
#ifndef TILE_CHUNKS_H
#define TILE_CHUNKS_H

#include "tile_kernel.h"

enum {
    CHUNKS_PER_CORE = 16, /* enough that a thread which starts late or is slow costs little */
    INLINE_NANOSECONDS = 10000, /* below it, waking a thread costs more than it saves */
    CHUNK_NANOSECONDS = 1250,   /* the least work worth handing to another thread */
};

typedef struct tile_chunks {
    int64_t group; /* tasks that share copies */
    int64_t parts; /* into which each group is cut */
    int64_t units; /* parts of all groups: what chunks are made of */
    int64_t count;
} tile_chunks;

/* Cuts `tasks` into chunks: one when the whole call is short. Groups are cut into equal parts when there are few: a thread
 * takes most of its chunks in a row, and keeps the copies of a group from one to the next. */
static inline tile_chunks tile_cut(const tile_kernel* kernel, const int64_t* symbols, int64_t tasks, int64_t cores) {
    const int64_t max_chunks = cores * CHUNKS_PER_CORE;
    const int64_t work = kernel->work(symbols);
    const int64_t worth = work < INLINE_NANOSECONDS ? 1 : work / CHUNK_NANOSECONDS;
    const int64_t most = worth < max_chunks ? worth : max_chunks;
    tile_chunks cut;
    cut.group = kernel->group(symbols);
    const int64_t groups = tasks / cut.group;
    cut.parts = (most + groups - 1) / groups;
    if (cut.parts > cut.group) cut.parts = cut.group;
    cut.units = groups * cut.parts;
    cut.count = groups < most ? cut.units : most;
    return cut;
}

/* The first task of chunk `chunk`; of chunk `count`, the number of tasks. */
static inline int64_t tile_first_task(const tile_chunks* cut, int64_t chunk) {
    const int64_t unit = cut->units * chunk / cut->count;
    return unit / cut->parts * cut->group + unit % cut->parts * cut->group / cut->parts;
}

#endif
