#include "engine/op.h"

#include <algorithm>
#include <limits>

#include "base/clock.h"
#include "engine/engine.h"
#include "engine/queue.h"

namespace comm_core {
namespace {

thread_local double awaited_s = -std::numeric_limits<double>::infinity();

bool has_root(OpKind kind) {
  return kind == OpKind::broadcast || kind == OpKind::reduce || kind == OpKind::gather ||
         kind == OpKind::scatter;
}

uint64_t next_queue() {
  static std::atomic<uint64_t> number{0};
  return number++;
}

}  // namespace

const char* name(OpKind kind) {
  constexpr const char* kNames[] = {"all_reduce", "reduce_scatter", "all_gather", "broadcast",
                                    "reduce",     "gather",         "scatter",    "all_to_all",
                                    "barrier",    "send",           "recv",       "put",
                                    "get",        "accumulate",     "lock",       "unlock"};
  return size_t(kind) < std::size(kNames) ? kNames[size_t(kind)] : "an unknown operation";
}

std::string describe(OpKind kind, DType dtype, ReduceOp op, int root, uint64_t sequence,
                     uint64_t bytes) {
  std::string text = name(kind);
  text += " #" + std::to_string(sequence);
  if (kind == OpKind::barrier) return text;
  text += std::string(" (") + name(dtype);
  if (reduces(kind)) text += std::string(", ") + name(op);
  if (has_root(kind)) text += ", root " + std::to_string(root);
  return text + ", " + std::to_string(bytes) + " bytes)";
}

uint64_t total_bytes(const OpSpec& spec, int size) {
  switch (spec.kind) {
    case OpKind::all_reduce:
    case OpKind::reduce:
    case OpKind::reduce_scatter:
    case OpKind::all_to_all:
    case OpKind::send:
    case OpKind::put:
    case OpKind::accumulate: return total(spec.inputs);
    case OpKind::all_gather:
    case OpKind::broadcast:
    case OpKind::recv:
    case OpKind::get: return total(spec.outputs);
    case OpKind::gather: return spec.inputs[0].bytes * uint64_t(size);
    case OpKind::scatter: return spec.outputs[0].bytes * uint64_t(size);
    default: return 0;
  }
}

OpQueue::OpQueue(std::string name, int rank, int size)
    : name_(std::move(name)), rank_(rank), size_(size), number_(next_queue()) {}

Op::Op(OpSpec spec, Engine* engine, std::shared_ptr<OpQueue> queue)
    : spec_(std::move(spec)), engine_(engine), queue_(std::move(queue)) {
  times_.enqueued_s = now_s();
  state_.held = spec_.held;
}

Op::~Op() = default;

bool Op::wait(double timeout_s) {
  const bool done = engine_->wait(*this, timeout_s);
  if (done) awaited_s = std::max(awaited_s, times_.finished_s);
  return done;
}

bool Op::ends() const {
  if (done()) return true;
  engine_->announce();
  return false;
}

double last_awaited_s() { return awaited_s; }

void note_awaited(double finished_s) { awaited_s = std::max(awaited_s, finished_s); }

std::string Op::describe() const {
  std::string text = comm_core::describe(spec_.kind, spec_.dtype, spec_.op, spec_.root,
                                         state_.sequence, total_bytes());
  if (point_to_point(spec_.kind)) {
    text += spec_.kind == OpKind::recv || spec_.kind == OpKind::get ? " from " : " to ";
    text += spec_.peer < 0 ? "any rank" : "rank " + std::to_string(spec_.peer);
  }
  return text + " on rank " + std::to_string(queue_->rank()) + " of group " + queue_->name();
}

uint64_t Op::total_bytes() const { return comm_core::total_bytes(spec_, queue_->size()); }

void Op::begin(double timeout_s) {
  times_.started_s = now_s();
  flight_.started(times_.started_s);
  state_.deadline_s = times_.started_s + (spec_.timeout_s > 0 ? spec_.timeout_s : timeout_s);
}

void Op::on_done(std::function<void()> callback) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!done()) {
      callbacks_.push_back(std::move(callback));
      return;
    }
  }
  callback();
}

std::vector<std::function<void()>> Op::finish(std::exception_ptr error) {
  std::vector<std::function<void()>> callbacks;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    state_.stages.clear();
    error_ = error;
    done_.store(true, std::memory_order_release);
    callbacks.swap(callbacks_);
    changed_.notify_all();
  }
  for (auto& callback : callbacks) callback();
  return callbacks;
}

}  // namespace comm_core
