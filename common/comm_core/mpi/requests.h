// The operations under way. The progress thread's own; nothing here is locked.
#pragma once

#include <mpi.h>

#include <functional>
#include <vector>

#include "work.h"

namespace comm_core::mpi {

class Requests {
 public:
  // `retired` takes over each operation once MPI is done with its memory.
  explicit Requests(std::function<void(WorkPtr)> retired) : retired_(std::move(retired)) {}

  // Makes the MPI calls of `work`. An error becomes the work's.
  void begin(WorkPtr work);

  // Asks MPI once; retires what has ended. True if anything has.
  bool poll();

  // Fails the operations whose deadline is not after `now`. MPI cannot take a collective back, so
  // they stay here, with the memory they use, until it ends them.
  void expire(MpiWork::Clock::time_point now);

  bool empty() const { return works_.empty(); }
  size_t size() const { return works_.size(); }

 private:
  void abandon(int code);
  void retire_ended();

  std::function<void(WorkPtr)> retired_;
  std::vector<WorkPtr> works_;
  std::vector<MPI_Request> requests_;
  std::vector<MpiWork*> owners_;  // of each request
  std::vector<int> indices_;
  std::vector<MPI_Status> statuses_;
};

}  // namespace comm_core::mpi
