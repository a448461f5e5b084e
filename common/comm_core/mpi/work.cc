#include "work.h"

#include <ATen/core/ivalue.h>

#include <algorithm>

#include "engine.h"
#include "group.h"
#include "library.h"

namespace comm_core::mpi {
namespace {

// Longer waits would overflow the clock, and mean "for ever" anyway.
constexpr std::chrono::milliseconds kLongest = std::chrono::hours(24 * 3650);

// The progress thread ends an operation at its deadline; only if that thread is itself stuck in an
// MPI call does a waiter see this much more.
constexpr std::chrono::milliseconds kGrace{1000};

double seconds(std::chrono::milliseconds time) {
  return std::chrono::duration<double>(time).count();
}

template <typename... Words>
std::exception_ptr backend_error(const Words&... words) {
  try {
    TORCH_CHECK_WITH(DistBackendError, false, words...);
  } catch (...) {
    return std::current_exception();
  }
}

}  // namespace

MpiWork::MpiWork(std::shared_ptr<Group> group, Plan plan, uint64_t sequence,
                 std::chrono::milliseconds timeout)
    : Work(group->rank(), plan.op_type),
      group_(std::move(group)),
      plan_(std::move(plan)),
      sequence_(sequence),
      timeout_(std::min(timeout, kLongest)),
      deadline_(Clock::now() + timeout_) {}

bool MpiWork::isCompleted() {
  const std::lock_guard lock(mutex_);
  return completed_;
}

bool MpiWork::isSuccess() const {
  const std::lock_guard lock(mutex_);
  return completed_ && !exception_;
}

int MpiWork::sourceRank() const {
  TORCH_CHECK_WITH(ValueError,
                   opType_ == c10d::OpType::RECV || opType_ == c10d::OpType::RECVANYSOURCE,
                   plan_.name, " has no source rank: only a receive has");
  const std::lock_guard lock(mutex_);
  return source_;
}

std::vector<at::Tensor> MpiWork::result() {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK_WITH(ValueError, completed_, describe(), " has no result yet: wait for it first");
  return plan_.outputs;
}

void MpiWork::abort() {
  TORCH_CHECK_WITH(NotImplementedError, false, "MPI cannot abort a single operation");
}

bool MpiWork::wait(std::chrono::milliseconds timeout) {
  const auto longest = timeout == kNoTimeout ? timeout_ + kGrace : std::min(timeout, kLongest);
  std::function<void(std::vector<MPI_Request>&)> start;
  std::function<void()> finish;
  std::exception_ptr error;
  bool in_time = false;
  {
    std::unique_lock lock(mutex_);
    in_time = cv_.wait_for(lock, longest, [this] { return completed_; });
    error = exception_;
    if (in_time && !error) {
      // They hold copies of tensors; a caller may keep this work for long.
      start.swap(plan_.start);
      finish.swap(plan_.finish);
    }
  }
  Engine::get().drop_spent();
  if (error) std::rethrow_exception(error);
  TORCH_CHECK_WITH(DistBackendError, in_time, describe(), " has not ended in ", seconds(longest),
                   " s");
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> MpiWork::getFuture() {
  {
    const std::lock_guard lock(mutex_);
    if (future_) return future_;
    future_ =
        c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    if (!completed_) return future_;
  }
  settle_future();
  return future_;
}

void MpiWork::start(std::vector<MPI_Request>& requests) { plan_.start(requests); }

void MpiWork::settle(int code, const MPI_Status& status) {
  --requests_left;
  if (error_) return;
  if (code != MPI_SUCCESS) {
    error_ = backend_error(describe(), ": ", error_text(code));
  } else if (plan_.receive_type != MPI_DATATYPE_NULL) {
    int count = 0;
    MPI_Get_count(&status, plan_.receive_type, &count);
    source_ = status.MPI_SOURCE;
    if (count != plan_.receive_count) {
      error_ = backend_error(describe(), ": rank ", source_, " sent ", count,
                             " elements, but the tensor has ", plan_.receive_count);
    }
  }
}

void MpiWork::retire() {
  if (!error_ && plan_.finish && !isCompleted()) {
    try {
      plan_.finish();
    } catch (...) {
      error_ = std::current_exception();
    }
  }
  if (error_) return fail(error_);
  complete(nullptr);
}

void MpiWork::fail(std::exception_ptr error) {
  // Ranks no longer agree on what comes next in the group, except where two of them exchange.
  if (!c10d::isP2POp(opType_)) group_->fail(describe() + " failed");
  complete(std::move(error));
}

void MpiWork::fail_after_timeout() {
  fail(backend_error(describe(), " has not ended in ", seconds(timeout_),
                     " s; a rank died, or did not call it"));
}

void MpiWork::complete(std::exception_ptr error) {
  bool has_future = false;
  {
    const std::lock_guard lock(mutex_);
    if (completed_) return;
    completed_ = true;
    exception_ = std::move(error);
    has_future = static_cast<bool>(future_);
  }
  cv_.notify_all();
  if (has_future) Engine::get().settle_future(WorkPtr::reclaim_copy(this));
}

void MpiWork::settle_future() {
  if (exception_) return future_->setError(exception_);
  future_->markCompleted(c10::IValue(plan_.outputs));
}

std::string MpiWork::describe() const {
  return c10::str("MPI ", plan_.name, " #", sequence_, " of ", plan_.bytes, " bytes on rank ",
                  group_->rank(), " of ", group_->size(), " of group '", group_->name(), "'");
}

}  // namespace comm_core::mpi
