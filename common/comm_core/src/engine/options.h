// Options that a user may set by the environment variables COMM_CORE_* (named in options.cc).
#pragma once

#include <cstddef>
#include <string>

#include "transport/socket_options.h"

namespace comm_core {

enum class TransportChoice { automatic, tcp, shm };

struct Options {
  TransportChoice transport = TransportChoice::automatic;
  std::string interface;        // empty: the interface of the route to the rendezvous host
  std::string host_id;          // empty: host name + boot + network namespace
  bool allow_loopback = false;  // allow several "hosts" on one machine, for tests
  std::string secret;           // of the job, which is not in its store; empty: none
  SocketOptions sockets;
  // Sizes at which the algorithm changes, and sizes of chunks, all in bytes.
  size_t tcp_small = 32 << 10;  // all_reduce, reduce_scatter, ...: below this, direct exchange
  // With 3 to 8 ranks: below this, each block is sent directly to its rank.
  size_t tcp_direct = 256 << 10;
  size_t tcp_chunk = 256 << 10;  // moved per step and direction
  size_t tcp_eager = 16 << 10;   // messages up to this are sent before the receiver asks for them
  size_t shm_slot = 0;           // one round of one rank through shared memory; 0: chosen
  size_t shm_flat = 16 << 10;    // all_reduce: up to this, every rank sums everything
  size_t shm_direct = 64 << 10;  // from this, shared buffers are read in place
  size_t shm_stream = 4 << 20;   // outputs from this size bypass the caches

  // Factor by which an emulated network is slower than the one that it stands for.
  double time_scale = 1;

  // Returns the options that decide the algorithm of an operation and so must be equal on all
  // ranks, as "NAME=VALUE NAME=VALUE ...".
  std::string agreed() const;
  // Reads the environment. Throws InvalidRequestError for an invalid value or an unknown name.
  static Options from_environment();
};

// Returns the identity of this host: ranks with equal identities share memory. Throws SystemError.
std::string host_identity(const Options& options);
std::string host_name();  // "?" if unknown

}  // namespace comm_core
