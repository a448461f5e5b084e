#include "planner.h"

#include "collectives.h"
#include "group.h"

namespace comm_core {

Stages plan(Group& group, const OpSpec& spec, uint64_t sequence) {
  FrameHeader frame;
  frame.kind = spec.kind;
  frame.dtype = spec.dtype;
  frame.op = spec.op;
  frame.root = spec.root;
  frame.sequence = sequence;
  frame.total_bytes = group.total_bytes(spec);
  if (group.size() == 1) return alone(spec);
  if (group.shm() != nullptr && group.topology().one_host()) return over_shm(group, spec, frame);
  const bool large = frame.total_bytes >= group.options().tcp_small;
  const bool two_levels = group.shm() != nullptr && group.topology().regular() && large;
  if (two_levels && (spec.kind == OpKind::all_reduce || spec.kind == OpKind::reduce_scatter ||
                     spec.kind == OpKind::all_gather)) {
    return over_both(group, spec, frame);
  }
  return over_tcp(group, spec, frame);
}

}  // namespace comm_core
