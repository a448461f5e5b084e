// Ranks as threads of one process, each with an engine and groups ("channels") of its own.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "group/group.h"

namespace comm_core::testing {

struct World {
  int size = 2;
  int channels = 1;
  int hosts = 1;          // ranks are dealt to so many pretended hosts, in blocks
  std::string transport;  // "", "tcp"
  double timeout_s = 60;
  Options options;
  std::shared_ptr<Store> store = nullptr;  // null: one of its own
};

struct Rank {
  int rank;
  int size;
  std::shared_ptr<Engine> engine;
  std::vector<std::shared_ptr<Group>> channels;
  std::function<void()> forget;  // lets go of all channels and of the engine, without a close
};

// Runs `body` on every rank; rethrows the first failure, with the rank in front.
void run_ranks(const World& world, const std::function<void(Rank&)>& body);

// Throws if `condition` is false.
void expect(bool condition, const std::string& what);

}  // namespace comm_core::testing
