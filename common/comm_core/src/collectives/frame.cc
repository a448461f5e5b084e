#include "collectives/frame.h"

#include <iterator>

#include "transport/lane.h"

namespace comm_core {

const char* name(Way way) {
  constexpr const char* kNames[] = {"undecided", "flat", "staged",    "in_place",
                                    "few_hops",  "ring", "two_levels"};
  return size_t(way) < std::size(kNames) ? kNames[size_t(way)] : "an unknown algorithm";
}

std::string describe(const FrameHeader& h) {
  return describe(h.kind, h.dtype, h.op, h.root, h.sequence, h.total_bytes);
}

void check_header(const FrameHeader& mine, const FrameHeader& theirs, const std::string& peer) {
  if (theirs.magic != kFrameMagic) {
    throw MismatchError("malformed header from " + peer);
  }
  const bool uneven = mine.kind == OpKind::all_to_all;  // totals may differ, payloads must not
  const bool same = mine.kind == theirs.kind && mine.dtype == theirs.dtype &&
                    mine.op == theirs.op && mine.root == theirs.root &&
                    mine.sequence == theirs.sequence && mine.stage == theirs.stage &&
                    (uneven || mine.total_bytes == theirs.total_bytes);
  if (!same) {
    throw MismatchError("the ranks disagree: here " + describe(mine) + ", " + peer + " called " +
                        describe(theirs));
  }
  if (mine.way != theirs.way) {
    throw MismatchError("the ranks disagree: " + describe(mine) + " uses algorithm " +
                        name(mine.way) + " here and " + name(theirs.way) + " at " + peer);
  }
  if (mine.payload_bytes != theirs.payload_bytes) {
    throw MismatchError("the ranks disagree: in " + describe(mine) + " this rank expects " +
                        std::to_string(mine.payload_bytes) + " bytes from " + peer +
                        ", which sends " + std::to_string(theirs.payload_bytes));
  }
  if (mine.blocks != theirs.blocks) {
    throw MismatchError("the ranks disagree: the blocks of " + describe(mine) +
                        " have other sizes here than at " + peer);
  }
}

bool FrameReader::expect(Lane& lane, FrameHeader mine, uint64_t bytes) {
  if (!lane.fill(&header_, sizeof header_, have_)) return false;
  mine.payload_bytes = bytes;
  check_header(mine, header_, lane.peer());
  return true;
}

}  // namespace comm_core
