// Stage: a part of a collective, as a state machine that the engine advances and that never blocks.
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

// Used only by the thread that drives the engine.
class Stage {
 public:
  virtual ~Stage() = default;
  // Moves at most one chunk in each direction, so that a more urgent operation need not wait long.
  // Throws CommError, which fails the group.
  virtual Progress step() = 0;
  // Returns the awaited rank and the progress: "waiting for rank 2 (4096 of 8192 bytes received)".
  virtual std::string status() const = 0;
};

using Stages = std::vector<std::unique_ptr<Stage>>;

// Stage that calls `work` for bytes [begin, end) of `total`, chunk by chunk, without communication.
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

// Stage that calls `work` once: for short work, or only to keep objects alive until then.
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
