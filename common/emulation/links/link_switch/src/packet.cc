#include "packet.h"

#include <arpa/inet.h>
#include <net/ethernet.h>
#include <netinet/ip.h>
#include <netinet/tcp.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace link_switch {
namespace {

// <linux/virtio_net.h> has it, but is not C++: it names a member `class`.
struct VirtioNetHeader {
  uint8_t flags, gso_type;
  uint16_t hdr_len, gso_size, csum_start, csum_offset;
};
constexpr uint8_t kGsoNone = 0, kGsoTcp4 = 1, kGsoEcn = 0x80;
static_assert(sizeof(VirtioNetHeader) == Packet::kHeaderBytes);
constexpr size_t kEthernet = sizeof(ether_header);

template <typename T>
T read(const uint8_t* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <typename T>
void write(uint8_t* to, const T& value) {
  std::memcpy(to, &value, sizeof value);
}

uint32_t sum16(const uint8_t* data, size_t bytes, uint32_t sum = 0) {
  for (size_t i = 0; i + 1 < bytes; i += 2) sum += read<uint16_t>(data + i);
  if (bytes % 2 != 0) sum += data[bytes - 1];
  return sum;
}

uint16_t folded(uint32_t sum) {
  while (sum >> 16 != 0) sum = (sum & 0xffff) + (sum >> 16);
  return static_cast<uint16_t>(sum);
}

bool is_ip4(const uint8_t* frame) {
  return frame[kEthernet - 2] == (ETHERTYPE_IP >> 8) && frame[kEthernet - 1] == 0;
}

bool is_super(const VirtioNetHeader& header) {
  return (header.gso_type & ~kGsoEcn) == kGsoTcp4 && header.gso_size > 0;
}

}  // namespace

Memory::Memory(size_t bytes) : own_(new uint8_t[bytes]), data_(own_.get()), bytes_(bytes) {}

Memory::Memory(uint8_t* lent, size_t bytes, Lender& lender)
    : data_(lent), bytes_(bytes), lender_(&lender) {}

Memory::~Memory() {
  if (lender_ != nullptr) lender_->give_back(*this);
}

void Memory::keep() {
  if (lender_ == nullptr) return;
  own_.reset(new uint8_t[bytes_]);
  std::memcpy(own_.get(), data_, bytes_);
  lender_->give_back(*this);
  lender_ = nullptr;
  data_ = own_.get();
}

Packet::Packet(std::unique_ptr<Memory> memory)
    : memory_(std::move(memory)), wire_bytes_(memory_->bytes() - kHeaderBytes) {
  const auto header = read<VirtioNetHeader>(data());
  const uint8_t* frame = data() + kHeaderBytes;
  const size_t frame_bytes = bytes() - kHeaderBytes;
  if (frame_bytes < kEthernet + sizeof(iphdr) || !is_ip4(frame)) return;
  const auto ip = read<iphdr>(frame + kEthernet);
  const size_t tcp_at = kEthernet + 4 * size_t{ip.ihl};
  if (ip.protocol != IPPROTO_TCP || frame_bytes < tcp_at + sizeof(tcphdr)) return;
  const auto tcp = read<tcphdr>(frame + tcp_at);
  const size_t headers = tcp_at + 4 * size_t{tcp.doff};
  // What is behind the end of IP fills a short frame up.
  const bool has_data = kEthernet + ntohs(ip.tot_len) > headers;
  acknowledgement_ = !has_data && tcp.ack && !tcp.syn && !tcp.fin && !tcp.rst;
  if (!is_super(header) || frame_bytes <= headers + header.gso_size) return;
  header_bytes_ = headers;
  segment_bytes_ = header.gso_size;
  const size_t payload = frame_bytes - headers;
  segments_ = static_cast<uint32_t>((payload + segment_bytes_ - 1) / segment_bytes_);
  wire_bytes_ += (segments_ - 1) * headers;
}

std::optional<uint16_t> Packet::destination() const {
  static constexpr uint8_t kOurs[] = {0x02, 0x00, 10, 78};
  const uint8_t* to = data() + kHeaderBytes;
  if (bytes() < kHeaderBytes + kEthernet || std::memcmp(to, kOurs, sizeof kOurs) != 0) {
    return std::nullopt;
  }
  return static_cast<uint16_t>(to[4] << 8 | to[5]);
}

uint64_t Packet::frame_bytes() const {
  return segments_ == 1 ? wire_bytes_ : header_bytes_ + segment_bytes_;
}

Packet Packet::cut(uint32_t first, uint32_t last) const {
  if (segments_ == 1 || first >= last || last > segments_) {
    throw std::logic_error("a packet cannot be cut so");
  }
  const size_t payload = bytes() - kHeaderBytes - header_bytes_;
  const size_t begin = first * segment_bytes_;
  const size_t end = std::min(payload, last * segment_bytes_);
  const size_t head = kHeaderBytes + header_bytes_;
  auto part = std::make_unique<Memory>(head + (end - begin));
  std::memcpy(part->data(), data(), head);
  std::memcpy(part->data() + head, data() + head + begin, end - begin);

  auto header = read<VirtioNetHeader>(part->data());
  uint8_t* frame = part->data() + kHeaderBytes;
  auto ip = read<iphdr>(frame + kEthernet);
  const size_t ip_bytes = 4 * size_t{ip.ihl};
  uint8_t* const tcp_at = frame + kEthernet + ip_bytes;
  auto tcp = read<tcphdr>(tcp_at);
  tcp.seq = htonl(ntohl(tcp.seq) + static_cast<uint32_t>(begin));
  // As the kernel cuts: what ends the data stands in the last frame, and the answer to a mark of
  // congestion in the first.
  if (last < segments_) tcp.fin = tcp.psh = 0;
  if (first > 0) tcp.res2 &= 1;  // ECE stays, CWR goes
  const auto tcp_bytes = static_cast<uint16_t>(header_bytes_ - kEthernet - ip_bytes + end - begin);
  ip.tot_len = htons(static_cast<uint16_t>(ip_bytes + tcp_bytes));
  ip.id = htons(static_cast<uint16_t>(ntohs(ip.id) + first));
  ip.check = 0;
  write(frame + kEthernet, ip);
  ip.check = static_cast<uint16_t>(~folded(sum16(frame + kEthernet, ip_bytes)));
  write(frame + kEthernet, ip);
  // The kernel has summed the pseudo-header only, with the length in it, and leaves the rest to
  // the device.
  const uint32_t pseudo = sum16(frame + kEthernet + offsetof(iphdr, saddr), 8);
  tcp.check = folded(pseudo + htons(IPPROTO_TCP) + htons(tcp_bytes));
  write(tcp_at, tcp);
  if (end - begin <= segment_bytes_) {
    header.gso_type = kGsoNone;
    header.gso_size = 0;
  }
  write(part->data(), header);
  return Packet(std::move(part));
}

}  // namespace link_switch
