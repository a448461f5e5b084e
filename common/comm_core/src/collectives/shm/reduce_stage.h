// reduce_scatter and reduce between the ranks of one host: each rank stages the blocks of others in
// its stream; the owner of a block folds all of them, in rank order, into his output.
#pragma once

#include <vector>

#include "collectives/stage.h"
#include "shm/streams.h"

namespace comm_core {

struct ShmReducePlan {
  FrameHeader frame;
  DType dtype = DType::f32;
  ReduceOp op = ReduceOp::sum;
  std::vector<ConstSpan> inputs;  // of this rank: the block of each local rank; empty for nobody's
  std::vector<size_t> bytes;      // of each block, the same on all ranks
  Span output;                    // this rank's block, reduced; may be inputs[me]
  int64_t divisor = 0;            // > 0: divide the result by it
  bool streaming = false;
};

class ShmReduceStage : public Stage {
 public:
  ShmReduceStage(ShmStreams& streams, ShmReducePlan plan, std::vector<std::string> peers);
  Progress step() override;
  std::string status() const override;

 private:
  bool produce();
  bool consume();
  int64_t rounds_of(int writer) const;
  // The place of reader r among the portions of a slot of writer w.
  size_t place(int r, int w) const {
    return portion_ == streams_.slot_bytes() ? 0 : size_t(r < w ? r : r - 1) * portion_;
  }

  ShmStreams& streams_;
  ShmReducePlan plan_;
  std::vector<std::string> peers_;
  size_t portion_;
  int64_t my_rounds_ = 0, produced_ = 0;
  int64_t rounds_in_ = 0, consumed_ = 0;
};

}  // namespace comm_core
