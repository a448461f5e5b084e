// Where the ranks of a group leave each other notes while they get to know each other.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "base/errors.h"

namespace comm_core {

class Store {
 public:
  virtual ~Store() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  // Blocks until the key is there; throws when the store's own time-out ends.
  virtual std::string get(const std::string& key) = 0;
  // Adds to a number, 0 at first, and returns the sum.
  virtual int64_t add(const std::string& key, int64_t amount) = 0;
  // Nothing if the key is not there.
  virtual void remove(const std::string& key) = 0;
};

// The notes under a prefix.
class NotesUnder : public Store {
 public:
  NotesUnder(Store& all, std::string prefix) : all_(all), prefix_(std::move(prefix)) {}
  void set(const std::string& key, const std::string& value) override {
    all_.set(prefix_ + key, value);
  }
  std::string get(const std::string& key) override { return all_.get(prefix_ + key); }
  int64_t add(const std::string& key, int64_t amount) override {
    return all_.add(prefix_ + key, amount);
  }
  void remove(const std::string& key) override { all_.remove(prefix_ + key); }

 private:
  Store& all_;
  const std::string prefix_;
};

}  // namespace comm_core
