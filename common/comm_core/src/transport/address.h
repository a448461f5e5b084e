// Network addresses, and the interfaces of this host.
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

  // Parses a numeric host without resolving names. Throws InvalidRequestError if it is not numeric.
  static Address parse(const std::string& host, int port);
  std::string host() const;
  int port() const;
  std::string text() const;  // "10.0.0.1:4242", "[fe80::1]:4242"
  bool is_loopback() const;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
};

// Network interface with one of its addresses.
struct Interface {
  std::string name;
  std::string address;
};

// Returns the interfaces that are up and have an address, IPv4 first. Throws SystemError.
std::vector<Interface> interfaces();

// Returns the address of interface `name`. Throws InvalidRequestError, which lists the interfaces.
std::string address_of_interface(const std::string& name);

// Returns the local address that packets to `host` (a name or an address) are sent from. Sends
// nothing. Throws InvalidRequestError if `host` cannot be resolved, SystemError without a route.
std::string address_towards(const std::string& host);

}  // namespace comm_core
