#include "engine/options.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <utility>
#include <vector>

#include "base/errors.h"
#include "base/text.h"
#include "secret/sha256.h"

namespace comm_core {

namespace {

constexpr const char* kPrefix = "COMM_CORE_";

// The variables of this process. It remembers the names that were read, so no list repeats them.
class Environment {
 public:
  std::string text(const char* name) {
    names_.push_back(name);
    const char* value = getenv(name);
    return value == nullptr ? "" : value;
  }

  bool flag(const char* name) {
    const std::string value = text(name);
    if (!value.empty() && value != "0" && value != "1") {
      throw InvalidRequestError(std::string(name) + "=" + value + " must be 0 or 1");
    }
    return value == "1";
  }

  void read_bytes(const char* name, size_t& into, size_t least);
  void read_factor(const char* name, double& into);

  // Refuses variables of the core that were not read: a misspelled one would have no effect.
  void refuse_others() const {
    for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
      const std::vector<std::string> parts = split(*entry, '=');
      const std::string& name = parts[0];
      if (name.rfind(kPrefix, 0) != 0) continue;
      if (parts.size() < 2 || (parts.size() == 2 && parts[1].empty())) continue;  // like none
      // Kubernetes sets these in each container if a service is called comm-core.
      const bool of_service = name.rfind("COMM_CORE_SERVICE_", 0) == 0;
      if (of_service || name.rfind("COMM_CORE_PORT", 0) == 0) continue;
      if (std::find(names_.begin(), names_.end(), name) != names_.end()) continue;
      std::string known;
      for (const std::string& each : names_) known += (known.empty() ? "" : ", ") + each;
      throw InvalidRequestError("unknown variable " + name + "; the core reads " + known);
    }
  }

 private:
  std::vector<std::string> names_;
};

void Environment::read_bytes(const char* name, size_t& into, size_t least) {
  const std::string value = text(name);
  if (value.empty()) return;
  char* end = nullptr;
  const unsigned long long bytes = strtoull(value.c_str(), &end, 10);
  if (*end != '\0' || value[0] == '-' || bytes < least || bytes > (1ull << 30)) {
    throw InvalidRequestError(std::string(name) + "=" + value + " must be a number of bytes from " +
                              std::to_string(least) + " to 1073741824");
  }
  into = size_t(bytes);
}

void Environment::read_factor(const char* name, double& into) {
  const std::string value = text(name);
  if (value.empty()) return;
  char* end = nullptr;
  const double factor = strtod(value.c_str(), &end);
  if (*end != '\0' || !std::isfinite(factor) || factor <= 0) {
    throw InvalidRequestError(std::string(name) + "=" + value + " must be a number above 0");
  }
  into = factor;
}

constexpr size_t kLeastSecret = 16;

std::string content_of(const std::string& path) {
  if (path.empty()) return "";
  const std::string content = content_of_file(path);
  if (content.size() < kLeastSecret) {
    throw InvalidRequestError("COMM_CORE_SECRET_FILE=" + path +
                              " cannot be read or has less than " + std::to_string(kLeastSecret) +
                              " bytes");
  }
  return content;
}

// Returns a short digest by which ranks notice that their secrets differ. It is too short to reveal
// the secret.
std::string mark_of(const std::string& secret) {
  if (secret.empty()) return "none";
  const Digest digest = hmac_sha256(secret, "mark");
  char mark[9];
  snprintf(mark, sizeof mark, "%02x%02x%02x%02x", digest[0], digest[1], digest[2], digest[3]);
  return mark;
}

}  // namespace

Options Options::from_environment() {
  Options options;
  Environment environment;
  const std::string transport = environment.text("COMM_CORE_TRANSPORT");
  if (transport == "tcp") {
    options.transport = TransportChoice::tcp;
  } else if (transport == "shm") {
    options.transport = TransportChoice::shm;
  } else if (!transport.empty() && transport != "auto") {
    throw InvalidRequestError("COMM_CORE_TRANSPORT=" + transport + " must be auto, tcp or shm");
  }
  options.interface = environment.text("COMM_CORE_IFNAME");
  options.host_id = environment.text("COMM_CORE_HOST_ID");
  options.sockets.congestion = environment.text("COMM_CORE_TCP_CONGESTION");
  options.secret = content_of(environment.text("COMM_CORE_SECRET_FILE"));
  options.allow_loopback = environment.flag("COMM_CORE_ALLOW_LOOPBACK");
  size_t send_buffer = 0, receive_buffer = 0;
  environment.read_bytes("COMM_CORE_TCP_SEND_BUFFER", send_buffer, 0);
  environment.read_bytes("COMM_CORE_TCP_RECEIVE_BUFFER", receive_buffer, 0);
  options.sockets.send_buffer = int(send_buffer);
  options.sockets.receive_buffer = int(receive_buffer);
  environment.read_bytes("COMM_CORE_TCP_SMALL", options.tcp_small, 0);
  environment.read_bytes("COMM_CORE_TCP_DIRECT", options.tcp_direct, 0);
  environment.read_bytes("COMM_CORE_TCP_CHUNK", options.tcp_chunk, 4096);
  environment.read_bytes("COMM_CORE_TCP_EAGER", options.tcp_eager, 0);
  environment.read_bytes("COMM_CORE_SHM_SLOT", options.shm_slot, 4096);
  environment.read_bytes("COMM_CORE_SHM_FLAT", options.shm_flat, 0);
  environment.read_bytes("COMM_CORE_SHM_DIRECT", options.shm_direct, 0);
  environment.read_bytes("COMM_CORE_SHM_STREAM", options.shm_stream, 0);
  environment.read_factor("COMM_CORE_TIME_SCALE", options.time_scale);
  environment.refuse_others();
  return options;
}

std::string Options::agreed() const {
  constexpr const char* kTransports[] = {"auto", "tcp", "shm"};
  std::string text = std::string("COMM_CORE_TRANSPORT=") + kTransports[int(transport)] +
                     " COMM_CORE_SECRET_FILE=" + mark_of(secret);
  const std::pair<const char*, size_t> sizes[] = {
      {"TCP_SMALL", tcp_small}, {"TCP_DIRECT", tcp_direct}, {"TCP_EAGER", tcp_eager},
      {"SHM_FLAT", shm_flat},   {"SHM_DIRECT", shm_direct},
  };
  for (const auto& [name, bytes] : sizes) {
    text += std::string(" COMM_CORE_") + name + "=" + std::to_string(bytes);
  }
  return text;
}

std::string host_name() {
  char name[256] = "?";
  gethostname(name, sizeof name - 1);
  return name;
}

std::string host_identity(const Options& options) {
  if (!options.host_id.empty()) return options.host_id;
  // The host name distinguishes containers, the boot id machines of the same name, and the network
  // namespace virtual hosts of one machine.
  errno = 0;
  const std::string boot = split(content_of_file("/proc/sys/kernel/random/boot_id"), '\n')[0];
  // Without a boot id, no rank of the host has one. But a rank that is only out of descriptors must
  // not count as another host.
  if (boot.empty() && (errno == EMFILE || errno == ENFILE)) throw_errno("boot_id");
  struct stat net{};
  const bool known = stat("/proc/self/ns/net", &net) == 0;
  return host_name() + "/" + boot + "/" + (known ? std::to_string(net.st_ino) : "?");
}

}  // namespace comm_core
