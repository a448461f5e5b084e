// Chooses the stages of a collective by its kind, its size and who is where.
#pragma once

#include "op.h"
#include "stage.h"

namespace comm_core {

class Group;

// All ranks of the group come to the same choice. Only in the engine.
Stages plan(Group& group, const OpSpec& spec, uint64_t sequence);

}  // namespace comm_core
