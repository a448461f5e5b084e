// The Python module `_mpi`.
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "backend.h"
#include "engine.h"
#include "group.h"
#include "library.h"

namespace comm_core::mpi {
namespace {

c10::intrusive_ptr<c10d::Backend> create_backend(const c10d::DistributedBackendOptions& options) {
  return c10::make_intrusive<MpiBackend>(Group::open(options));
}

size_t finalize(bool failed, double grace_s) {
  return Engine::get().finalize(failed, std::chrono::milliseconds(static_cast<int>(grace_s * 1e3)));
}

}  // namespace
}  // namespace comm_core::mpi

PYBIND11_MODULE(_mpi, m) {
  m.doc() = "Process groups of torch.distributed over MPI.";
  m.def("create_backend", &comm_core::mpi::create_backend, py::arg("options"),
        py::call_guard<py::gil_scoped_release>(),
        "The backend of a group, from torch's DistributedBackendOptions; starts MPI if nobody has. "
        "A collective call of the group's members.");
  m.def("finalize", &comm_core::mpi::finalize, py::arg("failed") = false, py::arg("grace_s") = 2.0,
        py::call_guard<py::gil_scoped_release>(),
        "Ends the thread that calls MPI, and MPI itself if it was started here, nothing is under "
        "way after `grace_s` seconds, and not `failed`. Returns the operations still under way. "
        "A second call does nothing.");
  m.def("library_version", &comm_core::mpi::library_version,
        "What MPI_Get_library_version says; MPI need not have been started.");
}
