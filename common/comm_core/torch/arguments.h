// Argument checks of the backend's calls. All throw ValueError.
#pragma once

#include <c10/util/Exception.h>

#include "backend.h"

namespace comm_core {

inline const at::Tensor& only(const TensorList& tensors, const char* what) {
  TORCH_CHECK_VALUE(tensors.size() == 1, what, ": expected one tensor, got ", tensors.size());
  return tensors[0];
}

inline void expect_count(size_t got, int n, const char* what) {
  TORCH_CHECK_VALUE(got == size_t(n), what, ": expected ", n, ", got ", got);
}

inline void expect_times(const at::Tensor& large, const at::Tensor& small, int n,
                         const char* what) {
  TORCH_CHECK_VALUE(large.numel() == small.numel() * n, what, ": the larger tensor has ",
                    large.numel(), " elements, but must have ", n, " ranks x ", small.numel());
}

// Returns a rank that torch passes in 64 bits.
inline int rank_of(int64_t rank, int n, const char* what) {
  TORCH_CHECK_VALUE(rank >= 0 && rank < n, what, " ", rank, " is not a rank of a group of ", n);
  return int(rank);
}

}  // namespace comm_core
