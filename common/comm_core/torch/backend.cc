#include "backend.h"

#include <ATen/record_function.h>
#include <c10/util/Exception.h>

#include <chrono>
#include <mutex>

#include "base/clock.h"
#include "reduce/kernels.h"

namespace comm_core {

namespace {

using c10d::OpType;

// Adapts torch's store to the core's interface.
class TorchStore : public Store {
 public:
  // Waits for keys for `timeout_s`, as the group's operations do, and not for the store's own
  // limit.
  TorchStore(c10::intrusive_ptr<c10d::Store> store, double timeout_s)
      : store_(std::move(store)), timeout_(int64_t(1e3 * timeout_s)) {}
  void set(const std::string& key, const std::string& value) override {
    store_->set(key, std::vector<uint8_t>(value.begin(), value.end()));
  }
  std::string get(const std::string& key) override {
    try {
      store_->wait({key}, timeout_);
      const std::vector<uint8_t> value = store_->get(key);
      return std::string(value.begin(), value.end());
    } catch (const c10::DistStoreError& error) {
      throw StoreError(error.what_without_backtrace());
    }
  }
  int64_t add(const std::string& key, int64_t amount) override { return store_->add(key, amount); }
  void remove(const std::string& key) override { store_->deleteKey(key); }

 private:
  c10::intrusive_ptr<c10d::Store> store_;
  const std::chrono::milliseconds timeout_;
};

OpKind kind_of(const std::string& operation) {
  for (int kind = 0; kind <= int(OpKind::barrier); ++kind) {
    if (operation == name(OpKind(kind))) return OpKind(kind);
  }
  throw InvalidRequestError("unknown collective '" + operation + "'");
}

thread_local int current_priority = 0;

// During its lifetime, the operations that this thread submits are parts of one operation.
struct Parts {
  Parts() { under_way = true; }
  ~Parts() { under_way = false; }
  static thread_local bool under_way;
};
thread_local bool Parts::under_way = false;

std::mutex engine_mutex;
std::shared_ptr<Engine>& engine_slot() {
  // Not destroyed with the static objects: Python's atexit handler ends it while that is safe.
  static auto* slot = new std::shared_ptr<Engine>;
  return *slot;
}

// Returns the engine. A rank whose settings are wrong tells the others that it does not join them.
std::shared_ptr<Engine> engine_for(Store& notes, int rank, int size) {
  try {
    return process_engine();
  } catch (const std::exception& error) {
    if (size > 1) Group::decline(notes, rank, size, error);
    throw;
  }
}

// Releases held operations in the order submitted, in a thread that may block on a device.
void release_when_ready(std::shared_ptr<Group> group, OpPtr op, std::function<void()> ready) {
  call_in_order([group = std::move(group), op = std::move(op), ready = std::move(ready)] {
    try {
      ready();
    } catch (const std::exception& error) {  // an error of the device: its results are invalid
      group->abort(op->describe() + ": its input: " + error.what());
      return;
    }
    group->release(op);
  });
}

}  // namespace

std::vector<Regime> regimes_of(const std::string& operation, int ranks, int hosts) {
  try {
    return regimes(kind_of(operation), ranks, hosts, Options::from_environment());
  } catch (const CommError&) {
    throw_as_torch(std::current_exception());
  }
}

void set_priority(int priority) { current_priority = priority; }
int priority() { return current_priority; }

std::shared_ptr<Engine> process_engine() {
  std::lock_guard<std::mutex> lock(engine_mutex);
  std::shared_ptr<Engine>& engine = engine_slot();
  if (engine == nullptr || engine->forked())
    engine = std::make_shared<Engine>(Options::from_environment());
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
  keep_waiting_threads();
  if (engine != nullptr) engine->stop();
}

CoreBackend::CoreBackend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                         const std::string& name, const std::string& towards, double timeout_s)
    : Backend(rank, size) {
  try {
    TorchStore notes(store, timeout_s);
    group_ =
        Group::create(engine_for(notes, rank, size), notes, rank, size, name, towards, timeout_s);
  } catch (const CommError&) {
    throw_as_torch(std::current_exception());
  }
  init();
}

