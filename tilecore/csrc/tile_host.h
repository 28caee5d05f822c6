/* The checks of a generated kernel's `bind`: each returns 1 with a message that has both numbers. */
#ifndef TILE_HOST_H
#define TILE_HOST_H

#include <stdio.h>

#define TILE_CHECK_RANK(input, expected)                                                                       \
    if (ranks[input] != (expected)) {                                                                          \
        snprintf(error, error_size, "input %d: expected %d dims, found %d", input, expected, (int)ranks[input]); \
        return 1;                                                                                              \
    }
#define TILE_CHECK_DIM(input, axis, expected)                                                                 \
    if (shapes[input][axis] != (expected)) {                                                                  \
        snprintf(error, error_size, "input %d, dim %d: expected %lld, found %lld", input, axis,               \
                 (long long)(expected), (long long)shapes[input][axis]);                                      \
        return 1;                                                                                             \
    }
#define TILE_CHECK_NOT_NEGATIVE(value, text)                                                                        \
    if ((value) < 0) {                                                                                              \
        snprintf(error, error_size, "dims out of range: %s must not be negative, is %lld", text, (long long)(value)); \
        return 1;                                                                                                   \
    }
#define TILE_CHECK_HOLDS(value, text)                                                \
    if ((value) < 0) {                                                               \
        snprintf(error, error_size, "dims do not fit: %s does not hold", text);      \
        return 1;                                                                    \
    }
#define TILE_CHECK_INDEX(position, rows)                                                                          \
    {                                                                                                             \
        const int64_t index = (position), count = (rows);                                                         \
        if (index < -count || index >= count) {                                                                   \
            snprintf(error, error_size, "index %lld is out of range: a table of %lld rows takes %lld to %lld",    \
                     (long long)index, (long long)count, (long long)-count, (long long)(count - 1));              \
            return 1;                                                                                             \
        }                                                                                                         \
    }

#endif
