// Element-wise reductions and copies: plain functions over memory, safe to call from any thread.
#pragma once

#include "base/types.h"

namespace comm_core {

// False if `op` has no meaning for `dtype` (avg of an integer, max of a complex, bor of a float).
bool supports(DType dtype, ReduceOp op);

// dst[i] = srcs[0][i] op srcs[1][i] op ... for `count` elements, folded in the order given, so that
// the same order gives the same bits. `avg` folds as `sum`: the caller divides once, with `divide`.
// dst may be the same memory as any one source; otherwise nothing overlaps. num_srcs >= 1; with one
// source it is a copy. `streaming`: dst is large and not read again soon, so bypass the caches.
// f16 and bf16 are folded in float32 over all sources and rounded once (to nearest even).
// bool: sum = max = bor = "or"; product = min = band = "and"; bxor = "not equal".
void reduce(DType dtype, ReduceOp op, void* dst, const void* const* srcs, int num_srcs,
            size_t count, bool streaming = false);

// data[i] /= divisor, for the floating and complex types (the second half of `avg`).
void divide(DType dtype, void* data, size_t count, int64_t divisor);

// dst[i] = partial[i] + (srcs[0][i] + srcs[1][i] + ...) / divisor in float32, rounded once, for
// f16, whose sum may be more than it can hold where the average is not. `partial`: averages so far,
// which dst may be; null: none. dst may also be one of the sources.
void average_f16(void* dst, const void* partial, const void* const* srcs, int num_srcs,
                 size_t count, int64_t divisor);

// memcpy; with `streaming`, non-temporal stores where the machine has them.
void copy(void* dst, const void* src, size_t bytes, bool streaming = false);

}  // namespace comm_core
