// Fuzzes all that reads bytes of other processes: handshakes, control messages, messages with
// one-sided operations, headers of collectives, and addresses in the store.
//
//   fuzz_test [INPUTS [SEED]]
//
// A real group runs on a device whose peers are the fuzzer. Inputs are valid frames with random
// changes; an input that reaches new code is changed further. Nothing may write outside the memory
// of its operation, throw anything but a CommError, or admit a peer without the secret.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>

#include "coverage.h"
#include "messages/message_link.h"
#include "messages/windows.h"
#include "run_tests.h"
#include "tcp/device.h"
#include "tcp/handshake.h"
#include "transport/topology.h"

using namespace comm_core;
using namespace comm_core::testing;

namespace {

constexpr int kRanks = 32;
constexpr uint32_t kMessageMagic = 0x434d4d54, kControlMagic = 0x434d4354;
constexpr size_t kSlotFloats = 16, kSlots = 4, kLarge = 100000;
constexpr char kGuard = 0x5a;

std::string bytes_of(const auto& value) {
  return std::string(reinterpret_cast<const char*>(&value), sizeof value);
}

// What a peer has sent so far, in pieces of at most `step` bytes.
struct Wire {
  std::string bytes;
  size_t step = SIZE_MAX, at = 0;
  Watcher* watcher = nullptr;
};

class WireLane : public Lane {
 public:
  WireLane(std::string peer, std::shared_ptr<Wire> wire)
      : Lane(std::move(peer)), wire_(std::move(wire)) {}
  bool ready() override { return true; }
  using Lane::write;
  size_t write(const iovec* parts, int num_parts) override {
    size_t bytes = 0;
    for (int i = 0; i < num_parts; ++i) bytes += parts[i].iov_len;
    return bytes;
  }
  size_t read(void* data, size_t bytes) override {
    const size_t got = std::min({bytes, wire_->step, wire_->bytes.size() - wire_->at});
    memcpy(data, wire_->bytes.data() + wire_->at, got);
    wire_->at += got;
    return got;
  }
  void wake_from(size_t) override {}
  void limit_unsent(size_t) override {}
  void ignore() override { wire_->watcher = nullptr; }

 private:
  const std::shared_ptr<Wire> wire_;
};

class WireArrival : public Arrival {
 public:
  explicit WireArrival(std::shared_ptr<Wire> wire) : wire_(std::move(wire)) {}
  std::unique_ptr<Lane> lane(std::string peer, const Watching& watching) override {
    wire_->watcher = watching.watcher;
    return std::make_unique<WireLane>(std::move(peer), wire_);
  }

 private:
  const std::shared_ptr<Wire> wire_;
};

// The device of the one process of this test. Everybody has a control connection at once.
class WireDevice : public Device {
 public:
  const Address& address() const override { return address_; }
  void open(const Bytes16& group, Door door) override {
    id = group;
    this->door = std::move(door);
    for (int peer = 1; peer < kRanks; ++peer) {
      control[peer] = std::make_shared<Wire>();
      enter(peer, LaneKind::control, control[peer]);
    }
  }
  void close(const Bytes16&) override { door = {}; }
  std::unique_ptr<Lane> connect(const LaneTarget& target, const Watching&) override {
    return std::make_unique<WireLane>(target.peer, std::make_shared<Wire>());
  }
  double next_deadline_s(double) override { return kNever; }
  uint64_t dropped() const override { return 0; }
  double exhausted_since_s() const override { return kNever; }

  void enter(int peer, LaneKind kind, std::shared_ptr<Wire> wire) {
    door.enter({id, peer, 0, kind}, std::make_unique<WireArrival>(std::move(wire)));
  }

  Bytes16 id{};
  Door door;
  std::map<int, std::shared_ptr<Wire>> control;

