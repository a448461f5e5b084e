// What the backend's calls check of their arguments. They throw ValueError.
#pragma once

#include <c10/util/Exception.h>

#include <string>

#include "backend.h"

namespace comm_core {

inline const at::Tensor& only(const TensorList& tensors, const char* what) {
  if (tensors.size() != 1) {
    C10_THROW_ERROR(ValueError, std::string(what) + ": one tensor is expected, got " +
                                    std::to_string(tensors.size()));
  }
  return tensors[0];
}

inline void expect_count(size_t got, int n, const char* what) {
  if (got != size_t(n)) {
    C10_THROW_ERROR(ValueError, std::string(what) + ": a tensor for each of the " +
                                    std::to_string(n) + " ranks is expected, got " +
                                    std::to_string(got));
  }
}

inline void expect_times(const at::Tensor& large, const at::Tensor& small, int n,
                         const char* what) {
  if (large.numel() != small.numel() * n) {
    C10_THROW_ERROR(ValueError, std::string(what) + ": one side has " +
                                    std::to_string(large.numel()) + " elements, which is not " +
                                    std::to_string(n) + " (ranks) times the other's " +
                                    std::to_string(small.numel()));
  }
}

}  // namespace comm_core
