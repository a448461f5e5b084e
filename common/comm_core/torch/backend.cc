#include "backend.h"

#include <c10/util/Exception.h>

#include <mutex>

#include "clock.h"

namespace comm_core {

namespace {

using c10d::OpType;

// torch's store, in the core's words.
class TorchStore : public Store {
 public:
  explicit TorchStore(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}
  void set(const std::string& key, const std::string& value) override {
    store_->set(key, std::vector<uint8_t>(value.begin(), value.end()));
  }
  std::string get(const std::string& key) override {
    const std::vector<uint8_t> value = store_->get(key);
    return std::string(value.begin(), value.end());
  }

 private:
  c10::intrusive_ptr<c10d::Store> store_;
};

const at::Tensor& only(const TensorList& tensors, const char* what) {
  if (tensors.size() != 1) {
    C10_THROW_ERROR(ValueError, std::string(what) + ": one tensor is expected, got " +
                                    std::to_string(tensors.size()));
  }
  return tensors[0];
}

void expect_count(size_t got, int n, const char* what) {
  if (got != size_t(n)) {
    C10_THROW_ERROR(ValueError, std::string(what) + ": a tensor for each of the " +
                                    std::to_string(n) + " ranks is expected, got " +
                                    std::to_string(got));
  }
}

void expect_times(const at::Tensor& large, const at::Tensor& small, int n, const char* what) {
  if (large.numel() != small.numel() * n) {
    C10_THROW_ERROR(ValueError, std::string(what) + ": one side has " +
                                    std::to_string(large.numel()) + " elements, which is not " +
                                    std::to_string(n) + " (ranks) times the other's " +
                                    std::to_string(small.numel()));
  }
}

thread_local int current_priority = 0;

// While it lives, the operations that this thread submits are parts of one: a profiler shows that.
thread_local bool in_parts = false;
struct Parts {
  Parts() { in_parts = true; }
  ~Parts() { in_parts = false; }
};

std::mutex engine_mutex;
std::shared_ptr<Engine>& engine_slot() {
  // Never destroyed by the static order: Python's atexit ends it while that is safe.
  static auto* slot = new std::shared_ptr<Engine>;
  return *slot;
}

// Held operations start here, in a thread that may block on a device, in the order submitted.
void release_when_ready(std::shared_ptr<Group> group, OpPtr op, std::function<void()> ready) {
  call_back([group = std::move(group), op = std::move(op), ready = std::move(ready)] {
    ready();
    group->release(op);
  });
}

}  // namespace

ReduceOp op_of(const c10d::ReduceOp& op, const std::string& what) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM: return ReduceOp::sum;
    case c10d::ReduceOp::AVG: return ReduceOp::avg;
    case c10d::ReduceOp::PRODUCT: return ReduceOp::product;
    case c10d::ReduceOp::MIN: return ReduceOp::min;
    case c10d::ReduceOp::MAX: return ReduceOp::max;
    case c10d::ReduceOp::BAND: return ReduceOp::band;
    case c10d::ReduceOp::BOR: return ReduceOp::bor;
    case c10d::ReduceOp::BXOR: return ReduceOp::bxor;
    default: C10_THROW_ERROR(ValueError, what + ": comm_core has no such reduction");
  }
}

void set_priority(int priority) { current_priority = priority; }
int priority() { return current_priority; }

std::shared_ptr<Engine> process_engine() {
  std::lock_guard<std::mutex> lock(engine_mutex);
  std::shared_ptr<Engine>& engine = engine_slot();
  if (engine == nullptr) engine = std::make_shared<Engine>(Options::from_environment());
  return engine;
}

void shut_down_engine() {
  std::shared_ptr<Engine> engine;
  {
    std::lock_guard<std::mutex> lock(engine_mutex);
    engine = std::move(engine_slot());
    engine_slot() = nullptr;
  }
  stop_calling_back();
  if (engine != nullptr) engine->stop();
}

CoreBackend::CoreBackend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                         const std::string& name, const std::string& towards, double timeout_s)
    : Backend(rank, size) {
  try {
    TorchStore notes(store);
    group_ = Group::create(process_engine(), notes, rank, size, name, towards, timeout_s);
  } catch (const CommError&) {
    throw_as_torch(std::current_exception());
  }
  init();
}

