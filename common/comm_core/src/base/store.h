// Where the ranks of a group leave each other notes while they get to know each other.
#pragma once

#include <string>

#include "base/errors.h"

namespace comm_core {

class Store {
 public:
  virtual ~Store() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  // Blocks until the key is there; throws when the store's own time-out ends.
  virtual std::string get(const std::string& key) = 0;
};

}  // namespace comm_core
