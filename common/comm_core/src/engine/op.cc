#include "engine/op.h"

#include <algorithm>
#include <limits>

#include "base/clock.h"
#include "collectives/stage.h"
#include "engine/engine.h"
#include "group/group.h"

namespace comm_core {
namespace {

thread_local double awaited_s = -std::numeric_limits<double>::infinity();

}  // namespace

const char* name(OpKind kind) {
  constexpr const char* kNames[] = {"all_reduce", "reduce_scatter", "all_gather", "broadcast",
                                    "reduce",     "gather",         "scatter",    "all_to_all",
                                    "barrier",    "send",           "recv",       "put",
                                    "get",        "accumulate",     "lock",       "unlock"};
  return size_t(kind) < std::size(kNames) ? kNames[size_t(kind)] : "an unknown operation";
}

Op::Op(OpSpec spec, Engine* engine, std::shared_ptr<Group> group)
    : spec_(std::move(spec)), engine_(engine), group_(std::move(group)) {
  times_.enqueued_s = now_s();
  held_ = spec_.held;
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

std::string Op::describe() const { return group_->describe(*this); }

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
    stages_.clear();
    error_ = error;
    done_.store(true, std::memory_order_release);
    callbacks.swap(callbacks_);
    changed_.notify_all();
  }
  for (auto& callback : callbacks) callback();
  return callbacks;
}

}  // namespace comm_core
