// reduce_scatter and all_gather between the ranks of one host whose inputs all lie in shared
// buffers: everybody reads them where they are. Otherwise it hands over to a stage that copies.
#pragma once

#include <functional>
#include <vector>

#include "shm/buffers.h"
#include "shm/streams.h"
#include "stage.h"

namespace comm_core {

class ShmDirectStage : public Stage {
 public:
  struct Plan {
    FrameHeader frame;
    ConstSpan input;                       // all of this rank's, one piece of memory
    // Does the work on bytes [begin, end) of the output, given everybody's input.
    std::function<void(const std::vector<const char*>& inputs, size_t begin, size_t end)> work;
    size_t total = 0;                      // of what `work` is called for
    size_t chunk = 256 << 10;
    std::function<std::unique_ptr<Stage>()> otherwise;
  };

  ShmDirectStage(ShmStreams& streams, PeerBuffers& buffers, Plan plan,
                 std::vector<std::string> peers);
  Progress step() override;
  std::string status() const override;

 private:
  // Three rounds: where is your input; can everybody map everything; I have read all.
  enum class Round { announce, agree, finish };
  bool publish(Round round);
  void hear(int r);

  ShmStreams& streams_;
  PeerBuffers& buffers_;
  Plan plan_;
  std::vector<std::string> peers_;
  Round round_ = Round::announce;
  bool published_ = false;
  std::vector<bool> heard_;
  std::vector<const char*> inputs_;
  bool possible_ = true;   // as far as this rank has heard
  bool working_ = false;
  size_t done_ = 0;
  std::unique_ptr<Stage> other_;
};

}  // namespace comm_core
