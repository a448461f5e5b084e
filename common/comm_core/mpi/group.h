// A communicator and what every operation in it must know.
#pragma once

#include <mpi.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>

namespace comm_core::mpi {

class Group {
 public:
  // Meets the other members at the options' store, then makes the communicator with them. All ranks
  // of MPI_COMM_WORLD if the options list no global ranks, else those. Throws
  // c10::DistBackendError if torch's ranks are not MPI's, a member does not come within the
  // options' timeout, or MPI fails.
  static std::shared_ptr<Group> open(const c10d::DistributedBackendOptions& options);

  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;
  ~Group() { close(); }

  // Ends the group for callers; what is under way goes on. A second call does nothing.
  void close();

  // Throws c10::DistBackendError, beginning with `operation`, if the group is closed or has failed.
  void check_usable(const char* operation) const;

  // No further operation is taken. The first reason is kept.
  void fail(const std::string& reason);

  // For the progress thread.
  MPI_Comm comm() const { return comm_; }

  const std::string& name() const { return name_; }
  int rank() const { return rank_; }
  int size() const { return size_; }
  int64_t largest_tag() const { return largest_tag_; }

  std::chrono::milliseconds timeout() const { return timeout_.load(); }
  void set_timeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }

 private:
  explicit Group(const c10d::DistributedBackendOptions& options);
  void check_ranks(const std::vector<int64_t>& global_ranks) const;
  void meet(c10d::Store& store) const;
  void make_communicator(const std::vector<int64_t>& global_ranks);

  const std::string name_;
  const int rank_;
  const int size_;
  std::atomic<std::chrono::milliseconds> timeout_;
  MPI_Comm comm_ = MPI_COMM_NULL;
  int64_t largest_tag_ = 32767;  // what the standard guarantees
  mutable std::mutex mutex_;
  bool closed_ = false;
  std::string failure_;
};

}  // namespace comm_core::mpi
