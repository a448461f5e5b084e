// Compares the regimes of collectives with the traffic: the number of peers that data goes to, and
// the number of bytes from which a rank is woken. Counts this program's system calls.
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>

#include "checked_ops.h"
#include "collectives/frame.h"
#include "collectives/regimes.h"
#include "run_tests.h"

using namespace comm_core;
using namespace comm_core::testing;

namespace {

std::atomic<bool> counting{false};
std::mutex mutex;
std::map<int, int> frames;  // frames of collectives sent, by descriptor
int most_wanted = 0;        // largest number of bytes from which a rank asked to be woken

}  // namespace

extern "C" {
ssize_t __real_sendmsg(int, const msghdr*, int);
int __real_setsockopt(int, int, int, const void*, socklen_t);

ssize_t __wrap_sendmsg(int fd, const msghdr* message, int flags) {
  const ssize_t sent = __real_sendmsg(fd, message, flags);
  const iovec& first = message->msg_iov[0];
  uint32_t magic = 0;
  if (counting && sent > 0 && first.iov_len >= sizeof(FrameHeader)) {
    memcpy(&magic, first.iov_base, sizeof magic);
    std::lock_guard lock(mutex);
    if (magic == kFrameMagic) ++frames[fd];
  }
  return sent;
}

int __wrap_setsockopt(int fd, int level, int option, const void* value, socklen_t length) {
  if (counting && level == SOL_SOCKET && option == SO_RCVLOWAT) {
    std::lock_guard lock(mutex);
    most_wanted = std::max(most_wanted, *static_cast<const int*>(value));
  }
  return __real_setsockopt(fd, level, option, value, length);
}
}

