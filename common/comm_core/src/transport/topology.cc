#include "transport/topology.h"

#include <algorithm>
#include <sstream>

#include "base/errors.h"

namespace comm_core {

std::string PeerInfo::serialize() const {
  return address.host() + "\n" + std::to_string(address.port()) + "\n" + std::to_string(pid) +
         "\n" + host_name + "\n" + host_id + "\n" + settings;
}

PeerInfo PeerInfo::parse(int rank, const std::string& text) {
  std::istringstream lines(text);
  std::string host, port, pid;
  PeerInfo info;
  std::getline(lines, host);
  std::getline(lines, port);
  std::getline(lines, pid);
  std::getline(lines, info.host_name);
  std::getline(lines, info.host_id);
  std::getline(lines, info.settings);
  try {
    info.address = Address::parse(host, std::stoi(port));
    info.pid = std::stoi(pid);
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