CoreBackend::~CoreBackend() { group_->close(); }

void CoreBackend::setTimeout(Milliseconds timeout) {
  group_->set_timeout_s(std::chrono::duration<double>(timeout).count());
}

void CoreBackend::startCoalescing() { block() = {this, {}, {}}; }

WorkPtr CoreBackend::endCoalescing() {
  Block ended = std::exchange(block(), {});
  const auto synchronize = [all = std::move(ended.synchronize)] {
    for (const auto& one : all) one();
  };
  return c10::make_intrusive<CoreWork>(rank_, OpType::COALESCED, nullptr, TensorList{},
                                       std::move(ended.ops), TensorList{}, synchronize);
}

WorkPtr CoreBackend::together(std::vector<WorkPtr> works, const char* kind, const TensorList& shown,
                              OpType type, TensorList result) {
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

WorkPtr CoreBackend::each(size_t count, const std::function<WorkPtr(size_t)>& one, const char* kind,
                          const TensorList& shown, OpType type, const TensorList& result) {
  const Parts parts;
  std::vector<WorkPtr> works;
  for (size_t i = 0; i < count; ++i) works.push_back(one(i));
  return together(std::move(works), kind, shown, type, result);
}

WorkPtr CoreBackend::submit(Call call, OpType type, TensorList result, Milliseconds timeout,
                            bool async) {
  OpSpec& spec = call.spec;
  std::string title;  // of the profiler's event
  if (!Parts::under_way && at::hasCallbacks()) {
    // torch's profiler tests and tools expect this name for a receive without a peer.
    title = type == OpType::RECVANYSOURCE ? "recvAnySource" : name(spec.kind);
    title.insert(0, "comm_core:");
  }
  call.separate(spec, rank_);
  call.prepare(spec);
  TORCH_CHECK_TYPE(!reduces(spec.kind) || supports(spec.dtype, ReduceOp::sum), name(spec.kind),
                   ": comm_core cannot reduce ", call.shown().front().scalar_type(),
                   " tensors, only move them");
  spec.priority = current_priority;
  if (timeout.count() > 0) spec.timeout_s = std::chrono::duration<double>(timeout).count();
  // A caller that waits soon advances the operation itself, so the engine need not wake.
  const bool coalescing = block().backend == this;
  spec.wake = async || spec.held || coalescing;
  const bool held = spec.held;
  OpPtr op;
  try {
    op = group_->submit(std::move(spec));
  } catch (const CommError&) {
    throw_as_torch(std::current_exception());
  }
  if (held) release_when_ready(group_, op, call.ready());
  auto work =
      c10::make_intrusive<CoreWork>(rank_, type, title.empty() ? nullptr : title.c_str(),
                                    title.empty() ? TensorList() : call.shown(),
                                    std::vector<OpPtr>{op}, std::move(result), call.synchronize());
  if (coalescing) block().add(op, call.synchronize());
  return work;
}

WorkPtr CoreBackend::barrier(const c10d::BarrierOptions& options) {
  return submit(Call("barrier", OpKind::barrier), OpType::BARRIER, {}, options);
}

std::vector<Regime> CoreBackend::regimes_of(const std::string& operation) const {
  try {
    const GroupView view = group_->view();
    const Topology& topology = view.topology;
    comm_core::Options options = view.options;  // torch's backends have options too
    // Without shared memory, or if hosts have different numbers of ranks, all data goes over lanes.
    const bool shared = view.local != nullptr && (topology.one_host() || topology.regular());
    if (!shared) options.transport = TransportChoice::tcp;
    return regimes(kind_of(operation), size_, int(shared ? topology.hosts.size() : size_), options);
  } catch (const CommError&) {
    throw_as_torch(std::current_exception());
  }
}

void CoreBackend::abort() { group_->abort("abort() was called"); }

void CoreBackend::shutdown() { group_->close(); }

}  // namespace comm_core