 private:
  const Address address_ = Address::parse("127.0.0.1", 1);
};

WireDevice* device = nullptr;  // of the test's only engine

// A store in which all other ranks look like rank 0.
class AlikeStore : public MemoryStore {
 public:
  std::string get(const std::string& key) override {
    return MemoryStore::get(key.compare(0, 3, "1/r") == 0 ? "1/r0" : key);
  }
};

// Memory of an operation between two guards.
class Guarded {
 public:
  explicit Guarded(size_t bytes) : memory_(bytes + 2 * kWidth, kGuard) {}
  Span span() { return {memory_.data() + kWidth, memory_.size() - 2 * kWidth}; }
  void check() const {
    for (size_t i = 0; i < kWidth; ++i) {
      expect(memory_[i] == kGuard && memory_[memory_.size() - 1 - i] == kGuard,
             "written outside the memory of an operation");
    }
  }

 private:
  static constexpr size_t kWidth = 256;
  std::vector<char> memory_;
};

// A group with receives, sends, one-sided operations and a window, so that every frame may fit.
class Target {
 public:
  explicit Target(const std::shared_ptr<Engine>& engine) : engine_(engine) {
    AlikeStore store;
    group_ = Group::create(engine_, store, 0, kRanks, "fuzzed", "", 60);
    group_->with_windows(
        [&](Windows& windows) { windows.add(1, window_.span(), kSlots, DType::f32); });
    for (int i = 0; i < 8; ++i) {
      start(OpKind::recv, i % 2 == 0 ? -1 : 1 + i, uint64_t(i % 4), i % 4 == 3 ? kLarge : 16);
      start(OpKind::send, 1 + i, uint64_t(i), kLarge);
      start(i % 2 == 0 ? OpKind::get : OpKind::put, 1 + i, 0, 16);
    }
  }
  ~Target() { group_->close(); }

  bool failed() { return group_->error() != nullptr; }

  // Lets `peer` send the bytes in its control connection, or in a new one for messages.
  void hear(int peer, LaneKind kind, const std::string& bytes, size_t step) {
    engine_->call([&] {
      const bool control = kind == LaneKind::control;
      const auto wire = control ? device->control.at(peer) : std::make_shared<Wire>();
      wire->bytes += bytes;
      wire->step = step;
      if (!control) device->enter(peer, kind, wire);
      // A poller reports again what its watcher has left.
      for (size_t before = SIZE_MAX; wire->watcher != nullptr && before != wire->at;) {
        before = wire->at;
        wire->watcher->on_event();
      }
    });
  }

  void check() const {
    window_.check();
    for (const auto& memory : memory_) memory->check();
  }

 private:
  void start(OpKind kind, int peer, uint64_t tag, size_t bytes) {
    memory_.push_back(std::make_unique<Guarded>(bytes));
    const Span span = memory_.back()->span();
    OpSpec spec;
    spec.kind = kind;
    spec.dtype = DType::f32;
    spec.peer = peer;
    spec.tag = tag;
    spec.window = 1;
    if (kind == OpKind::recv || kind == OpKind::get) {
      spec.outputs = {span};
    } else {
      spec.inputs = {{span.data, span.bytes}};
    }
    group_->submit(std::move(spec));
  }

