#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "backend.h"

namespace py = pybind11;
using namespace comm_core;

namespace {

using Unlocked = py::call_guard<py::gil_scoped_release>;

std::vector<std::tuple<std::string, uint64_t, std::string>> rows_of(
    const std::vector<Regime>& regimes) {
  std::vector<std::tuple<std::string, uint64_t, std::string>> rows;
  for (const Regime& r : regimes) rows.emplace_back(r.name, r.first_bytes, r.setting);
  return rows;
}

}  // namespace

PYBIND11_MODULE(_core, m) {
  m.doc() = "The compiled communication core; use it through the package comm_core.";
  // Registers the base classes, which are torch's.
  py::module_::import("torch.distributed");

  py::register_exception<DistMismatchError>(
      m, "MismatchError", py::module_::import("torch.distributed").attr("DistBackendError"));

  py::class_<OpTimes>(m, "Times", "When an operation was queued, started and ended.")
      .def_readonly("enqueued_s", &OpTimes::enqueued_s, "seconds on time.monotonic()")
      .def_readonly("started_s", &OpTimes::started_s)
      .def_readonly("finished_s", &OpTimes::finished_s);

  const py::object get_future =
      py::module_::import("torch.distributed").attr("Work").attr("get_future");
  py::class_<CoreWork, c10d::Work, c10::intrusive_ptr<CoreWork>>(m, "Work")
      .def("times", &CoreWork::times, "Times of a finished operation; ValueError if it still runs.")
      .def(
          "get_future",
          [get_future](const py::object& work) {
            const OrderedFutures ordered;
            return get_future(work);
          },
          "The future. Collectives of the group that are started later wait for its callbacks.")
      .def(
          "unordered_future", [get_future](const py::object& work) { return get_future(work); },
          "The future, for callbacks that start no collectives of the group: nothing waits.");

  py::class_<CoreBackend, c10d::Backend, c10::intrusive_ptr<CoreBackend>>(m, "CoreBackend")
      .def(py::init([](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                       const std::string& name, const std::string& towards, double timeout_s) {
             return c10::make_intrusive<CoreBackend>(store, rank, size, name, towards, timeout_s);
           }),
           py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("name"), py::arg("towards"),
           py::arg("timeout_s"), Unlocked())
      .def("add_window", &CoreBackend::add_window, Unlocked())
      .def("remove_window", &CoreBackend::remove_window, Unlocked())
      .def("window_versions", &CoreBackend::window_versions, Unlocked())
      .def("read_window", &CoreBackend::read_window, Unlocked())
      .def(
          "window_operation",
          [](CoreBackend& b, const std::string& kind, int64_t number, int peer, int64_t slot,
             int64_t offset, const std::optional<at::Tensor>& tensor, const c10d::ReduceOp& op) {
            return b.window_operation(kind, number, peer, slot, offset, tensor, op.op_);
          },
          Unlocked())
      .def("regimes", [](CoreBackend& b,
                         const std::string& operation) { return rows_of(b.regimes_of(operation)); })
      .def(
          "announce", [](CoreBackend& b) { b.group()->engine().announce(); },
          "Lets the engine take operations that were submitted with asyncOp=False.")
      .def("number", [](CoreBackend& b) { return b.group()->number(); })
      .def("label", [](CoreBackend& b, int rank) { return b.group()->peer(rank).label; })
      .def("summary", [](CoreBackend& b) { return b.group()->summary(); })
      .def(
          "dropped_connections", [](CoreBackend& b) { return b.group()->dropped_connections(); },
          Unlocked());

  py::class_<Batch>(m, "Batch", "All-reduces that are started one by one and awaited together.")
      .def(py::init<c10::intrusive_ptr<CoreBackend>, int>(), py::arg("backend"),
           py::arg("priority") = 0)
      .def("start", &Batch::start)
      .def("wait", &Batch::wait, Unlocked())
      .def("done", &Batch::done);

  m.def("divide", &divide);
  m.def("shared_bytes", [](int64_t bytes) {
    try {
      return shared_bytes(bytes);
    } catch (const CommError&) {
      throw_as_torch(std::current_exception());
    }
  });
  m.def("regimes", [](const std::string& operation, int ranks, int hosts) {
    return rows_of(regimes_of(operation, ranks, hosts));
  });
  m.def("set_priority", &set_priority);
  m.def("priority", &priority);
  m.def("events", [] {
    py::list all;
    for (const Event& e : process_engine()->events()) {
      py::dict event;
      event["operation"] = name(e.kind);
      event["dtype"] = name(e.dtype);
      event["priority"] = e.priority;
      event["group"] = e.group;
      event["sequence"] = e.sequence;
      event["nbytes"] = e.bytes;
      event["enqueued_s"] = e.times.enqueued_s;
      event["started_s"] = e.times.started_s;
      event["finished_s"] = e.times.finished_s;
      event["ok"] = e.ok;
      all.append(event);
    }
    return all;
  });
  m.def("last_awaited_s", &last_awaited_s);
  m.def("note_all_awaited", [] { note_awaited(process_engine()->last_finished_s()); });
  m.def("lulls_s", [](double after_s) {
    std::vector<std::pair<double, double>> all;
    for (const Lull& lull : process_engine()->lulls(after_s)) {
      all.emplace_back(lull.since_s, lull.until_s);
    }
    return all;
  });
  m.def("record_flight", [](const std::string& path) {
    try {
      record_flight(path);
    } catch (const CommError&) {
      throw_as_torch(std::current_exception());
    }
  });
  m.def("shut_down", &shut_down_engine, Unlocked());
}
