// all_reduce between the ranks of one host, in rounds that stay in the caches: each rank stages its
// part of a round, folds the portion it owns, and the others copy the result out.
#pragma once

#include <vector>

#include "collectives/stage.h"
#include "shm/streams.h"

namespace comm_core {

struct ShmAllReducePlan {
  FrameHeader frame;
  DType dtype = DType::f32;
  ReduceOp op = ReduceOp::sum;
  ConstSpan input;
  Span output;          // may be the same memory
  int64_t divisor = 0;  // > 0: divide the result by it
  bool flat = false;    // one round; everybody folds everything: one hand-over instead of two
};

class ShmAllReduceStage : public Stage {
 public:
  ShmAllReduceStage(ShmStreams& streams, ShmAllReducePlan plan, std::vector<std::string> peers);
  Progress step() override;
  std::string status() const override;

 private:
  bool produce();
  bool fold();
  bool collect(int r);
  void check_frame(int w);
  void wait_check(int w) const;
  // Bytes of round j, and the portion of local rank r in it.
  size_t round_bytes(int64_t j) const;
  std::pair<size_t, size_t> portion(int64_t j, int r) const;

  ShmStreams& streams_;
  ShmAllReducePlan plan_;
  std::vector<std::string> peers_;
  int64_t rounds_;
  int64_t produced_ = 0, folded_ = 0;
  std::vector<int64_t> collected_;
};

}  // namespace comm_core