  const std::shared_ptr<Engine> engine_;
  Guarded window_{kSlots * kSlotFloats * sizeof(float)};
  std::vector<std::unique_ptr<Guarded>> memory_;
  std::shared_ptr<Group> group_;
};

enum class Reader { greeting, control, messages, frame, note };
constexpr int kReaders = 5;

struct Input {
  Reader reader;
  std::string bytes;
};

FrameHeader a_frame() {
  FrameHeader frame;
  frame.kind = OpKind::all_reduce;
  frame.dtype = DType::f32;
  frame.sequence = 7;
  frame.total_bytes = frame.payload_bytes = 4096;
  return frame;
}

std::string control_message(uint8_t kind, int32_t from, const std::string& text) {
  std::string message = bytes_of(kControlMagic) + char(kind) + '\0';
  return message + bytes_of(uint16_t(text.size())) + bytes_of(from) + text;
}

std::string message(MessageKind kind, uint64_t tag, uint64_t id, uint64_t bytes, bool paid) {
  MessageHeader header;
  header.magic = kMessageMagic;
  header.kind = kind;
  header.dtype = DType::f32;
  header.tag = tag;
  header.id = id;
  header.bytes = bytes;
  header.window = 1;
  return bytes_of(header) + std::string(paid ? bytes : 0, 'p');
}

std::vector<Input> seeds() {
  std::vector<Input> all;
  Hello hello;
  hello.from = 1;
  all.push_back({Reader::greeting, bytes_of(hello) + std::string(32, 'x')});
  for (uint8_t kind = 0; kind < 5; ++kind) {
    const std::string text = kind == 1 ? "5" : kind == 2 ? bytes_of(a_frame()) : "a reason";
    all.push_back({Reader::control, control_message(kind, 1, text)});
  }
  for (uint8_t kind = 0; kind <= uint8_t(MessageKind::more); ++kind) {
    const auto k = MessageKind(kind);
    const bool paid = k != MessageKind::announce && k != MessageKind::get;
    const bool bare = k == MessageKind::request || k >= MessageKind::lock;
    for (uint64_t id : {1, 2, 3}) {
      all.push_back({Reader::messages, message(k, id, id, bare ? 0 : 16, paid)});
    }
  }
  all.push_back({Reader::messages, message(MessageKind::announce, 3, 9, kLarge, false) +
                                       message(MessageKind::data, 3, 9, kLarge, true)});
  all.push_back({Reader::messages, message(MessageKind::lock, 0, 1, 0, false) +
                                       message(MessageKind::unlock, 0, 2, 0, false)});
  all.push_back({Reader::frame, bytes_of(a_frame())});
  PeerInfo info;
  info.address = Address::parse("127.0.0.1", 1);
  info.host_name = info.host_id = "a host";
  all.push_back({Reader::note, info.serialize()});
  return all;
}

class Fuzzer {
 public:
  explicit Fuzzer(uint64_t seed) : random_(seed), corpus_(seeds()), num_seeds_(corpus_.size()) {
    Options options;
    options.transport = TransportChoice::tcp;
    options.allow_loopback = true;
    engine_ = std::make_shared<Engine>(options);
  }

  void run(uint64_t inputs) {
    for (const Input& input : std::vector<Input>(corpus_)) feed(input);
    for (uint64_t i = 0; i < inputs; ++i) {
      Input input = corpus_[below(corpus_.size())];
      for (size_t changes = 1 + below(4); changes > 0; --changes) change(input);
      const size_t before = edges_run();
      feed(input);
      if (edges_run() > before && input.bytes.size() < 4 * kLarge) corpus_.push_back(input);
    }
    target_.reset();
    printf("%llu inputs, %zu edges, %zu of them led further, %llu groups, %llu refused\n",
           static_cast<unsigned long long>(inputs), edges_run(), corpus_.size() - num_seeds_,
           static_cast<unsigned long long>(groups_), static_cast<unsigned long long>(refused_));
    expect(corpus_.size() > num_seeds_, "no input led further than the valid frames");
    expect(refused_ > inputs / 20, "hardly any input was refused");
  }

 private:
  size_t below(size_t n) { return std::uniform_int_distribution<size_t>(0, n - 1)(random_); }

  void change(Input& input) {
    std::string& bytes = input.bytes;
    if (bytes.empty()) bytes = std::string(1 + below(64), '\0');
    const size_t at = below(std::min<size_t>(bytes.size(), 512));
    switch (below(8)) {
      case 0: bytes[at] ^= char(1 << below(8)); return;
      case 1: bytes[at] = char(below(256)); return;
      case 2: return put_number(bytes, at);
      case 3: bytes.resize(below(bytes.size() + 1)); return;
      case 4: bytes.insert(at, 1 + below(64), char(below(256))); return;
      case 5: bytes.erase(at, 1 + below(64)); return;
      default: {  // another input of this reader after, or within, this one
        const Input& other = corpus_[below(corpus_.size())];
        if (other.reader != input.reader || bytes.size() > 2 * kLarge) return;
        bytes.insert(below(4) == 0 ? at : bytes.size(), other.bytes);
      }
    }
  }

