// What a collective sees of its group: who the ranks are, and what connects them.
#pragma once

#include <string>
#include <vector>

#include "base/scratch.h"
#include "collectives/lanes/lanes.h"
#include "engine/options.h"
#include "shm/streams.h"
#include "transport/topology.h"

namespace comm_core {

// The ranks of this host, which share memory.
struct LocalRanks {
  ShmStreams& streams;
  std::vector<std::string> labels;  // by local rank
};

struct GroupView {
  int rank;
  const Options& options;
  const Topology& topology;
  Lanes& lanes;
  const LocalRanks* local;  // null without shared memory
  ScratchPool& scratch;
  int size() const { return lanes.size(); }
};

}  // namespace comm_core
