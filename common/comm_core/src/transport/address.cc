#include "transport/address.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>

#include <cstring>

#include "base/errors.h"
#include "io/fd.h"

namespace comm_core {

Address Address::parse(const std::string& host, int port) {
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) {
    throw InvalidRequestError("'" + host + "' is not a numeric address");
  }
  Address address;
  memcpy(&address.storage, found->ai_addr, found->ai_addrlen);
  address.length = found->ai_addrlen;
  freeaddrinfo(found);
  return address;
}

std::string Address::host() const {
  char text[NI_MAXHOST] = "?";
  getnameinfo(get(), length, text, sizeof text, nullptr, 0, NI_NUMERICHOST);
  return text;
}

int Address::port() const {
  if (storage.ss_family == AF_INET6) {
    return ntohs(reinterpret_cast<const sockaddr_in6*>(&storage)->sin6_port);
  }
  return ntohs(reinterpret_cast<const sockaddr_in*>(&storage)->sin_port);
}

std::string Address::text() const {
  const bool v6 = storage.ss_family == AF_INET6;
  return (v6 ? "[" + host() + "]" : host()) + ":" + std::to_string(port());
}

bool Address::is_loopback() const {
  const std::string text = host();
  return text == "::1" || text.rfind("127.", 0) == 0;
}

std::vector<Interface> interfaces() {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) throw_errno("getifaddrs");
  std::vector<Interface> v4, v6;
  for (ifaddrs* i = list; i != nullptr; i = i->ifa_next) {
    if (i->ifa_addr == nullptr || (i->ifa_flags & IFF_UP) == 0) continue;
    const int family = i->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    Address address;
    address.length = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    memcpy(&address.storage, i->ifa_addr, address.length);
    (family == AF_INET ? v4 : v6).push_back({i->ifa_name, address.host()});
  }
  freeifaddrs(list);
  v4.insert(v4.end(), v6.begin(), v6.end());
  return v4;
}

std::string address_of_interface(const std::string& name) {
  std::string known;
  for (const Interface& i : interfaces()) {
    if (i.name == name) return i.address;
    if (known.find(i.name) == std::string::npos) known += (known.empty() ? "" : ", ") + i.name;
  }
  throw InvalidRequestError("no interface '" + name + "' with an address; there are: " + known);
}

std::string address_towards(const std::string& host) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), "9", &hints, &found) != 0) {
    throw InvalidRequestError("cannot resolve host '" + host + "'");
  }
  std::string result;
  for (addrinfo* i = found; i != nullptr && result.empty(); i = i->ai_next) {
    Fd fd(socket(i->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    Address local;
    local.length = sizeof local.storage;
    if (fd && connect(fd.get(), i->ai_addr, i->ai_addrlen) == 0 &&
        getsockname(fd.get(), local.get(), &local.length) == 0) {
      result = local.host();
    }
  }
  freeaddrinfo(found);
  if (result.empty()) throw SystemError("no route to host '" + host + "'");
  return result;
}

}  // namespace comm_core
