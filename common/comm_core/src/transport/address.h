// Addresses, and those of this host.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <string>
#include <vector>

namespace comm_core {

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

}  // namespace comm_core
