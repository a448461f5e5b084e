// Temporary memory of the stages of a group. Free blocks are kept for reuse, up to 8 MiB in total.
// Beyond that they are freed: a new allocation is cheap relative to so large a transfer, and kept
// memory would be missing for training.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

namespace comm_core {

// Pool of free blocks. Not thread-safe.
class ScratchPool {
 public:
  struct Block {
    std::unique_ptr<char[]> data;
    size_t bytes = 0;
  };

  // Returns a block of at least `bytes` bytes, which the caller owns until `give`.
  Block take(size_t bytes) {
    for (size_t i = 0; i < free_.size(); ++i) {
      if (free_[i].bytes >= bytes && free_[i].bytes <= 2 * bytes + 4096) {
        Block block = std::move(free_[i]);
        free_.erase(free_.begin() + long(i));
        held_ -= block.bytes;
        return block;
      }
    }
    return {std::unique_ptr<char[]>(new char[bytes]), bytes};
  }

  void give(Block block) {
    if (held_ + block.bytes > kMostHeld) return;
    held_ += block.bytes;
    free_.push_back(std::move(block));
  }

 private:
  static constexpr size_t kMostHeld = 8 << 20;
  std::vector<Block> free_;
  size_t held_ = 0;
};

// Block of a pool, returned to the pool on destruction. The pool must outlive it.
class Scratch {
 public:
  Scratch(ScratchPool& pool, size_t bytes) : pool_(pool), block_(pool.take(bytes)) {}
  ~Scratch() { pool_.give(std::move(block_)); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  char* data() const { return block_.data.get(); }

 private:
  ScratchPool& pool_;
  ScratchPool::Block block_;
};

}  // namespace comm_core
