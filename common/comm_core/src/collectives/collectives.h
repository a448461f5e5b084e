// The stages of every collective, over each kind of connection.
#pragma once

#include "collectives/stage.h"
#include "engine/op.h"
#include "tcp/wire.h"

namespace comm_core {

class Group;

// Chooses the stages of a collective by its kind, its size and who is where. All ranks of the group
// come to the same choice. Only in the engine.
Stages plan(Group& group, const OpSpec& spec, uint64_t sequence);

// One rank: a copy.
Stages alone(const OpSpec& spec);
// All ranks on one host.
Stages over_shm(Group& group, const OpSpec& spec, const FrameHeader& frame);
// Every rank connected with every other by TCP, wherever it is.
Stages over_tcp(Group& group, const OpSpec& spec, const FrameHeader& frame);
// The same number of ranks on each host: shared memory inside, a ring of hosts for each local rank.
Stages over_both(Group& group, const OpSpec& spec, const FrameHeader& frame);

// `total` elements cut into n blocks as equal as can be.
struct Cut {
  size_t begin = 0;  // bytes
  size_t bytes = 0;
};
Cut cut(size_t total_bytes, size_t element, int n, int i);

}  // namespace comm_core
