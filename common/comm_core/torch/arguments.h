// What the backend's calls check of their arguments. They throw ValueError.
#pragma once

#include <c10/util/Exception.h>

#include "backend.h"

namespace comm_core {

inline const at::Tensor& only(const TensorList& tensors, const char* what) {
  TORCH_CHECK_VALUE(tensors.size() == 1, what, ": one tensor is expected, got ", tensors.size());
  return tensors[0];
}

inline void expect_count(size_t got, int n, const char* what) {
  TORCH_CHECK_VALUE(got == size_t(n), what, ": a tensor for each of the ", n,
                    " ranks is expected, got ", got);
}

inline void expect_times(const at::Tensor& large, const at::Tensor& small, int n,
                         const char* what) {
  TORCH_CHECK_VALUE(large.numel() == small.numel() * n, what, ": one side has ", large.numel(),
                    " elements, which is not ", n, " (ranks) times the other's ", small.numel());
}

}  // namespace comm_core