CoreBackend::~CoreBackend() { group_->close(); }

void CoreBackend::setTimeout(Milliseconds timeout) {
  group_->set_timeout_s(std::chrono::duration<double>(timeout).count());
}

void CoreBackend::startCoalescing() {
  coalescing_ = true;
  coalesced_.clear();
}

WorkPtr CoreBackend::endCoalescing() {
  coalescing_ = false;
  return together(std::exchange(coalesced_, {}), nullptr, {}, OpType::COALESCED, {});
}

WorkPtr CoreBackend::together(std::vector<WorkPtr> works, const char* kind,
                              const TensorList& shown, OpType type, TensorList result) {
  std::vector<OpPtr> ops;
  for (const WorkPtr& work : works) {
    const auto& more = static_cast<CoreWork&>(*work).ops();
    ops.insert(ops.end(), more.begin(), more.end());
  }
  const auto synchronize = [works] {
    for (const WorkPtr& work : works) work->synchronize();
  };
  const std::string title = std::string("comm_core:") + (kind == nullptr ? "" : kind);
  return c10::make_intrusive<CoreWork>(rank_, type, kind == nullptr ? nullptr : title.c_str(),
                                       shown, std::move(ops), std::move(result), synchronize);
}

WorkPtr CoreBackend::submit(OpSpec spec, Tensors&& tensors, OpType type, TensorList result,
                            Milliseconds timeout, bool async) {
  // torch's profiler tests and tools know the one without a peer by this name.
  const std::string title =
      std::string("comm_core:") +
      (type == OpType::RECVANYSOURCE ? "recvAnySource" : name(spec.kind));
  tensors.prepare(spec);
  spec.priority = current_priority;
  if (timeout.count() > 0) spec.timeout_s = std::chrono::duration<double>(timeout).count();
  // Who waits at once does the work himself.
  spec.wake = async || spec.held || coalescing_;
  const bool held = spec.held;
  OpPtr op;
  try {
    op = group_->submit(std::move(spec));
  } catch (const CommError&) {
    throw_as_torch(std::current_exception());
  }
  if (held) release_when_ready(group_, op, tensors.ready());
  auto work = c10::make_intrusive<CoreWork>(
      rank_, type, in_parts ? nullptr : title.c_str(), tensors.shown(), std::vector<OpPtr>{op},
      std::move(result), tensors.synchronize());
  if (coalescing_) coalesced_.push_back(work);
  return work;
}

WorkPtr CoreBackend::broadcast(TensorList& tensors, const c10d::BroadcastOptions& options) {
  const at::Tensor& tensor = only(tensors, "broadcast");
  Tensors memory("broadcast");
  OpSpec spec;
  spec.kind = OpKind::broadcast;
  spec.root = int(options.rootRank);
  spec.outputs = {memory.output(tensor, spec.root == rank_)};
  return submit(std::move(spec), std::move(memory), OpType::BROADCAST, tensors, options.timeout,
                options.asyncOp);
}

WorkPtr CoreBackend::allreduce(TensorList& tensors, const c10d::AllreduceOptions& options) {
  const at::Tensor& tensor = only(tensors, "all_reduce");
  Tensors memory("all_reduce");
  OpSpec spec;
  spec.kind = OpKind::all_reduce;
  spec.op = op_of(options.reduceOp, "all_reduce");
  spec.outputs = {memory.output(tensor, true)};
  spec.inputs = {spec.outputs[0]};
  return submit(std::move(spec), std::move(memory), OpType::ALLREDUCE, tensors, options.timeout,
                options.asyncOp);
}

WorkPtr CoreBackend::allreduce_coalesced(TensorList& tensors,
                                         const c10d::AllreduceCoalescedOptions& options) {
  const Parts parts;
  std::vector<WorkPtr> works;
  for (at::Tensor& tensor : tensors) {
    TensorList one{tensor};
    works.push_back(allreduce(one, options));
  }
  return together(std::move(works), "all_reduce", tensors, OpType::ALLREDUCE_COALESCED, tensors);
}

