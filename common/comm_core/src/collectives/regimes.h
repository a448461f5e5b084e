// Which algorithm a collective takes at which size, and where on a ring its blocks are cut.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/op.h"
#include "engine/options.h"

namespace comm_core {

// Up to here everybody sends to everybody in one hop; beyond, trees have fewer messages.
constexpr int kDirectRanks = 8;

// Whether blocks of an all_reduce, reduce_scatter or all_gather of so many bytes in all, too large
// for few hops, go straight from rank to rank: as many bytes and messages as on a ring, in one hop
// a block instead of P - 1. On two ranks both are the same.
bool blocks_go_straight(OpKind kind, int ranks, uint64_t bytes, const Options& options);

// On a ring of two nobody waits for pieces to be passed on: many at once save context switches.
constexpr size_t kPairPieces = 4;

// A sleeping rank of a ring is woken from so many bytes on, of blocks of up to `block` bytes. It
// passes on what it has then, so that the hops of one block overlap: a start-up is P - 2 pieces.
size_t ring_piece(uint64_t block, int places, const Options& options);

struct Regime {
  const char* name;  // direct, doubling, tree, two_hops; blocks, pieces, pipeline; shared_memory
  uint64_t first_bytes;  // of the whole operation: all ranks' blocks
  const char* setting;   // the environment variable that moves it; "" for the first
};

// Of all_reduce, reduce_scatter, all_gather (of equal blocks) and broadcast of `ranks` on `hosts`,
// as many on each, in ascending order. Throws InvalidRequestError for another operation, or where
// the hosts cannot have equally many.
std::vector<Regime> regimes(OpKind kind, int ranks, int hosts, const Options& options);

}  // namespace comm_core
