// Who is where: which ranks of a group share a host.
#pragma once

#include <string>
#include <vector>

#include "transport/address.h"

namespace comm_core {

struct PeerInfo {
  std::string host_id;
  std::string host_name;
  Address address;
  int pid = 0;
  std::string settings;  // what all ranks must have alike: words NAME=VALUE
  std::string label;     // "rank 3 (host b, 10.0.0.2:4242)"

  // As left in the store for the others, and back. `parse` throws MismatchError on anything else.
  std::string serialize() const;
  static PeerInfo parse(int rank, const std::string& text);
};

struct Topology {
  std::vector<std::vector<int>> hosts;  // ranks of each host, ascending; hosts by their first rank
  std::vector<int> host_of;             // rank -> index into `hosts`
  std::vector<int> local_rank;          // rank -> place within its host

  static Topology of(const std::vector<PeerInfo>& peers);
  // The ranks of the host that `rank` is on, itself among them.
  const std::vector<int>& beside(int rank) const { return hosts[size_t(host_of[size_t(rank)])]; }
  bool one_host() const { return hosts.size() == 1; }
  // Every host has the same number of ranks, more than one.
  bool regular() const;
};

}  // namespace comm_core
