/* A CUDA driver that records what it is asked for and runs nothing: what a library passes to a card can then be checked
 * where there is none. `fake_log` has a line per call; `fake_arguments` says what a kernel takes: m for a tensor map, p
 * for a pointer, i for an int.
 */
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define VISIBLE __attribute__((visibility("default")))

VISIBLE char fake_log[1 << 16];
VISIBLE char fake_arguments[256];
VISIBLE int fake_major = 9;
VISIBLE int fake_room = 232448; /* bytes of shared memory of a block */
VISIBLE int fake_failing; /* the status of cuLaunchKernelEx */
VISIBLE uintptr_t fake_current = 0xc0;

static void note(const char* format, ...) {
    size_t used = strlen(fake_log);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(fake_log + used, sizeof fake_log - used, format, arguments);
    va_end(arguments);
}

VISIBLE int cuGetErrorString(int status, const char** text) {
    *text = status == 700 ? "an illegal memory access was encountered" : "other";
    return 0;
}
VISIBLE int cuCtxGetCurrent(uintptr_t* out) { return *out = fake_current, 0; }
VISIBLE int cuCtxPushCurrent_v2(uintptr_t context) { return note("push %lx\n", (long)context), fake_current = context, 0; }
VISIBLE int cuCtxPopCurrent_v2(uintptr_t* out) { return note("pop\n"), *out = fake_current, fake_current = 0, 0; }
VISIBLE int cuCtxGetDevice(int* out) { return *out = 0, 0; }
VISIBLE int cuStreamGetCtx(uintptr_t stream, uintptr_t* out) { return *out = stream & 0xf0, 0; }
VISIBLE int cuDeviceGetAttribute(int* out, int attribute, int device) {
    (void)device;
    *out = attribute == 16 ? 132 : attribute == 75 ? fake_major : attribute == 97 ? fake_room : 0;
    return 0;
}
VISIBLE int cuDeviceGetName(char* name, int bytes, int device) {
    (void)device;
    snprintf(name, (size_t)bytes, "Imaginary");
    return 0;
}
VISIBLE int cuModuleLoadData(uintptr_t* out, const void* image) {
    uint32_t magic;
    memcpy(&magic, image, sizeof magic);
    note("load %s\n", magic == 0x464c457f ? "elf" : "junk");
    return *out = (uintptr_t)image, 0;
}
VISIBLE int cuModuleUnload(uintptr_t module) { return (void)module, 0; }
VISIBLE int cuModuleGetFunction(const char** out, uintptr_t module, const char* name) {
    (void)module;
    return note("function %s\n", name), *out = name, 0;
}
VISIBLE int cuFuncSetAttribute(const char* function, int attribute, int value) {
    (void)function;
    return note("attribute %d %d\n", attribute, value), 0;
}
VISIBLE int cuOccupancyMaxActiveClusters(int* out, const char* function, const void* launch) {
    (void)function, (void)launch;
    return *out = 15, 0;
}
VISIBLE int cuTensorMapEncodeTiled(uint64_t* map, int type, uint32_t rank, void* address, const uint64_t* dims,
                                   const uint64_t* pitches, const uint32_t* box, const uint32_t* steps, int interleave,
                                   int swizzle, int promotion, int fill) {
    static uint64_t number;
    (void)steps, (void)interleave, (void)promotion, (void)fill;
    note("map %d at %lx type %d swizzle %d dims", (int)number, (long)(uintptr_t)address, type, swizzle);
    for (uint32_t i = 0; i < rank; i++) note(" %ld", (long)dims[i]);
    note(" pitches");
    for (uint32_t i = 0; i + 1 < rank; i++) note(" %ld", (long)pitches[i]);
    note(" box");
    for (uint32_t i = 0; i < rank; i++) note(" %u", box[i]);
    note("\n");
    map[0] = number++;
    return 0;
}
VISIBLE int cuMemsetD2D32Async(uintptr_t address, size_t pitch, unsigned word, size_t words, size_t rows, uintptr_t stream) {
    note("set %lx to %u words %lu rows %lu pitch %lu stream %lx\n", (long)address, word, (unsigned long)words,
         (unsigned long)rows, (unsigned long)pitch, (long)stream);
    return 0;
}
/* CUlaunchAttribute and CUlaunchConfig, as far as they are used. */
typedef struct attribute {
    int id, pad, value[16];
} attribute;
typedef struct config {
    unsigned grid[3], block[3], shared;
    uintptr_t stream;
    const attribute* attributes;
    unsigned count;
} config;

VISIBLE int cuLaunchKernelEx(const config* launch, const char* function, void** arguments, void** extra) {
    const unsigned *grid = launch->grid, *block = launch->block;
    note("launch %s grid %u %u %u block %u %u %u shared %u stream %lx extra %d", function, grid[0], grid[1], grid[2],
         block[0], block[1], block[2], launch->shared, (long)launch->stream, extra != NULL);
    for (unsigned i = 0; i < launch->count; i++) note(" attribute %d is %d", launch->attributes[i].id, launch->attributes[i].value[0]);
    note(" with");
    const char* kinds = fake_arguments;
    for (int i = 0; kinds[i] != '\0' && kinds[i] != ' '; i++) {
        if (kinds[i] == 'm') note(" map %d", (int)*(uint64_t*)arguments[i]);
        if (kinds[i] == 'p') note(" %lx", (long)*(uintptr_t*)arguments[i]);
        if (kinds[i] == 'i') note(" %d", *(int*)arguments[i]);
    }
    note("\n");
    const char* rest = strchr(kinds, ' '); /* the next launch's kinds follow a space */
    if (rest != NULL) memmove(fake_arguments, rest + 1, strlen(rest + 1) + 1);
    return fake_failing;
}
