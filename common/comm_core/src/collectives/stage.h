// A step of a collective as a state machine that the engine advances and that never blocks.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace comm_core {

enum class Progress { blocked, moved, done };

inline Progress progress(bool done, bool moved) {
  return done ? Progress::done : moved ? Progress::moved : Progress::blocked;
}

class Stage {
 public:
  virtual ~Stage() = default;
  // Moves at most one chunk each way, so that a more urgent operation soon gets its turn.
  virtual Progress step() = 0;
  // Whom it waits for and how far it is, for messages: "rank 2 (4096 of 8192 bytes received)".
  virtual std::string status() const = 0;
};

using Stages = std::vector<std::unique_ptr<Stage>>;

// Work of this rank alone, between two stages that communicate.
class LocalStage : public Stage {
 public:
  explicit LocalStage(std::function<void()> work) : work_(std::move(work)) {}
  Progress step() override {
    work_();
    return Progress::done;
  }
  std::string status() const override { return "nobody"; }

 private:
  std::function<void()> work_;
};

}  // namespace comm_core
