/* What a library offers of a region for NVIDIA cards, beside its kernel for the processor: cubins, and what a host needs
 * to launch them. The kernel for the processor (`tile_kernel`) binds symbols and sizes outputs for both.
 *
 * Tensors are counted: inputs first, then outputs, then scratch, which the host allocates for the call. Launches go to
 * one stream, in order.
 */
#ifndef TILE_CUDA_H
#define TILE_CUDA_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#define TILE_CUDA_MAX_MAPS 16
#define TILE_CUDA_MAX_RANK 5 /* of a tensor map */
#define TILE_CUDA_MAX_POINTERS 80
#define TILE_CUDA_MAX_SCRATCH 8
#define TILE_CUDA_MAX_LAUNCHES 9
#define TILE_CUDA_ALIGNMENT 16 /* bytes: of every tensor's address */

/* A tensor map: boxes of a dense tensor, zeros beyond it. Sizes innermost first. */
typedef struct tile_cuda_map {
    int32_t tensor;
    int32_t type; /* CUtensorMapDataType */
    int32_t rank;
    int32_t element_bytes;
    int32_t swizzle;   /* CUtensorMapSwizzle */
    int32_t promotion; /* CUtensorMapL2promotion */
    uint32_t box[TILE_CUDA_MAX_RANK];
} tile_cuda_map;

/* One kernel. Its arguments are its maps, then the addresses of `pointers`, then `symbols` as 32-bit integers. */
typedef struct tile_cuda_launch {
    const char* entry;
    const void* image; /* a cubin */
    uint32_t threads;
    uint32_t cluster;      /* blocks that share a tile */
    uint32_t shared_bytes; /* of dynamic shared memory */
    int32_t blocks;        /* that share a processor and take tile after tile; 0: a block per tile */
    /* Of each tile's words in the last pointer's tensor, which is scratch: how many at their start must be 0, and how many
     * there are; 0: none. */
    int32_t counters;
    int32_t tile_words;
    int32_t n_maps;
    int32_t n_pointers;
    int32_t n_symbols;
    const tile_cuda_map* maps;
    const int32_t* pointers; /* tensors */
    const int32_t* symbols;  /* positions in the array of symbols */
    int64_t (*tiles)(const int64_t* symbols); /* 0 where there is nothing to do, or another launch does it */
    void (*dims)(const int64_t* symbols, int32_t map, uint64_t* dims); /* writes maps[map].rank extents */
} tile_cuda_launch;

typedef struct tile_cuda_kernel {
    const char* arch; /* that the cubins are for, such as "sm_90a" */
    int32_t major;    /* compute capability of the cards that run them */
    int32_t minor;
    int32_t exact; /* whether a card must have this minor number; else that or a higher one */
    int32_t n_launches;
    int32_t n_scratch;
    const tile_cuda_launch* launches;
    size_t (*scratch)(const int64_t* symbols, int32_t index); /* bytes */
    /* Returns 0, or 1 with a message in `error` when sizes pass what the kernels count with. */
    int32_t (*check)(const int64_t* symbols, char* error, size_t error_size);
} tile_cuda_kernel;

/* ---- what generated functions of sizes call ---- */

static inline int64_t floordiv_i64(int64_t a, int64_t b) {
    if (b == 0) return 0;
    const int64_t quotient = a / b;
    return quotient - (a % b != 0 && (a < 0) != (b < 0));
}

static inline int64_t mod_i64(int64_t a, int64_t b) { return a - floordiv_i64(a, b) * b; }

static inline int64_t max_i64(int64_t a, int64_t b) { return a > b ? a : b; }

static inline int64_t min_i64(int64_t a, int64_t b) { return a < b ? a : b; }

#define TILE_CUDA_CHECK_BELOW_2_31(value, what)                                                                    \
    if ((value) > INT32_MAX) {                                                                                     \
        snprintf(error, error_size, "%s is %lld: CUDA kernels count in 32 bits", what, (long long)(value));        \
        return 1;                                                                                                  \
    }

#endif