namespace {

struct Seen {
  int lanes = 0;   // lanes with traffic, of all ranks
  int frames = 0;  // frames sent, of all ranks
  int most_wanted = 0;
};

// Runs and checks one operation of `bytes` in total on `n` ranks over TCP. Returns the traffic.
Seen run(OpKind kind, int n, uint64_t bytes, const Options& options = {}) {
  World world{n, 1, 1, "tcp"};
  world.options = options;
  Together together(n);
  Seen seen;
  run_ranks(world, [&](Rank& rank) {
    const bool blocks = kind == OpKind::reduce_scatter || kind == OpKind::all_gather;
    const size_t count = bytes / 4 / (blocks ? size_t(n) : 1);
    Case c{kind, DType::f32, ReduceOp::sum, 0, count, 1};
    start(*rank.channels[0], c)->check();  // opens the connections
    together.wait();
    if (rank.rank == 0) {
      std::lock_guard lock(mutex);
      frames.clear();
      most_wanted = 0;
      counting = true;
    }
    together.wait();
    c.salt = 2;
    start(*rank.channels[0], c)->check();
    together.wait();
    counting = false;
  });
  seen.lanes = int(frames.size());
  for (const auto& [fd, sent] : frames) seen.frames += sent;
  seen.most_wanted = most_wanted;
  return seen;
}

const OpKind kKinds[] = {OpKind::all_reduce, OpKind::reduce_scatter, OpKind::all_gather,
                         OpKind::broadcast};

// Runs each operation just below and at each boundary, and checks its result.
void the_algorithm_is_as_said() {
  Options tcp;
  tcp.transport = TransportChoice::tcp;
  for (int n : {2, 3, 4, 9}) {
    for (OpKind kind : kKinds) {
      const std::vector<Regime> all = regimes(kind, n, n, tcp);
      for (size_t i = 0; i < all.size(); ++i) {
        for (bool last : {false, true}) {
          if (last && i + 1 == all.size()) continue;
          const uint64_t unit = 4 * uint64_t(n);
          const uint64_t bytes = last ? (all[i + 1].first_bytes - 1) / unit * unit
                                      : (all[i].first_bytes + unit - 1) / unit * unit;
          if (bytes == 0) continue;
          const Seen seen = run(kind, n, bytes);
          const std::string what = std::string(name(kind)) + ", " + std::to_string(n) + " ranks, " +
                                   std::to_string(bytes) + " bytes, " + all[i].name + ": " +
                                   std::to_string(seen.lanes) + " lanes, " +
                                   std::to_string(seen.frames) + " frames, woken from " +
                                   std::to_string(seen.most_wanted);
          const std::string name = all[i].name;
          if (name == "direct") {
            expect(seen.lanes == n * (n - 1) && seen.frames == n * (n - 1), what);
          } else if (name == "two_hops") {
            expect(n > 2 && seen.lanes == n * (n - 1) && seen.frames == 2 * n * (n - 1), what);
          } else if (name == "doubling") {  // 9 ranks: three rounds of 8, and two for the ninth
            expect(n == 9 && seen.lanes == 26 && seen.frames == 26, what);
          } else if (name == "tree") {
            expect(seen.lanes == n - 1 && seen.frames == n - 1, what);
          } else {
            const int stages = kind == OpKind::all_reduce ? 2 : 1;
            const int senders = kind == OpKind::broadcast ? n - 1 : n;
            expect(seen.lanes == senders && seen.frames == senders * stages, what);
            const uint64_t block = kind == OpKind::broadcast ? bytes : bytes / uint64_t(n);
            const size_t piece = ring_piece(block, n, tcp.tcp_chunk);
            expect(size_t(seen.most_wanted) <= piece, what);
            if (name == "blocks") expect(block < 2 * piece, what);
            if (name == "pieces") expect(block >= 2 * piece && piece < tcp.tcp_chunk / 2, what);
            if (name == "pipeline" && n > 2) expect(piece == tcp.tcp_chunk / 2, what);
          }
        }
      }
    }
  }
}

// 512 KiB on 4 ranks: blocks of 128 KiB, of which a rank passes on each eighth at once.
void a_short_block_is_passed_on_in_parts() {
  for (OpKind kind : {OpKind::all_reduce, OpKind::reduce_scatter, OpKind::all_gather}) {
    const Seen seen = run(kind, 4, 512 << 10);
    expect(seen.most_wanted <= 16 << 10,
           std::string(name(kind)) + ": woken from " + std::to_string(seen.most_wanted));
  }
}

// Wake-ups cost CPU time. For large messages there is still one for each half chunk.
void a_long_block_wakes_no_more_often() {
  const Options options;
  for (uint64_t block : {1u << 20, 25u << 18, 100u << 20}) {
    expect(ring_piece(block, 4, options.tcp_chunk) == options.tcp_chunk / 2, "more wake-ups");
  }
}

void settings_move_the_boundaries() {
  Options options;
  options.tcp_small = 1 << 20;
  const auto larger = regimes(OpKind::all_reduce, 4, 4, options);
  expect(larger.size() == 3 && larger[1].name == std::string("pieces") &&
             larger[1].first_bytes == 1 << 20 && larger[2].first_bytes == 4 << 20,
         "TCP_SMALL");
  options = {};
  const auto straight = regimes(OpKind::all_gather, 8, 8, options);
  expect(straight.size() == 3 && straight[1].first_bytes == 256 << 10, "TCP_DIRECT");
  options.tcp_direct = 0;
  options.tcp_chunk = 16 << 10;
  const auto finer = regimes(OpKind::all_reduce, 4, 4, options);
  expect(finer.size() == 3 && finer[2].name == std::string("pipeline") &&
             finer[2].first_bytes == 64 << 10,
         "TCP_CHUNK");
}

}  // namespace

int main(int argc, char** argv) {
  return run_tests(argc, argv,
                   {{"the algorithm is that of the regime", the_algorithm_is_as_said},
                    {"a short block is passed on in parts", a_short_block_is_passed_on_in_parts},
                    {"a long block wakes no more often", a_long_block_wakes_no_more_often},
                    {"settings move the boundaries", settings_move_the_boundaries}});
}
