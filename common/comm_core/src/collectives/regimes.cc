#include "collectives/regimes.h"

#include <algorithm>
#include <string>

#include "base/errors.h"

namespace comm_core {
namespace {

// Least bytes of a piece. Smaller pieces cost more in wake-ups than they save in waiting time.
// Larger ones leave a link idle while a block waits to be forwarded (`bench/collectives.py` prints
// the time above that of the wire).
constexpr size_t kLeastPiece = 16 << 10;
// Pieces per block, if the block is shorter than 8 of the longest pieces. Then a block is delayed
// by only 1/8 of itself at each rank, and a rank is woken at most 8 times per block.
constexpr size_t kPiecesOfBlock = 8;

size_t longest_piece(size_t chunk) { return chunk / 2; }
size_t least_piece(size_t chunk) { return std::min(kLeastPiece, longest_piece(chunk)); }

}  // namespace

size_t ring_piece(uint64_t block, int places, size_t chunk) {
  if (places == 2) return kPairPieces * chunk;
  return std::clamp(size_t(block / kPiecesOfBlock), least_piece(chunk), longest_piece(chunk));
}

bool blocks_go_straight(OpKind kind, int ranks, uint64_t bytes, const Options& options) {
  const bool has_blocks =
      kind == OpKind::all_reduce || kind == OpKind::reduce_scatter || kind == OpKind::all_gather;
  return has_blocks && ranks > 2 && ranks <= kDirectRanks && bytes >= options.tcp_small &&
         bytes < options.tcp_direct;
}

std::vector<Regime> regimes(OpKind kind, int ranks, int hosts, const Options& options) {
  const bool broadcasts = kind == OpKind::broadcast;
  if (!broadcasts && kind != OpKind::all_reduce && kind != OpKind::reduce_scatter &&
      kind != OpKind::all_gather) {
    throw InvalidRequestError(std::string(name(kind)) + " has no regimes");
  }
  if (ranks < 2 || hosts < 1 || ranks % hosts != 0) {
    throw InvalidRequestError(std::to_string(ranks) + " ranks on " + std::to_string(hosts) +
                              " hosts: must be at least two ranks, equally many per host");
  }
  const bool tcp = options.transport == TransportChoice::tcp;
  if (hosts == 1 && !tcp) return {{"shared_memory", 0, ""}};
  const bool doubles = kind == OpKind::all_reduce && ranks > kDirectRanks;
  std::vector<Regime> result{{broadcasts ? "tree" : doubles ? "doubling" : "direct", 0, ""}};
  // With shared memory inside the hosts, each local rank has its own ring through the hosts.
  const int places = broadcasts || tcp ? ranks : hosts;
  const uint64_t blocks = broadcasts ? 1 : uint64_t(ranks);
  const size_t least = least_piece(options.tcp_chunk), longest = longest_piece(options.tcp_chunk);
  result.push_back({"blocks", 0, ""});
  if (places == 2) {
    result.push_back({"pipeline", blocks * kPairPieces * options.tcp_chunk, "COMM_CORE_TCP_CHUNK"});
  } else {
    if (least < longest) result.push_back({"pieces", blocks * 2 * least, ""});
    result.push_back({"pipeline", blocks * (least < longest ? kPiecesOfBlock * longest : 2 * least),
                      "COMM_CORE_TCP_CHUNK"});
  }
  const bool straight =
      (tcp || hosts == ranks) && blocks_go_straight(kind, ranks, options.tcp_small, options);
  const size_t ring_from = straight ? options.tcp_direct : options.tcp_small;
  // The ring's first regime is the last of those that would begin at or below `ring_from`.
  while (result.size() > 2 && result[2].first_bytes <= ring_from) {
    result.erase(result.begin() + 1);
  }
  result[1].first_bytes = ring_from;
  result[1].setting = straight ? "COMM_CORE_TCP_DIRECT" : "COMM_CORE_TCP_SMALL";
  // reduce_scatter and all_gather use direct exchange for all smaller sizes.
  const bool in_two_hops = straight && kind == OpKind::all_reduce;
  if (in_two_hops) {
    result.insert(result.begin() + 1, {"two_hops", options.tcp_small, "COMM_CORE_TCP_SMALL"});
  }
  if (result[1].first_bytes == 0) result.erase(result.begin());
  return result;
}

}  // namespace comm_core
