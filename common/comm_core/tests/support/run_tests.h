// What the tests of whole groups share.
#pragma once

#include <condition_variable>
#include <mutex>
#include <string>

#include "check.h"
#include "ranks.h"

namespace comm_core::testing {

// The kinds of connections between ranks: shared memory, TCP, both.
struct Wiring {
  const char* transport;
  int hosts;
};
inline const Wiring kWirings[] = {{"", 1}, {"tcp", 1}, {"", 2}};

inline World wired(const Wiring& wiring, int size) {
  World world;
  world.size = size;
  world.transport = wiring.transport;
  world.hosts = wiring.hosts;
  world.timeout_s = 20;
  return world;
}

// A wait that takes longer counts as a hang, even on a busy machine.
constexpr int kHangsS = 60;

// A barrier for the ranks.
class Together {
 public:
  explicit Together(int size) : size_(size) {}
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    const int round = arrived_++ / size_;
    changed_.notify_all();
    expect(changed_.wait_for(lock, std::chrono::seconds(kHangsS),
                             [&] { return arrived_ >= (round + 1) * size_; }),
           "other ranks hang");
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  const int size_;
  int arrived_ = 0;
};

// Waits for the operation and returns the text of its error, or "". Throws if it hangs.
inline std::string error_of(const OpPtr& op) {
  expect(op->wait(kHangsS), op->describe() + " hangs");
  return op->error() ? message_of(op->error()) : "";
}

}  // namespace comm_core::testing
