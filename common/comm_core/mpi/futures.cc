#include "futures.h"

#include <csignal>

namespace comm_core::mpi {

void block_signals() {
  sigset_t signals;
  sigfillset(&signals);
  for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) sigdelset(&signals, fault);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
}

void FutureThread::settle(WorkPtr work) {
  {
    const std::lock_guard lock(mutex_);
    if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
    queue_.push_back(std::move(work));
  }
  wake_.notify_one();
}

void FutureThread::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_one();
  if (thread_.joinable()) thread_.join();
}

void FutureThread::run() {
  block_signals();
  std::unique_lock lock(mutex_);
  while (true) {
    wake_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) return;
    std::vector<WorkPtr> works;
    works.swap(queue_);
    lock.unlock();
    for (WorkPtr& work : works) {
      work->settle_future();
      settled_(std::move(work));
    }
    works.clear();
    lock.lock();
  }
}

}  // namespace comm_core::mpi
