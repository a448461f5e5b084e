// The switch as a simulation: packets and the clock are this test's.
#include <arpa/inet.h>
#include <netinet/ip.h>
#include <netinet/tcp.h>
#include <array>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "commands.h"
#include "fabric.h"

using namespace link_switch;

namespace {

constexpr size_t kEthernet = 14, kIp = 20, kTcp = 32, kHeaders = kEthernet + kIp + kTcp;
constexpr uint16_t kSegment = 1448;
constexpr Nanoseconds kMicrosecond = 1000, kMillisecond = 1'000'000;

void expect(bool good, const std::string& what) {
  if (!good) throw std::runtime_error(what);
}

void expect_near(double value, double wanted, double share, const std::string& what) {
  expect(std::abs(value - wanted) <= share * std::abs(wanted),
         what + ": " + std::to_string(value) + " instead of " + std::to_string(wanted));
}

// A frame of TCP to the host 10.78.0.`to`, as the kernel hands it over, with payload 0, 1, 2, ...
Packet packet(uint16_t to, size_t payload, uint32_t seq = 1000) {
  const size_t bytes = Packet::kHeaderBytes + kHeaders + payload;
  auto memory = std::make_unique<Memory>(bytes);
  uint8_t* const data = memory->data();
  std::memset(data, 0, bytes);
  if (payload > kSegment) {
    data[1] = 1;  // a super-packet of TCP over IPv4
    std::memcpy(&data[4], &kSegment, sizeof kSegment);
  }
  uint8_t* frame = &data[Packet::kHeaderBytes];
  const uint8_t address[] = {2, 0, 10, 78, static_cast<uint8_t>(to >> 8), static_cast<uint8_t>(to)};
  std::memcpy(frame, address, sizeof address);
  frame[12] = 8;  // IPv4
  iphdr ip{};
  ip.ihl = kIp / 4;
  ip.version = 4;
  ip.tot_len = htons(static_cast<uint16_t>(kIp + kTcp + payload));
  ip.protocol = IPPROTO_TCP;
  ip.saddr = htonl(0x0a4e0001);
  ip.daddr = htonl(0x0a4e0000 | to);
  std::memcpy(frame + kEthernet, &ip, sizeof ip);
  tcphdr tcp{};
  tcp.seq = htonl(seq);
  tcp.doff = kTcp / 4;
  tcp.ack = 1;
  tcp.fin = tcp.psh = payload > 0;
  tcp.res2 = 3;  // both marks of congestion
  std::memcpy(frame + kEthernet + kIp, &tcp, sizeof tcp);
  for (size_t i = 0; i < payload; ++i) frame[kHeaders + i] = static_cast<uint8_t>(i % 251);
  return Packet(std::move(memory));
}

struct Arrived {
  Nanoseconds at;
  uint32_t from, to, segments;
  uint64_t wire_bytes;
};

// Port 0 is host 10.78.0.0, and so on.
struct World {
  explicit World(uint32_t ports, uint64_t seed = 1)
      : fabric(ports, seed, [this](Transit t) {
          arrived.push_back({t.last, t.from, t.to, t.packet.segments(), t.packet.wire_bytes()});
        }) {}
  void lines(double bits_per_s, uint64_t queue_bytes = Line::kNoLimit) {
    for (uint32_t port = 0; port < fabric.ports(); ++port) {
      fabric.up(port).set(bits_per_s, Line::kNoLimit);
      fabric.down(port).set(bits_per_s, queue_bytes);
    }
  }
  void send(uint32_t from, uint32_t to, size_t payload, Nanoseconds at) {
    fabric.arrive(packet(static_cast<uint16_t>(to), payload), from, to, at);
  }
  void run() { fabric.advance(INT64_MAX, INT64_MAX); }

