// The thread that makes all MPI calls of this process.
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "futures.h"
#include "requests.h"
#include "work.h"

namespace comm_core::mpi {

// One per process. Operations come through a queue and are started in its order. While any is under
// way the thread polls MPI, first without pause, then with pauses that grow to half a millisecond;
// otherwise it sleeps. It never needs Python's lock: tensors that it has done with wait in a list
// until a caller's thread drops them.
class Engine {
 public:
  // Never destroyed: threads and destructors may come late.
  static Engine& get();

  // Starts MPI and the thread; does nothing if they run. Throws c10::DistBackendError if MPI does
  // not start, or has ended in this process before.
  void open();

  // Queues an operation. Throws c10::DistBackendError after `finalize`.
  void submit(WorkPtr work);

  // Runs `task` on the thread, waits for it, and throws what it throws. Not from the thread itself.
  void call(std::function<void()> task);

  // Runs `task` on the thread some time; drops it if the thread has ended. It must not throw.
  void post(std::function<void()> task);

  void settle_future(WorkPtr work) { futures_.settle(std::move(work)); }

  // Drops the tensors of ended operations. The caller must not be one of our threads.
  void drop_spent();

  // This process's number in MPI_COMM_WORLD, and how many there are.
  int world_rank() const { return world_rank_; }
  int world_size() const { return world_size_; }

  // Ends the thread and, if it began MPI, MPI; waits for the other processes to do so too. Where
  // operations are still under way after `grace`, or with `failed`, MPI is left running, so that
  // the launcher sees that this process did not end well. Returns the operations under way.
  size_t finalize(bool failed, std::chrono::milliseconds grace);

 private:
  enum class State { idle, running, ended };
  struct Item {
    WorkPtr work;
    std::function<void()> task;
  };

  Engine();
  void push(Item item);
  std::vector<Item> take();
  void run();
  void poll(bool has_news);
  void end();

  std::mutex open_mutex_;
  std::mutex mutex_;
  std::condition_variable wake_;
  State state_ = State::idle;
  std::vector<Item> queue_;
  std::vector<WorkPtr> spent_;
  std::thread thread_;
  FutureThread futures_;
  int world_rank_ = 0;
  int world_size_ = 0;

  // The thread's own.
  Requests requests_;
  bool owns_library_ = false;
  bool stopping_ = false;
  bool failed_ = false;
  MpiWork::Clock::time_point stop_at_;
  MpiWork::Clock::time_point last_news_;
  std::chrono::nanoseconds pause_{0};
};

}  // namespace comm_core::mpi
