// What a user may set, from the environment variables COMM_CORE_* (see options.cc for each).
#pragma once

#include <cstddef>
#include <string>

#include "transport/socket_options.h"

namespace comm_core {

enum class TransportChoice { automatic, tcp, shm };

struct Options {
  TransportChoice transport = TransportChoice::automatic;
  std::string interface;        // empty: the one towards the rendezvous
  std::string host_id;          // empty: host name + boot + network namespace
  bool allow_loopback = false;  // several "hosts" on one machine, for tests
  std::string secret;           // of the job, that its store does not know; empty: there is none
  SocketOptions sockets;
  // Sizes from which a larger-message algorithm is taken, and chunk sizes; all in bytes.
  size_t tcp_small = 32 << 10;  // all_reduce, reduce_scatter, ...: below this, direct exchange
  // Of 3 to 8 ranks: below this, each block goes straight to its rank.
  size_t tcp_direct = 256 << 10;
  size_t tcp_chunk = 256 << 10;  // moved per step and direction
  size_t tcp_eager = 16 << 10;   // messages up to this go before the receiver asks
  size_t shm_slot = 0;           // one round of one rank through shared memory; 0: by itself
  size_t shm_flat = 16 << 10;    // all_reduce: below this, everybody sums everything
  size_t shm_direct = 64 << 10;  // shared buffers: from this size read in place
  size_t shm_stream = 4 << 20;   // outputs from this size bypass the caches

  // What decides which way an operation goes, and so must be the same on all ranks: NAME=VALUE ...
  std::string agreed() const;
  // Throws InvalidRequestError on a value that is none.
  static Options from_environment();
};

// Ranks with equal identities share memory.
std::string host_identity(const Options& options);
std::string host_name();

}  // namespace comm_core
