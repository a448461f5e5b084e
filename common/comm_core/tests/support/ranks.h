// Ranks as threads of one process, each with its own engine and groups ("channels").
#pragma once

#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "check.h"
#include "group/group.h"

namespace comm_core::testing {

// A store for ranks that are threads of one process.
class MemoryStore : public Store {
 public:
  void set(const std::string& key, const std::string& value) override {
    std::lock_guard lock(mutex_);
    values_[key] = value;
    changed_.notify_all();
  }

  std::string get(const std::string& key) override {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return values_.count(key) > 0; });
    return values_[key];
  }

  int64_t add(const std::string& key, int64_t amount) override {
    std::lock_guard lock(mutex_);
    return numbers_[key] += amount;
  }

  void remove(const std::string& key) override {
    std::lock_guard lock(mutex_);
    values_.erase(key);
  }

  size_t size() {
    std::lock_guard lock(mutex_);
    return values_.size();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;
  std::map<std::string, int64_t> numbers_;
};

struct World {
  int size = 2;
  int channels = 1;
  int hosts = 1;          // number of simulated hosts; each gets a contiguous block of ranks
  std::string transport;  // "", "tcp"
  double timeout_s = 60;
  Options options;
  std::shared_ptr<Store> store = nullptr;                    // null: a new one
  std::function<void(int rank, Options&)> change = nullptr;  // changes the options of one rank
};

struct Rank {
  int rank;
  int size;
  std::shared_ptr<Engine> engine;
  std::vector<std::shared_ptr<Group>> channels;
  std::function<void()> forget;  // drops all channels and the engine without closing them
};

// Runs `body` on every rank. Throws std::runtime_error with the failures of all ranks, if any.
void run_ranks(const World& world, const std::function<void(Rank&)>& body);

}  // namespace comm_core::testing
