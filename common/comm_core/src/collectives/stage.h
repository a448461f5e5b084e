// A step of a collective as a state machine that the engine advances and that never blocks.
#pragma once

#include <algorithm>
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

// Work of this rank alone on bytes [begin, end) of `total`, a chunk at a time.
class PiecewiseStage : public Stage {
 public:
  static constexpr size_t kChunk = 1 << 20;

  PiecewiseStage(size_t total, std::function<void(size_t begin, size_t end)> work)
      : total_(total), work_(std::move(work)) {}
  Progress step() override {
    const size_t end = std::min(total_, done_ + kChunk);
    if (done_ < end) work_(done_, end);
    done_ = end;
    return done_ == total_ ? Progress::done : Progress::moved;
  }
  std::string status() const override { return "nobody"; }

 private:
  const size_t total_;
  std::function<void(size_t, size_t)> work_;
  size_t done_ = 0;
};

// The same, all at once: little, or only to keep something until then.
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
