// The thread that settles futures.
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "work.h"

namespace comm_core::mpi {

// A future's callbacks may be Python's, and wait for Python's lock: on the progress thread they
// would hold up every other operation. The thread starts with the first future.
class FutureThread {
 public:
  // `settled` takes over each operation whose future has been settled.
  explicit FutureThread(std::function<void(WorkPtr)> settled) : settled_(std::move(settled)) {}

  void settle(WorkPtr work);

  // Ends the thread once the queue is empty. Hold no lock that a callback may want.
  void stop();

 private:
  void run();

  std::function<void(WorkPtr)> settled_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<WorkPtr> queue_;
  bool stopping_ = false;
  std::thread thread_;
};

// Signals are for Python's main thread: its blocking calls would not notice one that a thread of
// ours took. Call it at the start of such a thread.
void block_signals();

}  // namespace comm_core::mpi