WorkPtr CoreBackend::reduce(TensorList& tensors, const c10d::ReduceOptions& options) {
  const at::Tensor& tensor = only(tensors, "reduce");
  Tensors memory("reduce");
  OpSpec spec;
  spec.kind = OpKind::reduce;
  spec.op = op_of(options.reduceOp, "reduce");
  spec.root = int(options.rootRank);
  if (spec.root == rank_) {
    spec.outputs = {memory.output(tensor, true)};
    spec.inputs = {spec.outputs[0]};
  } else {
    spec.inputs = {memory.input(tensor)};
  }
  return submit(std::move(spec), std::move(memory), OpType::REDUCE, tensors, options.timeout,
                options.asyncOp);
}

WorkPtr CoreBackend::allgather(TensorLists& outputs, TensorList& inputs,
                               const c10d::AllgatherOptions& options) {
  const at::Tensor& input = only(inputs, "all_gather");
  expect_count(outputs.size(), 1, "all_gather: output lists");
  expect_count(outputs[0].size(), size_, "all_gather");
  Tensors memory("all_gather");
  OpSpec spec;
  spec.kind = OpKind::all_gather;
  spec.inputs = {memory.input(input)};
  for (const at::Tensor& output : outputs[0]) spec.outputs.push_back(memory.output(output));
  return submit(std::move(spec), std::move(memory), OpType::ALLGATHER, outputs[0],
                options.timeout, options.asyncOp);
}

WorkPtr CoreBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                     const c10d::AllgatherOptions& options) {
  expect_times(output, input, size_, "all_gather_into_tensor");
  Tensors memory("all_gather_into_tensor");
  OpSpec spec;
  spec.kind = OpKind::all_gather;
  spec.inputs = {memory.input(input)};
  spec.outputs = memory.output_blocks(output, size_);
  return submit(std::move(spec), std::move(memory), OpType::_ALLGATHER_BASE, {output},
                options.timeout, options.asyncOp);
}

WorkPtr CoreBackend::allgather_coalesced(TensorLists& outputs, TensorList& inputs,
                                         const c10d::AllgatherOptions& options) {
  expect_count(outputs.size(), size_, "all_gather_coalesced: output lists");
  const Parts parts;
  std::vector<WorkPtr> works;
  for (size_t i = 0; i < inputs.size(); ++i) {
    TensorLists gathered(1);
    for (TensorList& of_rank : outputs) {
      expect_count(of_rank.size(), int(inputs.size()), "all_gather_coalesced");
      gathered[0].push_back(of_rank[i]);
    }
    TensorList one{inputs[i]};
    works.push_back(allgather(gathered, one, options));
  }
  TensorList all;
  for (const TensorList& of_rank : outputs) all.insert(all.end(), of_rank.begin(), of_rank.end());
  return together(std::move(works), "all_gather", inputs, OpType::ALLGATHER_COALESCED,
                  std::move(all));
}

WorkPtr CoreBackend::allgather_into_tensor_coalesced(TensorList& outputs, TensorList& inputs,
                                                     const c10d::AllgatherOptions& options) {
  expect_count(outputs.size(), int(inputs.size()), "all_gather_into_tensor_coalesced");
  const Parts parts;
  std::vector<WorkPtr> works;
  for (size_t i = 0; i < inputs.size(); ++i) {
    works.push_back(_allgather_base(outputs[i], inputs[i], options));
  }
  return together(std::move(works), "all_gather", inputs, OpType::COALESCED, outputs);
}

WorkPtr CoreBackend::gather(TensorLists& outputs, TensorList& inputs,
                            const c10d::GatherOptions& options) {
  const at::Tensor& input = only(inputs, "gather");
  Tensors memory("gather");
  OpSpec spec;
  spec.kind = OpKind::gather;
  spec.root = int(options.rootRank);
  spec.inputs = {memory.input(input)};
  TensorList result;
  if (spec.root == rank_) {
    expect_count(outputs.size(), 1, "gather: output lists");
    expect_count(outputs[0].size(), size_, "gather");
    result = outputs[0];
    for (const at::Tensor& output : result) {
      if (output.numel() != input.numel()) {
        C10_THROW_ERROR(ValueError, "gather: the tensors must all be of one size");
      }
      spec.outputs.push_back(memory.output(output));
    }
  } else if (!outputs.empty() && !outputs[0].empty()) {
    C10_THROW_ERROR(ValueError, "gather: only the root has outputs");
  }
  return submit(std::move(spec), std::move(memory), OpType::GATHER, result, options.timeout,
                options.asyncOp);
}

