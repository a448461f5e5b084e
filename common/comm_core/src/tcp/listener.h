// Accepts connections and lets in only those that know the secret of a group of this process.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <unordered_map>

#include "tcp/link.h"

namespace comm_core {

class Listener : public Watcher {
 public:
  struct Entry {
    std::string secret;
    int size = 0;
    int rank = 0;
    std::function<void(const Hello&, Fd)> accept;
  };

  // Listens on `address`, whose port it fills in.
  Listener(Poller& poller, Address address, const SocketOptions& options);
  ~Listener() override;

  const Address& address() const { return address_; }
  void add_group(const Bytes16& id, Entry entry) { groups_[id] = std::move(entry); }
  void remove_group(const Bytes16& id) { groups_.erase(id); }

  void on_event() override;
  // Drops connections that are too slow to prove themselves. Returns when to call again, or < 0.
  double expire(double now_s);
  // Connections dropped as foreign, malformed or slow.
  uint64_t dropped() const { return dropped_; }

 private:
  class Guest;
  void drop(Guest* guest);
  void admit(Guest* guest);

  Poller& poller_;
  Address address_;
  Fd fd_;
  uint64_t id_;
  std::map<Bytes16, Entry> groups_;
  std::unordered_map<Guest*, std::unique_ptr<Guest>> guests_;
  uint64_t dropped_ = 0;
};

}  // namespace comm_core
