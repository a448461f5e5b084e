#include "port.h"

#include <arpa/inet.h>
#include <linux/if_packet.h>
#include <net/ethernet.h>
#include <net/if.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace link_switch {
namespace {

// A slot of the ring has the largest packet and its description; 15 of them are a block.
constexpr size_t kBlockBytes = 1 << 20, kSlotsPerBlock = 15;
constexpr size_t kSlotBytes = kBlockBytes / kSlotsPerBlock / TPACKET_ALIGNMENT * TPACKET_ALIGNMENT;
// A smaller packet is copied: a slot is as dear for 66 bytes as for 64 KiB.
constexpr size_t kSmallBytes = 4096;
// Of a slot that is neither the kernel's nor to be read.
constexpr unsigned kLent = 1U << 28;
static_assert((kLent & (TP_STATUS_USER | TP_STATUS_KERNEL)) == 0);
static_assert(kSlotBytes >= Packet::kMaxBytes + TPACKET2_HDRLEN + 64);

[[noreturn]] void fail(const std::string& what) {
  throw std::system_error(errno, std::generic_category(), what);
}

template <typename T>
void set(int fd, int option, const T& value, const char* what) {
  if (setsockopt(fd, SOL_PACKET, option, &value, sizeof value) != 0) fail(what);
}

}  // namespace

Port::Port(const std::string& device, size_t packets)
    // Protocol 0: it receives nothing before it is bound, when its options are set.
    : fd_(socket(AF_PACKET, SOCK_RAW | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)),
      blocks_((packets + kSlotsPerBlock - 1) / kSlotsPerBlock),
      lent_(blocks_ * kSlotsPerBlock) {
  if (fd_ < 0) fail("a packet socket");
  set(fd_, PACKET_VERSION, int{TPACKET_V2}, "PACKET_VERSION");
  set(fd_, PACKET_VNET_HDR, 1, "PACKET_VNET_HDR");
  set(fd_, PACKET_IGNORE_OUTGOING, 1, "PACKET_IGNORE_OUTGOING");
  set(fd_, PACKET_QDISC_BYPASS, 1, "PACKET_QDISC_BYPASS");
  const auto blocks = static_cast<unsigned>(blocks_);
  const tpacket_req ring{kBlockBytes, blocks, kSlotBytes, blocks * unsigned{kSlotsPerBlock}};
  set(fd_, PACKET_RX_RING, ring, "PACKET_RX_RING");
  void* memory = mmap(nullptr, blocks_ * kBlockBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
  if (memory == MAP_FAILED) fail("the memory of a ring");
  ring_ = static_cast<uint8_t*>(memory);
  sockaddr_ll address{};
  address.sll_family = AF_PACKET;
  address.sll_protocol = htons(ETH_P_ALL);
  address.sll_ifindex = static_cast<int>(if_nametoindex(device.c_str()));
  if (address.sll_ifindex == 0) fail(device);
  if (bind(fd_, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) fail(device);
}

Port::~Port() {
  if (ring_ != nullptr) munmap(ring_, blocks_ * kBlockBytes);
  if (fd_ >= 0) close(fd_);
}

uint8_t* Port::slot(size_t number) const {
  return ring_ + number / kSlotsPerBlock * kBlockBytes + number % kSlotsPerBlock * kSlotBytes;
}

void Port::give_back(const Memory& lent) {
  const auto offset = static_cast<size_t>(lent.data() - ring_);
  const size_t number = offset / kBlockBytes * kSlotsPerBlock + offset % kBlockBytes / kSlotBytes;
  auto* const header = reinterpret_cast<tpacket2_hdr*>(slot(number));
  std::atomic_ref(header->tp_status).store(TP_STATUS_KERNEL, std::memory_order_release);
  lent_[number] = nullptr;
}

std::optional<Port::Received> Port::receive() {
  uint8_t* const at = slot(next_);  // the kernel fills them in turn
  auto* const header = reinterpret_cast<tpacket2_hdr*>(at);
  std::atomic_ref status(header->tp_status);
  if ((status.load(std::memory_order_acquire) & TP_STATUS_USER) == 0) return std::nullopt;
  const size_t bytes = Packet::kHeaderBytes + header->tp_snaplen;
  if (header->tp_snaplen < header->tp_len || header->tp_len < sizeof(ether_header)) {
    throw std::runtime_error("a packet of " + std::to_string(header->tp_len) + " bytes");
  }
  uint8_t* const begin = at + header->tp_mac - Packet::kHeaderBytes;
  const int64_t sent_at = header->tp_sec * int64_t{1'000'000'000} + header->tp_nsec;
  std::unique_ptr<Memory> memory;
  if (bytes > kSmallBytes) {
    status.store(kLent, std::memory_order_relaxed);
    memory = std::make_unique<Memory>(begin, bytes, *this);
    lent_[next_] = memory.get();
  } else {
    memory = std::make_unique<Memory>(bytes);
    std::memcpy(memory->data(), begin, bytes);
    status.store(TP_STATUS_KERNEL, std::memory_order_release);
  }
  if (Memory* const in_the_way = lent_[(next_ + slots() / 2) % slots()]) in_the_way->keep();
  next_ = (next_ + 1) % slots();
  return Received{Packet(std::move(memory)), sent_at};
}

void Port::forget_error() {
  int error = 0;
  socklen_t length = sizeof error;
  if (getsockopt(fd_, SOL_SOCKET, SO_ERROR, &error, &length) != 0) fail("a packet socket");
}

bool Port::send(const Packet& packet) {
  while (::send(fd_, packet.data(), packet.bytes(), 0) < 0) {
    if (errno == EINTR) continue;
    if (errno == ENETDOWN || errno == ENOBUFS || errno == ENXIO || errno == EAGAIN) return false;
    fail("sending a packet");
  }
  return true;
}

uint64_t Port::missed() {
  tpacket_stats stats{};
  socklen_t length = sizeof stats;
  if (getsockopt(fd_, SOL_PACKET, PACKET_STATISTICS, &stats, &length) != 0)
    fail("PACKET_STATISTICS");
  return stats.tp_drops;
}

}  // namespace link_switch
