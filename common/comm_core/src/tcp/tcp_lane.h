// Lanes over TCP: an authenticated connection, and one that this process opens with a handshake.
#pragma once

#include <string>

#include "io/fd.h"
#include "tcp/handshake.h"
#include "tcp/socket.h"
#include "transport/lane.h"

namespace comm_core {

// Lane over an open connection, which it owns.
class TcpLane : public Lane {
 public:
  TcpLane(Fd fd, std::string peer, const Watching& watching);
  using Lane::write;
  bool ready() override { return true; }
  size_t write(const iovec* parts, int num_parts) override;
  size_t read(void* data, size_t bytes) override;
  void wake_from(size_t bytes) override;
  void limit_unsent(size_t bytes) override;
  void ignore() override { watched_ = Watched(); }
  // Gives up the connection.
  Fd take() && {
    ignore();
    return std::move(fd_);
  }

 protected:
  explicit TcpLane(std::string peer) : Lane(std::move(peer)) {}

  Fd fd_;
  Watched watched_;
  size_t low_water_ = 1;
  size_t unsent_ = 0;  // limit of unsent bytes; 0: none
};

// Lane that connects and runs the handshake. The acceptor may close the connection before the end,
// if it has too many unauthenticated ones or this rank was too slow. Then the lane tries again, up
// to 20 times in all.
class ConnectingLane : public TcpLane {
 public:
  ConnectingLane(const LaneTarget& target, const SocketOptions& options, const Watching& watching);
  bool ready() override;

 private:
  enum class State { connecting, greeting, challenged, proving, doubting, ready };
  void begin();
  bool advance();

  const LaneTarget target_;
  const SocketOptions options_;
  const Watching watching_;
  Hello hello_;
  int tries_left_;
  State state_ = State::connecting;
  bool nobody_there_ = false;
  size_t done_ = 0;
  Bytes16 challenge_{};
  Digest proof_{}, answer_{};
};

}  // namespace comm_core
