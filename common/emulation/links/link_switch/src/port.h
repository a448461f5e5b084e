// The switch's end of one host's cable: a packet socket on a veth device, which gives and takes
// super-packets whole and says when the kernel sent each. It receives into a ring, for which an
// ordinary user may have all the memory that a moment without this program takes, and from which
// large packets are sent without another copy. The kernel fills the slots of the ring in turn, and
// drops what comes while the next one is taken: so half a ring before that, what still lies in one
// is copied out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "packet.h"

namespace link_switch {

class Port final : public Memory::Lender {
 public:
  struct Received {
    Packet packet;
    int64_t sent_at;  // CLOCK_REALTIME, ns
  };

  // Room for at least so many packets, which must not outlive it. Throws std::system_error if there
  // is no such device, or it may not be used.
  Port(const std::string& device, size_t packets);
  Port(const Port&) = delete;
  ~Port();

  int fd() const { return fd_; }
  // nullopt: nothing is there now.
  std::optional<Received> receive();
  // The cable was pulled out, which epoll tells again and again.
  void forget_error();
  // False if the cable is out, or the kernel has no memory for it.
  bool send(const Packet& packet);
  void give_back(const Memory& lent) override;
  // Packets that the kernel dropped, because this program did not take them in time, since it was
  // asked last.
  uint64_t missed();

 private:
  uint8_t* slot(size_t number) const;
  size_t slots() const { return lent_.size(); }

  int fd_;
  uint8_t* ring_ = nullptr;
  size_t blocks_, next_ = 0;
  std::vector<Memory*> lent_;  // what lies in each slot, if a packet does
};

}  // namespace link_switch
