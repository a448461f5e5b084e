// A connection of a group, watched while a collective runs.
#pragma once

#include <memory>
#include <utility>

#include "engine/poller.h"
#include "tcp/link.h"

namespace comm_core {

struct Connection {
  Connection(Poller& p, std::unique_ptr<Link> l) : poller(p), link(std::move(l)) {
    id = poller.add(link->fd(), Watch::when_active, nullptr);
  }
  ~Connection() { poller.remove(id, link->fd(), Watch::when_active); }
  Poller& poller;
  std::unique_ptr<Link> link;
  uint64_t id;
};

}  // namespace comm_core
