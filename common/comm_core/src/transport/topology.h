// Addresses of the ranks of a group, and the hosts that they share.
#pragma once

#include <string>
#include <vector>

#include "transport/address.h"

namespace comm_core {

// Description of a rank that it publishes to the others.
struct PeerInfo {
  std::string host_id;
  std::string host_name;
  Address address;
  int pid = 0;
  std::string settings;  // words NAME=VALUE, which must be equal on all ranks
  std::string label;     // "rank 3 (host b, 10.0.0.2:4242)"

  // Convert to and from the text in the store. `parse` throws MismatchError if it is malformed.
  std::string serialize() const;
  static PeerInfo parse(int rank, const std::string& text);
};

struct Topology {
  std::vector<std::vector<int>> hosts;  // ranks of each host, ascending; hosts by their first rank
  std::vector<int> host_of;             // rank -> index into `hosts`
  std::vector<int> local_rank;          // rank -> index within its host

  // Ranks with equal host_id share a host.
  static Topology of(const std::vector<PeerInfo>& peers);
  // Returns the ranks of the host of `rank`, including `rank`.
  const std::vector<int>& beside(int rank) const { return hosts[size_t(host_of[size_t(rank)])]; }
  bool one_host() const { return hosts.size() == 1; }
  // Returns whether all hosts have the same number of ranks, more than one.
  bool regular() const;
};

}  // namespace comm_core
