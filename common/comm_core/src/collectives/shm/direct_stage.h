// reduce_scatter, all_gather and all_reduce between the ranks of one host whose inputs all lie in
// shared buffers: everybody reads them where they are. Otherwise it hands over to a stage that
// copies.
#pragma once

#include <functional>
#include <vector>

#include "collectives/stage.h"
#include "shm/buffers.h"
#include "shm/streams.h"

namespace comm_core {

class ShmDirectStage : public Stage {
 public:
  // One way through the buffers; the next begins when all ranks have ended this one.
  struct Pass {
    // Does the work on bytes [begin, end) of `total`, given everybody's input.
    std::function<void(const std::vector<char*>& inputs, size_t begin, size_t end)> work;
    size_t total = 0;
    size_t chunk = 256 << 10;
  };
  struct Plan {
    FrameHeader frame;
    ConstSpan input;  // all of this rank's, one piece of memory; empty: not to be read in place
    std::vector<Pass> passes;
    std::function<std::unique_ptr<Stage>()> otherwise;
  };

  ShmDirectStage(ShmStreams& streams, PeerBuffers& buffers, Plan plan,
                 std::vector<std::string> peers);
  Progress step() override;
  std::string status() const override;

 private:
  // Rounds of words: where is your input; can everybody map everything; then one after each pass:
  // I have read all.
  static constexpr size_t kAnnounce = 0, kAgree = 1;
  size_t last_round() const { return kAgree + plan_.passes.size(); }
  bool publish();
  void hear(int r);

  ShmStreams& streams_;
  PeerBuffers& buffers_;
  Plan plan_;
  std::vector<std::string> peers_;
  size_t round_ = kAnnounce;
  bool published_ = false;
  std::vector<bool> heard_;
  std::vector<char*> inputs_;
  bool possible_ = true;        // as far as this rank has heard
  const Pass* pass_ = nullptr;  // under way
  size_t done_ = 0;             // of it
  std::unique_ptr<Stage> other_;
};

}  // namespace comm_core
