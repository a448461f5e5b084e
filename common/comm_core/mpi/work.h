// One operation, as torch.distributed sees it.
#pragma once

#include <mpi.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

namespace comm_core::mpi {

class Group;

// What an operation does. Both functions run on the progress thread, which has no Python lock.
struct Plan {
  c10d::OpType op_type = c10d::OpType::UNKNOWN;
  std::string name;
  int64_t bytes = 0;
  std::vector<at::Tensor> outputs;
  // Makes the MPI calls and appends their requests.
  std::function<void(std::vector<MPI_Request>&)> start;
  // Once all requests have ended well: brings the results into `outputs`. May be empty.
  std::function<void()> finish;
  // Receives only: the elements expected, to compare with what came.
  MPI_Datatype receive_type = MPI_DATATYPE_NULL;
  int receive_count = 0;
};

class MpiWork : public c10d::Work {
 public:
  using Clock = std::chrono::steady_clock;

  MpiWork(std::shared_ptr<Group> group, Plan plan, uint64_t sequence,
          std::chrono::milliseconds timeout);

  bool isCompleted() override;
  bool isSuccess() const override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override;
  uint64_t getSequencenumber() const override { return sequence_; }
  void synchronize() override { wait(); }
  void abort() override;

  // Blocks until the operation has ended. Without a timeout of its own the operation's applies.
  // Throws what the operation failed of, or c10::DistBackendError when `timeout` is over; the
  // operation is then still under way, and may be waited for again.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;

  // Ends with the operation; its value is the list of output tensors. Its callbacks run on a thread
  // that does nothing else, since they may need Python's lock.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

  // The rest is the progress thread's.

  // Makes the MPI calls.
  void start(std::vector<MPI_Request>& requests);

  // One request has ended, with an MPI error code or MPI_SUCCESS.
  void settle(int code, const MPI_Status& status);

  // All requests have ended: brings the results home and lets waiters go.
  void retire();

  // Ends the operation with `error`, unless it has ended already.
  void fail(std::exception_ptr error);
  void fail_after_timeout();

  // Settles the future, on the thread for futures.
  void settle_future();

  Clock::time_point deadline() const { return deadline_; }

  // Requests of this operation that have not ended.
  int requests_left = 0;

 private:
  void complete(std::exception_ptr error);
  std::string describe() const;

  const std::shared_ptr<Group> group_;
  Plan plan_;
  const uint64_t sequence_;
  const std::chrono::milliseconds timeout_;
  const Clock::time_point deadline_;
  std::exception_ptr error_;
  int source_ = -1;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

using WorkPtr = c10::intrusive_ptr<MpiWork>;

}  // namespace comm_core::mpi