  std::vector<Arrived> arrived;
  Fabric fabric;
};

void a_frame_takes_its_time_on_both_lines_and_the_delay() {
  World world(2);
  world.lines(1e9);
  world.fabric.path(0, 1).delay = 50 * kMicrosecond;
  world.send(0, 1, 1448, 7);
  world.run();
  expect(world.arrived.at(0).at == 7 + 2 * 1514 * 8 + 50'000, "not store and forward");
}

void of_a_super_packet_the_second_line_has_the_first_frame_while_the_first_sends_the_rest() {
  World world(2);
  world.lines(1e9);
  world.send(0, 1, 45 * 1448, 0);
  world.run();
  expect(world.arrived.at(0).segments == 45, "cut without need");
  expect_near(world.arrived[0].at, 46 * 1514 * 8, 1e-6, "45 frames on two lines");
}

void nothing_is_free_after_a_rest_and_a_rate_is_kept() {
  World world(2);
  world.lines(1e9);
  Nanoseconds at = 0;
  double bits = 0;
  for (int burst = 0; burst < 20; ++burst, at += 100 * kMillisecond) {
    const size_t before = world.arrived.size();
    for (int i = 0; i < 10; ++i) world.send(0, 1, 45 * 1448, at);
    world.run();
    expect(world.arrived.size() == before + 10, "lost");
    bits = 10 * 45 * 1514 * 8.0;
    expect_near(static_cast<double>(world.arrived.back().at - at), bits + 1514 * 8, 1e-6,
                "a burst");
  }
}

void looking_late(Nanoseconds ahead) {
  World world(2);
  world.lines(1e9);
  for (int i = 0; i < 1000; ++i) world.send(0, 1, 10 * 1448, 0);
  Nanoseconds now = 0;
  for (; world.arrived.size() < 1000; now += 3 * kMillisecond)
    world.fabric.advance(now, now + ahead);
  expect_near(static_cast<double>(world.arrived.back().at), 1000 * 10 * 1514 * 8, 1e-3, "the last");
}

void looking_late_costs_no_rate() {
  for (const Nanoseconds ahead : {Nanoseconds{0}, 2 * kMillisecond}) looking_late(ahead);
}

void nothing_is_delivered_before_its_time_however_far_it_is_worked_out() {
  World world(2);
  world.lines(1e9);
  world.fabric.path(0, 1).delay = kMillisecond;
  world.send(0, 1, 1448, 0);
  const Nanoseconds due = kMillisecond + 2 * 1514 * 8;
  world.fabric.advance(0, kMillisecond);
  expect(world.arrived.empty() && !world.fabric.next_due(0), "known too early");
  world.fabric.advance(due - kMillisecond, due);
  expect(world.arrived.empty() && world.fabric.next_due(0) == due, "not known in time");
  expect(!world.fabric.next_event(), "something is left on the lines");
  world.fabric.advance(due, due);
  expect(world.arrived.size() == 1, "not delivered");
}

void an_acknowledgement_may_wait_for_the_next_packet_and_keeps_its_place() {
  World world(2);
  expect(packet(1, 0).is_acknowledgement() && !packet(1, 1).is_acknowledgement(), "what it is");
  world.fabric.path(0, 1).delay = kMillisecond;
  for (const size_t payload : {size_t{100}, size_t{0}, size_t{200}}) world.send(0, 1, payload, 0);
  world.send(0, 1, 0, kMillisecond);
  world.fabric.advance(0, 3 * kMillisecond);
  expect(world.fabric.next_due(700) == kMillisecond, "data is not waited for");
  world.fabric.advance(kMillisecond, 3 * kMillisecond);
  expect(world.fabric.next_due(700) == 2 * kMillisecond + 700, "it may wait");
  world.run();
  const std::vector<uint64_t> wanted{kHeaders + 100, kHeaders, kHeaders + 200, kHeaders};
  for (size_t i = 0; i < wanted.size(); ++i) {
    expect(world.arrived.at(i).wire_bytes == wanted[i], "another order");
  }
}

void hosts_share_a_down_line_and_not_an_up_line() {
  World world(3);
  world.lines(1e9);
  for (int i = 0; i < 50; ++i) {
    world.send(0, 2, 20 * 1448, 0);
    world.send(1, 2, 20 * 1448, 0);
  }
  world.run();
  expect_near(static_cast<double>(world.arrived.back().at), 100 * 20 * 1514 * 8, 0.01, "both");
  uint64_t first_half[2] = {0, 0};
  for (size_t i = 0; i < 50; ++i) ++first_half[world.arrived[i].from];
  expect_near(first_half[0], first_half[1], 0.1, "one host was preferred");
}

void sites_share_one_trunk_in_each_direction() {
  World world(4);
  world.lines(10e9);
  world.fabric.trunk(0).set(1e9, Line::kNoLimit);
  for (const auto& [a, b] : {std::pair{0, 2}, {1, 3}}) {
    world.fabric.path(a, b).trunk = 0;
    world.fabric.path(a, b).delay = 20 * kMillisecond;
    for (int i = 0; i < 50; ++i) world.send(a, b, 20 * 1448, 0);
  }
  world.send(2, 0, 1448, 0);  // the other way nothing is in its way
  world.run();
  expect(world.arrived.front().from == 2, "the trunk was in the way of the other direction");
  expect_near(static_cast<double>(world.arrived.back().at), 20e6 + 100 * 20 * 1514 * 8, 0.01,
              "all");
}

void a_full_queue_drops_what_has_no_room_and_counts_it() {
  World world(3);
  world.lines(1e9, 100 * 1514);
  for (int i = 0; i < 20; ++i) {
    world.send(0, 2, 45 * 1448, 0);
    world.send(1, 2, 45 * 1448, 0);
  }
  world.run();
  const Counts& counts = world.fabric.counts();
  expect(counts.overflows + counts.frames == 2 * 20 * 45, "frames are missing");
  // Twice the rate for as long as the senders send: half of it, less what the queue held.
  expect_near(counts.overflows, 20 * 45 - 100, 0.15, "overflows");
  for (const Arrived& one : world.arrived) expect(one.wire_bytes == one.segments * 1514, "cut");
}

void a_rate_may_change_while_packets_wait() {
  World world(2);
  world.lines(1e9);
  for (int i = 0; i < 200; ++i) world.send(0, 1, 1448, 0);
  world.fabric.advance(100 * 1514 * 8, 100 * 1514 * 8);
  world.lines(1e8);
  world.run();
  expect_near(static_cast<double>(world.arrived.back().at), 100 * 1514 * 8 + 100 * 1514 * 80, 0.03,
              "the second half");
}

void jitter_is_even_and_keeps_the_order() {
  World world(2);
  Path& path = world.fabric.path(0, 1);
  path.delay = 1000 * kMicrosecond;
  path.jitter = 400 * kMicrosecond;
  const int count = 20000;
  double sum = 0, squares = 0;
  for (int i = 0; i < count; ++i) {
    const Nanoseconds at = i * 10 * kMillisecond;  // so far apart that the order changes nothing
    world.send(0, 1, 100, at);
    world.run();
    const double us = static_cast<double>(world.arrived.back().at - at) / kMicrosecond;
    expect(600 <= us && us <= 1400, "out of bounds");
    sum += us - 1000;
    squares += (us - 1000) * (us - 1000);
  }
  expect(std::abs(sum / count) < 5, "not around the delay");
  expect_near(std::sqrt(squares / count), 400 / std::sqrt(3.0), 0.02, "not even");
  world.arrived.clear();
  for (int i = 0; i < 1000; ++i) world.send(0, 1, 100 + i, count * 10 * kMillisecond + i);
  world.run();
  for (size_t i = 0; i < 1000; ++i) {
    expect(world.arrived[i].wire_bytes == kHeaders + 100 + i, "another order");
  }
}

void frames_are_lost_one_by_one() {
  World world(2);
  world.fabric.path(0, 1).loss = 0.01;
  const int count = 20000, segments = 20;
  for (int i = 0; i < count; ++i) world.send(0, 1, segments * 1448, i * kMillisecond);
  world.run();
  const Counts& counts = world.fabric.counts();
  expect(counts.lost + counts.frames == count * segments, "frames are missing");
  expect_near(counts.lost, 0.01 * count * segments, 0.1, "loss");
  expect(world.arrived.size() > count, "whole packets were lost");
}

uint16_t sum(const uint8_t* data, size_t bytes, uint32_t start = 0) {
  for (size_t i = 0; i + 1 < bytes; i += 2) start += data[i] << 8 | data[i + 1];
  if (bytes % 2 != 0) start += data[bytes - 1] << 8;
  while (start >> 16 != 0) start = (start & 0xffff) + (start >> 16);
  return static_cast<uint16_t>(start);
}

void lent_memory_is_given_back_once_and_a_packet_keeps_its_bytes() {
  struct Owner : Memory::Lender {
    std::array<uint8_t, 8> slot{1, 2, 3, 4, 5, 6, 7, 8};
    std::vector<const uint8_t*> back;
    void give_back(const Memory& lent) override { back.push_back(lent.data()); }
  } owner;
  {
    Memory memory(owner.slot.data(), owner.slot.size(), owner);
    memory.keep();
    memory.keep();
    expect(owner.back == std::vector<const uint8_t*>{owner.slot.data()}, "given back by keep");
    owner.slot[0] = 9;
    expect(memory.data()[0] == 1 && memory.data()[7] == 8 && memory.bytes() == 8, "kept bytes");
  }
  expect(owner.back.size() == 1, "given back twice");
  {
    Memory memory(owner.slot.data(), owner.slot.size(), owner);
  }
  expect(owner.back.size() == 2, "given back at its end");
}

void a_part_of_a_super_packet_is_a_packet_as_the_kernel_makes_them() {
  const size_t payload = 9 * 1448 + 77;
  const Packet whole = packet(1, payload, 0xfffffff0);
  expect(whole.segments() == 10 && whole.wire_bytes() == payload + 10 * kHeaders, "segments");
  for (const auto& [first, last] : {std::pair{0u, 4u}, {4u, 5u}, {5u, 10u}, {9u, 10u}, {0u, 10u}}) {
    const Packet part = whole.cut(first, last);
    const size_t begin = first * 1448, end = std::min<size_t>(payload, last * 1448);
    expect(part.segments() == last - first, "segments of a part");
    expect(part.bytes() == Packet::kHeaderBytes + kHeaders + end - begin, "bytes of a part");
    expect(part.data()[1] == (last - first > 1 ? 1 : 0), "a single frame is no super-packet");
    const uint8_t* frame = part.data() + Packet::kHeaderBytes;
    iphdr ip;
    tcphdr tcp;
    std::memcpy(&ip, frame + kEthernet, sizeof ip);
    std::memcpy(&tcp, frame + kEthernet + kIp, sizeof tcp);
    expect(ntohs(ip.tot_len) == kIp + kTcp + end - begin, "length");
    expect(sum(frame + kEthernet, kIp) == 0xffff, "checksum of IP");
    const uint32_t length = static_cast<uint32_t>(IPPROTO_TCP + kTcp + end - begin);
    expect(ntohs(tcp.check) == sum(frame + kEthernet + 12, 8, length), "pseudo-header");
    expect(ntohl(tcp.seq) == 0xfffffff0 + static_cast<uint32_t>(begin), "sequence number");
    expect(tcp.fin == (last == 10) && tcp.psh == (last == 10), "the end of the data");
    expect(tcp.res2 == (first == 0 ? 3 : 1), "marks of congestion");
    for (size_t i = begin; i < end; ++i) {
      expect(frame[kHeaders + i - begin] == i % 251, "payload");
    }
  }
  try {
    packet(1, 100).cut(0, 1);
  } catch (const std::logic_error&) {
    return;
  }
  throw std::runtime_error("a single frame was cut");
}

void commands_do_what_they_say_and_nonsense_is_refused() {
  World world(2);
  Nanoseconds patience = 0;
  expect(obey(world.fabric, patience, "line up 0 1000000000 150000") == Command::change, "line");
  obey(world.fabric, patience, "line down 1 0 9223372036854775808");
  obey(world.fabric, patience, "line trunk 3 1e9 1000000");
  obey(world.fabric, patience, "path 0 1 5000 100 0.25 3");
  const Path& path = world.fabric.path(0, 1);
  expect(path.delay == 5000 && path.jitter == 100 && path.loss == 0.25 && path.trunk == 3u, "path");
  obey(world.fabric, patience, "path 0 1 0 0 0 -1");
  expect(!world.fabric.path(0, 1).trunk, "no trunk");
  obey(world.fabric, patience, "patience 700");
  expect(patience == 700, "patience");
  expect(obey(world.fabric, patience, "sync") == Command::sync, "sync");
  expect(obey(world.fabric, patience, "stats") == Command::stats, "stats");
  for (const char* line :
       {"", "line", "line up 2 1 1", "line side 0 1 1", "line up 0 -1 1", "line up 0 1 1 1",
        "line trunk 9999 1 1", "path 0 2 0 0 0 -1", "path 0 1 -5 0 0 -1", "path 0 1 5 6 0 -1",
        "path 0 1 0 0 1 -1", "path 0 1 0 0 0", "path 0 1 0 0 0 5000", "sync now", "stop",
        "patience -1", "patience"}) {
    try {
      obey(world.fabric, patience, line);
    } catch (const std::invalid_argument&) {
      continue;
    }
    throw std::runtime_error(std::string("obeyed: ") + line);
  }
}

}  // namespace

int main() {
#define TEST(name) \
  {                \
    #name, name    \
  }
  const std::vector<std::pair<const char*, std::function<void()>>> tests{
      TEST(a_frame_takes_its_time_on_both_lines_and_the_delay),
      TEST(of_a_super_packet_the_second_line_has_the_first_frame_while_the_first_sends_the_rest),
      TEST(nothing_is_free_after_a_rest_and_a_rate_is_kept),
      TEST(looking_late_costs_no_rate),
      TEST(nothing_is_delivered_before_its_time_however_far_it_is_worked_out),
      TEST(an_acknowledgement_may_wait_for_the_next_packet_and_keeps_its_place),
      TEST(hosts_share_a_down_line_and_not_an_up_line),
      TEST(sites_share_one_trunk_in_each_direction),
      TEST(a_full_queue_drops_what_has_no_room_and_counts_it),
      TEST(a_rate_may_change_while_packets_wait),
      TEST(jitter_is_even_and_keeps_the_order),
      TEST(frames_are_lost_one_by_one),
      TEST(lent_memory_is_given_back_once_and_a_packet_keeps_its_bytes),
      TEST(a_part_of_a_super_packet_is_a_packet_as_the_kernel_makes_them),
      TEST(commands_do_what_they_say_and_nonsense_is_refused),
  };
#undef TEST
  int failures = 0;
  for (const auto& [name, test] : tests) {
    try {
      test();
      std::printf("%s: right\n", name);
    } catch (const std::exception& error) {
      ++failures;
      std::printf("%s: WRONG: %s\n", name, error.what());
    }
  }
  return failures == 0 ? 0 : 1;
}
