// Operations on data whose result is known exactly: small integers that differ by rank, position
// and operation.
#pragma once

#include <random>

#include "ranks.h"

namespace comm_core::testing {

// One operation that all ranks will submit.
struct Case {
  OpKind kind = OpKind::all_reduce;
  DType dtype = DType::f32;
  ReduceOp op = ReduceOp::sum;
  int root = 0;
  size_t count = 0;  // elements in total for all_reduce, broadcast and reduce, else in a block
  uint32_t salt = 0;
  bool in_place = false;
  bool uneven = false;  // reduce_scatter, all_gather, all_to_all: blocks differ in size
  int priority = 0;
  uint64_t shared =
      0;  // bit r: other ranks can map rank r's memory; bit 63: also that of all higher ranks
};

std::string describe(const Case& c);

// Draws a valid case for n ranks from `random`. With equal generators, all ranks draw the same.
Case draw(std::mt19937& random, int n);

// An operation in flight with its memory. `check` waits for it and compares every element.
class Running {
 public:
  virtual ~Running() = default;
  virtual void check() = 0;
};
std::unique_ptr<Running> start(Group& group, const Case& c);

}  // namespace comm_core::testing
