// File descriptors and addresses.
#pragma once

#include <netinet/in.h>

#include <string>
#include <utility>
#include <vector>

namespace comm_core {

class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  ~Fd() { reset(); }
  void reset();
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

// A numeric IPv4 or IPv6 address with a port.
struct Address {
  sockaddr_storage storage{};
  socklen_t length = 0;

  // Throws InvalidRequestError if `host` is not numeric.
  static Address parse(const std::string& host, int port);
  std::string host() const;
  int port() const;
  std::string text() const;  // "10.0.0.1:4242", "[fe80::1]:4242"
  bool is_loopback() const;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
};

struct Interface {
  std::string name;
  std::string address;
};

// All interfaces that are up and have an address, IPv4 first.
std::vector<Interface> interfaces();

// The address of interface `name`; throws InvalidRequestError with the names that exist.
std::string address_of_interface(const std::string& name);

// The address of this host that packets to `host` (a name or an address) leave from. Sends nothing.
std::string address_towards(const std::string& host);

struct SocketOptions {
  std::string congestion;  // empty: the system's
  int send_buffer = 0;     // bytes; 0: the system's, which grows by itself
  int receive_buffer = 0;
};

// A listening, non-blocking socket on `address`; the port is chosen by the system if 0. What it
// accepts has the buffers that `options` asks for.
Fd listen_on(Address& address, const SocketOptions& options);

// TCP_NODELAY, keep-alive, and what `options` asks for. Throws SystemError if a congestion control
// is not to be had.
void tune_socket(int fd, const SocketOptions& options);

}  // namespace comm_core