  // Writes a number at which sizes, counts and indices go wrong.
  void put_number(std::string& bytes, size_t at) {
    constexpr uint64_t kNumbers[] = {
        0,          1,          2,          4,          15,         17,         64,
        4095,       16384,      16385,      100000,     0x7fff,     65535,      1 << 20,
        0x7fffffff, 0x80000000, 0xffffffff, 1ull << 40, 1ull << 63, UINT64_MAX, UINT64_MAX - 15};
    const uint64_t number = kNumbers[below(std::size(kNumbers))];
    const size_t width = size_t(1) << below(4);
    at = at / width * width;
    memcpy(bytes.data() + at, &number, std::min(width, bytes.size() - at));
  }

  void feed(const Input& input) {
    if (target_ == nullptr || peer_ == kRanks || target_->failed()) {
      target_.reset();
      target_ = std::make_unique<Target>(engine_);
      ++groups_;
      peer_ = 1;
    }
    const size_t most = 64 + input.bytes.size() / 16;  // a long one takes few calls, too
    const size_t step = below(2) == 0 ? SIZE_MAX : 1 + below(most);
    try {
      switch (input.reader) {
        case Reader::greeting: greet(input.bytes, step); break;
        case Reader::control: target_->hear(peer_++, LaneKind::control, input.bytes, step); break;
        case Reader::messages: target_->hear(peer_++, LaneKind::messages, input.bytes, step); break;
        case Reader::frame: read_frame(input.bytes, step); break;
        case Reader::note: PeerInfo::parse(1, input.bytes); break;
      }
    } catch (const CommError&) {
      ++refused_;
    }
    target_->check();
  }

  void greet(std::string bytes, size_t step) {
    // The group's id is random. Without the right one, nothing but the id would be read.
    if (below(8) > 0 && bytes.size() >= sizeof(Hello)) {
      memcpy(bytes.data() + offsetof(Hello, group), device->id.data(), device->id.size());
    }
    WireLane lane("a stranger", wire(bytes, step));
    Acceptance acceptance;
    bool admitted = false;
    for (size_t looks = 0; looks < bytes.size() + 1 && !admitted; ++looks) {
      admitted = acceptance.advance(
          lane, [](const Bytes16& group) { return group == device->id ? &device->door : nullptr; });
    }
    expect(!admitted, "a stranger was admitted");
  }

  static void read_frame(const std::string& bytes, size_t step) {
    WireLane lane("rank 1", wire(bytes, step));
    FrameReader reader;
    const FrameHeader mine = a_frame();
    bool whole = false;
    for (size_t looks = 0; looks < bytes.size() + 1 && !whole; ++looks) {
      whole = reader.expect(lane, mine, mine.payload_bytes);
    }
    expect(!whole || bytes.compare(0, sizeof mine, bytes_of(mine)) == 0, "a wrong frame passed");
  }

  static std::shared_ptr<Wire> wire(const std::string& bytes, size_t step) {
    auto made = std::make_shared<Wire>();
    made->bytes = bytes;
    made->step = step;
    return made;
  }

  std::mt19937_64 random_;
  std::vector<Input> corpus_;
  const size_t num_seeds_;
  std::shared_ptr<Engine> engine_;
  std::unique_ptr<Target> target_;
  int peer_ = kRanks;
  uint64_t groups_ = 0, refused_ = 0;
};

}  // namespace

namespace comm_core {

// In place of the one over TCP: the linker takes that one only if there is no other.
std::unique_ptr<Device> tcp_device(Poller&, const std::string&, const SocketOptions&) {
  auto made = std::make_unique<WireDevice>();
  device = made.get();
  return made;
}

}  // namespace comm_core

int main(int argc, char** argv) {
  try {
    Fuzzer(argc > 2 ? strtoull(argv[2], nullptr, 10) : 1)
        .run(argc > 1 ? strtoull(argv[1], nullptr, 10) : 20000);
  } catch (const std::exception& error) {
    printf("FAILED: %s\n", error.what());
    return 1;
  }
  return 0;
}