WorkPtr CoreBackend::scatter(TensorList& outputs, TensorLists& inputs,
                             const c10d::ScatterOptions& options) {
  const at::Tensor& output = only(outputs, "scatter");
  Tensors memory("scatter");
  OpSpec spec;
  spec.kind = OpKind::scatter;
  spec.root = int(options.rootRank);
  spec.outputs = {memory.output(output)};
  if (spec.root == rank_) {
    expect_count(inputs.size(), 1, "scatter: input lists");
    expect_count(inputs[0].size(), size_, "scatter");
    for (const at::Tensor& input : inputs[0]) {
      if (input.numel() != output.numel()) {
        C10_THROW_ERROR(ValueError, "scatter: the tensors must all be of one size");
      }
      spec.inputs.push_back(memory.input(input));
    }
  } else if (!inputs.empty() && !inputs[0].empty()) {
    C10_THROW_ERROR(ValueError, "scatter: only the root has inputs");
  }
  return submit(std::move(spec), std::move(memory), OpType::SCATTER, outputs, options.timeout,
                options.asyncOp);
}

WorkPtr CoreBackend::reduce_scatter(TensorList& outputs, TensorLists& inputs,
                                    const c10d::ReduceScatterOptions& options) {
  const at::Tensor& output = only(outputs, "reduce_scatter");
  expect_count(inputs.size(), 1, "reduce_scatter: input lists");
  expect_count(inputs[0].size(), size_, "reduce_scatter");
  Tensors memory("reduce_scatter");
  OpSpec spec;
  spec.kind = OpKind::reduce_scatter;
  spec.op = op_of(options.reduceOp, "reduce_scatter");
  for (const at::Tensor& input : inputs[0]) spec.inputs.push_back(memory.input(input));
  spec.outputs = {memory.output(output)};
  return submit(std::move(spec), std::move(memory), OpType::REDUCE_SCATTER, outputs,
                options.timeout, options.asyncOp);
}

WorkPtr CoreBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                          const c10d::ReduceScatterOptions& options) {
  expect_times(input, output, size_, "reduce_scatter_tensor");
  Tensors memory("reduce_scatter_tensor");
  OpSpec spec;
  spec.kind = OpKind::reduce_scatter;
  spec.op = op_of(options.reduceOp, "reduce_scatter_tensor");
  spec.inputs = memory.input_blocks(input, size_);
  spec.outputs = {memory.output(output)};
  return submit(std::move(spec), std::move(memory), OpType::_REDUCE_SCATTER_BASE, {output},
                options.timeout, options.asyncOp);
}

WorkPtr CoreBackend::reduce_scatter_tensor_coalesced(TensorList& outputs, TensorList& inputs,
                                                     const c10d::ReduceScatterOptions& options) {
  expect_count(outputs.size(), int(inputs.size()), "reduce_scatter_tensor_coalesced");
  const Parts parts;
  std::vector<WorkPtr> works;
  for (size_t i = 0; i < inputs.size(); ++i) {
    works.push_back(_reduce_scatter_base(outputs[i], inputs[i], options));
  }
  return together(std::move(works), "reduce_scatter", inputs,
                  OpType::REDUCE_SCATTER_TENSOR_COALESCED, outputs);
}

