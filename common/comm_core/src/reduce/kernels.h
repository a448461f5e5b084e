// Element-wise reductions and copies on memory of the caller. Thread-safe.
#pragma once

#include "base/types.h"

namespace comm_core {

// Returns false if `op` is not defined for `dtype`: avg of integers, max of complex, bor of floats.
bool supports(DType dtype, ReduceOp op);

// Computes dst[i] = srcs[0][i] op srcs[1][i] op ... for `count` elements. The sources are folded in
// the given order, so the same order gives the same bits. `avg` is folded like `sum`, and the
// caller divides the result with `divide`. dst may be the same memory as one source; other overlaps
// are not allowed. num_srcs >= 1; one source is copied. `streaming` bypasses the caches, for a
// large dst that is not read again soon. f16 and bf16 are folded in float32 and rounded once (to
// nearest even). For bool, sum, max and bor are "or"; product, min and band are "and"; bxor is "not
// equal". Throws InvalidRequestError if `op` is not defined for `dtype`.
void reduce(DType dtype, ReduceOp op, void* dst, const void* const* srcs, int num_srcs,
            size_t count, bool streaming = false);

// Computes data[i] /= divisor for floating-point and complex types: the second step of `avg`.
// Throws InvalidRequestError for other types.
void divide(DType dtype, void* data, size_t count, int64_t divisor);

// Computes dst[i] = partial[i] + (srcs[0][i] + srcs[1][i] + ...) / divisor for f16, in float32 with
// one rounding: a sum may overflow f16 although the average does not. `partial` holds the average
// of earlier sources (null: none). dst may be the same memory as `partial` or as one source.
void average_f16(void* dst, const void* partial, const void* const* srcs, int num_srcs,
                 size_t count, int64_t divisor);

// Copies like memcpy. `streaming` uses non-temporal stores if the machine has them. dst may equal
// src.
void copy(void* dst, const void* src, size_t bytes, bool streaming = false);

}  // namespace comm_core
