// A packet as the kernel hands it over: a virtio_net_hdr, then an Ethernet frame, which may be a
// super-packet of TCP: one header and the payload of up to 45 frames on a wire.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

namespace link_switch {

// What a packet lies in: memory of its own, or lent by somebody who may want it back.
class Memory {
 public:
  class Lender {
   public:
    virtual void give_back(const Memory& lent) = 0;

   protected:
    ~Lender() = default;
  };

  explicit Memory(size_t bytes);
  Memory(uint8_t* lent, size_t bytes, Lender& lender);
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory();

  uint8_t* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  // Copies what is lent into memory of its own, and gives the other back.
  void keep();

 private:
  std::unique_ptr<uint8_t[]> own_;
  uint8_t* data_;
  size_t bytes_;
  Lender* lender_ = nullptr;
};

// What begins at `data` is kHeaderBytes of virtio_net_hdr and then the frame.
class Packet {
 public:
  static constexpr size_t kHeaderBytes = 10;
  // The kernel's largest: 64 KiB of IP and an Ethernet header with a tag.
  static constexpr size_t kMaxBytes = kHeaderBytes + 65536 + 18;

  explicit Packet(std::unique_ptr<Memory> memory);

  const uint8_t* data() const { return memory_->data(); }
  size_t bytes() const { return memory_->bytes(); }
  // Where it goes: the last two bytes of an address that network.py gave out, or nullopt for
  // others and for broadcasts.
  std::optional<uint16_t> destination() const;

  // TCP's word that data has come, and nothing else.
  bool is_acknowledgement() const { return acknowledgement_; }
  // The frames that it is on a wire; without preamble, checksum and gap (network.py says why).
  uint32_t segments() const { return segments_; }
  // Of all of them with their headers.
  uint64_t wire_bytes() const { return wire_bytes_; }
  // Of the first.
  uint64_t frame_bytes() const;

  // The frames from `first` to before `last`, as a packet of its own: where one frame is lost, the
  // others arrive. Only of a packet with several segments.
  Packet cut(uint32_t first, uint32_t last) const;

 private:
  std::unique_ptr<Memory> memory_;
  size_t header_bytes_ = 0;   // of Ethernet, IP and TCP; 0 where there is one segment
  size_t segment_bytes_ = 0;  // of payload in every segment but the last
  uint32_t segments_ = 1;
  bool acknowledgement_ = false;
  uint64_t wire_bytes_;
};

}  // namespace link_switch