WorkPtr CoreBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                   std::vector<int64_t>& output_sizes,
                                   std::vector<int64_t>& input_sizes,
                                   const c10d::AllToAllOptions& options) {
  Tensors memory("all_to_all_single");
  OpSpec spec;
  spec.kind = OpKind::all_to_all;
  const ConstSpan in = memory.input(input);
  const Span out = memory.output(output);
  // Bytes of each rank's rows; no sizes: equal parts.
  const auto parts = [&](const at::Tensor& tensor, const std::vector<int64_t>& sizes) {
    std::vector<size_t> bytes;
    const int64_t rows = tensor.dim() == 0 ? tensor.numel() : tensor.size(0);
    if (sizes.empty()) {
      if (rows % size_ != 0) {
        C10_THROW_ERROR(ValueError, "all_to_all_single: " + std::to_string(rows) +
                                        " rows cannot be cut into " + std::to_string(size_) +
                                        " equal parts");
      }
      bytes.assign(size_t(size_), tensor.nbytes() / size_t(size_));
      return bytes;
    }
    expect_count(sizes.size(), size_, "all_to_all_single: split sizes");
    int64_t total = 0;
    for (int64_t size : sizes) {
      if (size < 0) {
        C10_THROW_ERROR(ValueError, "all_to_all_single: a split size is negative: " +
                                        std::to_string(size));
      }
      total += size;
      bytes.push_back(rows == 0 ? 0 : tensor.nbytes() / size_t(rows) * size_t(size));
    }
    if (total != rows) {
      C10_THROW_ERROR(ValueError, "all_to_all_single: the split sizes add up to " +
                                      std::to_string(total) + ", not to the " +
                                      std::to_string(rows) + " rows");
    }
    return bytes;
  };
  size_t at = 0;
  for (size_t bytes : parts(input, input_sizes)) {
    spec.inputs.emplace_back(in.data + at, bytes);
    at += bytes;
  }
  at = 0;
  for (size_t bytes : parts(output, output_sizes)) {
    spec.outputs.push_back({out.data + at, bytes});
    at += bytes;
  }
  return submit(std::move(spec), std::move(memory), OpType::ALLTOALL_BASE, {output},
                options.timeout, options.asyncOp);
}

WorkPtr CoreBackend::alltoall(TensorList& outputs, TensorList& inputs,
                              const c10d::AllToAllOptions& options) {
  expect_count(outputs.size(), size_, "all_to_all");
  expect_count(inputs.size(), size_, "all_to_all");
  Tensors memory("all_to_all");
  OpSpec spec;
  spec.kind = OpKind::all_to_all;
  for (const at::Tensor& input : inputs) spec.inputs.push_back(memory.input(input));
  for (const at::Tensor& output : outputs) spec.outputs.push_back(memory.output(output));
  return submit(std::move(spec), std::move(memory), OpType::ALLTOALL, outputs, options.timeout,
                options.asyncOp);
}

WorkPtr CoreBackend::send(TensorList& tensors, int peer, int tag) {
  const at::Tensor& tensor = only(tensors, "send");
  Tensors memory("send");
  OpSpec spec;
  spec.kind = OpKind::send;
  spec.peer = peer;
  spec.tag = uint64_t(tag);
  spec.inputs = {memory.input(tensor)};
  return submit(std::move(spec), std::move(memory), OpType::SEND, tensors, Milliseconds(0), true);
}

WorkPtr CoreBackend::recv(TensorList& tensors, int peer, int tag) {
  const at::Tensor& tensor = only(tensors, "recv");
  Tensors memory("recv");
  OpSpec spec;
  spec.kind = OpKind::recv;
  spec.peer = peer;
  spec.tag = uint64_t(tag);
  spec.outputs = {memory.output(tensor)};
  return submit(std::move(spec), std::move(memory), OpType::RECV, tensors, Milliseconds(0), true);
}

WorkPtr CoreBackend::recvAnysource(TensorList& tensors, int tag) {
  const at::Tensor& tensor = only(tensors, "recv");
  Tensors memory("recv");
  OpSpec spec;
  spec.kind = OpKind::recv;
  spec.peer = -1;
  spec.tag = uint64_t(tag);
  spec.outputs = {memory.output(tensor)};
  return submit(std::move(spec), std::move(memory), OpType::RECVANYSOURCE, tensors,
                Milliseconds(0), true);
}

WorkPtr CoreBackend::barrier(const c10d::BarrierOptions& options) {
  OpSpec spec;
  spec.kind = OpKind::barrier;
  return submit(std::move(spec), Tensors("barrier"), OpType::BARRIER, {}, options.timeout,
                options.asyncOp);
}

void CoreBackend::abort() { group_->abort("abort() was called"); }

void CoreBackend::shutdown() { group_->close(); }

}  // namespace comm_core
