// Operations on data whose right result is known exactly: small integers, distinct per rank,
// position and operation.
#pragma once

#include <random>

#include "ranks.h"

namespace comm_core::testing {

// One operation as all ranks will submit it.
struct Case {
  OpKind kind = OpKind::all_reduce;
  DType dtype = DType::f32;
  ReduceOp op = ReduceOp::sum;
  int root = 0;
  size_t count = 0;  // elements: of the whole for all_reduce, broadcast and reduce, else a block's
  uint32_t salt = 0;
  bool in_place = false;
  bool uneven = false;  // reduce_scatter, all_gather, all_to_all: blocks differ in size
  int priority = 0;
  uint64_t shared =
      0;  // bit r: rank r's memory can be mapped by the others; the last: from there on
};

std::string describe(const Case& c);

// A case that makes sense for n ranks, drawn from `random`; every rank draws the same.
Case draw(std::mt19937& random, int n);

// An operation under way with its memory. `check` waits for it and compares every element.
class Running {
 public:
  virtual ~Running() = default;
  virtual void check() = 0;
};
std::unique_ptr<Running> start(Group& group, const Case& c);

}  // namespace comm_core::testing
