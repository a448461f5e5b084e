#include "transport/topology.h"

#include <algorithm>

#include "base/errors.h"
#include "base/text.h"

namespace comm_core {

std::string PeerInfo::serialize() const {
  return address.host() + "\n" + std::to_string(address.port()) + "\n" + std::to_string(pid) +
         "\n" + host_name + "\n" + host_id + "\n" + settings;
}

PeerInfo PeerInfo::parse(int rank, const std::string& text) {
  std::vector<std::string> lines = split(text, '\n');
  lines.resize(6);
  PeerInfo info;
  info.host_name = lines[3];
  info.host_id = lines[4];
  info.settings = lines[5];
  try {
    info.address = Address::parse(lines[0], std::stoi(lines[1]));
    info.pid = std::stoi(lines[2]);
  } catch (const std::exception&) {
    throw MismatchError("rank " + std::to_string(rank) +
                        " left a malformed address in the store: '" + text.substr(0, 100) + "'");
  }
  info.label = "rank " + std::to_string(rank) + " (host " + info.host_name + ", " +
               info.address.text() + ")";
  return info;
}

Topology Topology::of(const std::vector<PeerInfo>& peers) {
  Topology topology;
  std::vector<std::string> ids;
  for (int rank = 0; rank < int(peers.size()); ++rank) {
    const auto found = std::find(ids.begin(), ids.end(), peers[size_t(rank)].host_id);
    const size_t host = size_t(found - ids.begin());
    if (found == ids.end()) {
      ids.push_back(peers[size_t(rank)].host_id);
      topology.hosts.emplace_back();
    }
    topology.host_of.push_back(int(host));
    topology.local_rank.push_back(int(topology.hosts[host].size()));
    topology.hosts[host].push_back(rank);
  }
  return topology;
}

bool Topology::regular() const {
  return hosts[0].size() > 1 && std::all_of(hosts.begin(), hosts.end(), [&](const auto& ranks) {
           return ranks.size() == hosts[0].size();
         });
}

}  // namespace comm_core
