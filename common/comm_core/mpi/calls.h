// What the operations have in common.
#pragma once

#include <c10/util/Exception.h>
#include <mpi.h>

#include <vector>

#include "buffer.h"
#include "library.h"

namespace comm_core::mpi {

using RequestList = std::vector<MPI_Request>;

// Makes one non-blocking MPI call, `start(MPI_Request*)`; throws if it fails. A null request means
// that there is nothing to wait for.
template <typename Call>
void add_request(RequestList& requests, const char* name, Call start) {
  MPI_Request request = MPI_REQUEST_NULL;
  check(start(&request), name);
  if (request != MPI_REQUEST_NULL) requests.push_back(request);
}

// The only element of `list`; torch passes one per device.
template <typename T>
const T& only(const char* name, const std::vector<T>& list) {
  TORCH_CHECK_WITH(ValueError, list.size() == 1, name, ": the MPI backend takes one tensor, got ",
                   list.size());
  return list.front();
}

inline void check_same_type(const char* name, const Buffer& a, const Buffer& b) {
  TORCH_CHECK_WITH(TypeError, a.scalar_type() == b.scalar_type(), name, ": output of ",
                   a.scalar_type(), ", input of ", b.scalar_type());
}

// `whole` must hold `parts` times the elements of `part`.
inline void check_sizes(const char* name, const Buffer& whole, int parts, const Buffer& part) {
  TORCH_CHECK_WITH(ValueError, whole.elements() == parts * part.elements(), name, ": ",
                   whole.elements(), " elements for ", parts, " ranks with ", part.elements(),
                   " elements each");
}

}  // namespace comm_core::mpi
