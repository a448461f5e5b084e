// Runs named tests in order: all, or those whose names contain the first argument.
#pragma once

#include <condition_variable>
#include <cstdio>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "ranks.h"

namespace comm_core::testing {

struct Test {
  const char* name;
  std::function<void()> body;
};

inline int run_tests(int argc, char** argv, const std::vector<Test>& tests) {
  int failures = 0;
  for (const Test& test : tests) {
    if (argc > 1 && std::string(test.name).find(argv[1]) == std::string::npos) continue;
    printf("%s: ", test.name);
    fflush(stdout);
    const double began = now_s();
    std::string error;
    try {
      test.body();
    } catch (const std::exception& e) {
      error = e.what();
    }
    printf("%s (%.2f s)%s\n", error.empty() ? "right" : "FAILED", now_s() - began, error.c_str());
    failures += !error.empty();
  }
  printf("%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}

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

template <typename E>
bool is(const std::exception_ptr& error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const E&) {
    return true;
  } catch (...) {
  }
  return false;
}

inline void expect_text(const std::string& text, const std::string& part) {
  expect(text.find(part) != std::string::npos, "'" + part + "' is not in: " + text);
}

}  // namespace comm_core::testing
