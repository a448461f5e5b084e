// Sizes at which a collective changes its algorithm, and the size of the pieces on a ring.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/op.h"
#include "engine/options.h"

namespace comm_core {

// Up to this many ranks, every rank sends to every other in one hop. With more, an all_reduce uses
// recursive doubling, which needs fewer messages.
constexpr int kDirectRanks = 8;

// Returns whether the blocks of an all_reduce, reduce_scatter or all_gather of `bytes` bytes in
// total are sent directly from rank to rank in place of a ring. Both ways have equally many bytes
// and messages, but a block needs one hop instead of P - 1. On two ranks both are the same.
bool blocks_go_straight(OpKind kind, int ranks, uint64_t bytes, const Options& options);

// Chunks per piece on a ring of two, where no rank forwards pieces: large pieces save context
// switches.
constexpr size_t kPairPieces = 4;

// Returns the size of a piece in bytes, for blocks of up to `block` bytes on a ring of `places`
// ranks that move `chunk` bytes at a time. A sleeping rank is woken when so many bytes have
// arrived. It forwards them at once, so that the hops of a block overlap and the start-up time is
// that of P - 2 pieces.
size_t ring_piece(uint64_t block, int places, size_t chunk);

// Range of sizes with one algorithm.
struct Regime {
  const char* name;  // direct, doubling, tree, two_hops; blocks, pieces, pipeline; shared_memory
  uint64_t first_bytes;  // where it begins: bytes of the whole operation, all ranks' blocks
  const char* setting;   // the environment variable that moves first_bytes, or ""
};

// Returns the regimes of all_reduce, reduce_scatter, all_gather (of equal blocks) or broadcast in
// ascending order, for `ranks` ranks spread equally over `hosts` hosts. Throws InvalidRequestError
// for other operations, for fewer than two ranks, or if `hosts` does not divide `ranks`.
std::vector<Regime> regimes(OpKind kind, int ranks, int hosts, const Options& options);

}  // namespace comm_core
