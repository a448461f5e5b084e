#include <c10/util/Exception.h>

#include <limits>

#include "backend.h"

namespace comm_core {

void CoreBackend::add_window(int64_t number, const at::Tensor& memory) {
  TORCH_CHECK_VALUE(memory.dim() == 2 && memory.is_contiguous() && memory.device().is_cpu(),
                    "a window's memory must be a contiguous CPU tensor [slots, elements]");
  const DType dtype = dtype_of(memory, "window");
  const Span span{static_cast<char*>(memory.mutable_data_ptr()), memory.nbytes()};
  on_windows([&](Windows& windows) {
    windows.add(uint32_t(number), span, size_t(memory.size(0)), dtype);
  });
  const std::lock_guard<std::mutex> lock(window_mutex_);
  window_memory_[number] = memory;
}

void CoreBackend::remove_window(int64_t number) {
  on_windows([&](Windows& windows) { windows.remove(uint32_t(number)); });
  const std::lock_guard<std::mutex> lock(window_mutex_);
  window_memory_.erase(number);
}

at::Tensor CoreBackend::memory_of(int64_t number) {
  const std::lock_guard<std::mutex> lock(window_mutex_);
  const auto entry = window_memory_.find(number);
  TORCH_CHECK_VALUE(entry != window_memory_.end(), "the window was freed");
  return entry->second;
}

std::vector<uint64_t> CoreBackend::window_versions(int64_t number) {
  std::vector<uint64_t> versions;
  on_windows([&](Windows& windows) { versions = windows.versions(uint32_t(number)); });
  return versions;
}

at::Tensor CoreBackend::read_window(int64_t number, int64_t first, int64_t count, bool reset,
                                    bool clear) {
  const at::Tensor memory = memory_of(number);
  const int64_t slots = memory.size(0);
  TORCH_CHECK_VALUE(first >= 0 && count >= 0, "the slot and the count must not be negative");
  TORCH_CHECK_VALUE(first <= slots && count <= slots - first, "the window has ", slots,
                    " slots, not ", count, " from slot ", first, " on");
  at::Tensor copy = at::empty({count, memory.size(1)}, memory.options());
  on_windows([&](Windows& windows) {
    windows.read(uint32_t(number), size_t(first), size_t(count),
                 static_cast<char*>(copy.mutable_data_ptr()), reset, clear);
  });
  return copy;
}

WorkPtr CoreBackend::window_operation(const std::string& kind, int64_t number, int peer,
                                      int64_t slot, int64_t offset,
                                      const std::optional<at::Tensor>& tensor,
                                      c10d::ReduceOp::RedOpType op) {
  Call call(kind.c_str(), OpKind::barrier);
  OpSpec& spec = call.spec;
  for (OpKind known :
       {OpKind::put, OpKind::accumulate, OpKind::get, OpKind::lock, OpKind::unlock}) {
    if (kind == name(known)) spec.kind = known;
  }
  // The target compares them with its window. Larger ones would not arrive as what they are.
  const int64_t element_size = tensor ? int64_t(tensor->element_size()) : 1;
  const int64_t most = std::numeric_limits<int64_t>::max() / element_size;
  TORCH_CHECK_VALUE(slot >= 0 && slot <= UINT32_MAX, kind, ": slot ", slot, " is ",
                    slot < 0 ? "negative" : "not a slot of any window");
  TORCH_CHECK_VALUE(offset >= 0 && offset <= most, kind, ": offset ", offset, " is ",
                    offset < 0 ? "negative" : "outside every window");
  spec.op = op_of(op, kind);
  spec.window = uint32_t(number);
  spec.slot = uint32_t(slot);
  spec.peer = peer;
  TensorList result;
  if (tensor) {
    result = {*tensor};
    spec.offset = uint64_t(offset * element_size);
    if (spec.kind == OpKind::get) {
      spec.outputs = {call.output(*tensor)};
    } else {
      spec.inputs = {call.input(*tensor)};
    }
  }
  return submit(std::move(call), c10d::OpType::UNKNOWN, result, Milliseconds(0), true);
}

void CoreBackend::on_windows(const std::function<void(Windows&)>& work) {
  try {
    group_->with_windows(work);
  } catch (const CommError&) {
    throw_as_torch(std::current_exception());
  }
}

}  // namespace comm_core
