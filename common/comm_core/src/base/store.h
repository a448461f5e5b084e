// Key-value store through which the ranks of a group exchange addresses before they are connected.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "base/errors.h"

namespace comm_core {

// Interface of the store. The caller of Group::create implements and owns it.
class Store {
 public:
  virtual ~Store() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  // Blocks until the key exists. Throws StoreError after the store's own timeout.
  virtual std::string get(const std::string& key) = 0;
  // Adds `amount` to an integer that is 0 initially, and returns the sum.
  virtual int64_t add(const std::string& key, int64_t amount) = 0;
  // Has no effect if the key does not exist.
  virtual void remove(const std::string& key) = 0;
};

// View of a store that adds a prefix to all keys. `all` must outlive it.
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
