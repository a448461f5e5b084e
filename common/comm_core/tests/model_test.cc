// Runs random operations of every kind at the same time, on several groups, some of which fail,
// while processes are forked. Compares each outcome with a model of the operation.
//   model_test [N [SEED]]    N operations over each kind of connection
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <memory>

#include "checked_ops.h"
#include "messages/windows.h"
#include "run_tests.h"

using namespace comm_core;
using namespace comm_core::testing;

namespace {

constexpr int kRanks = 4, kChannels = 3;
constexpr uint32_t kWindow = 1;
constexpr size_t kSlotElements = 5000;
constexpr size_t kSizes[] = {0, 1, 100, 20000, 700000};

// An operation in flight with a known outcome.
struct Pending {
  std::function<void()> check;
};

struct Message {
  int from, to;
  uint64_t tag;
  size_t bytes;
  char byte(size_t i) const { return char(uint32_t(tag) * 7 + uint32_t(i) * 13 + uint32_t(from)); }
};

// An operation that all ranks draw alike: a collective, a message or an addition to a window.
struct Drawn {
  enum Kind { collective, message, addition } kind;
  Case of;
  Message letter;
  int target;  // rank that an addition goes to
  size_t channel;
};

void expect_right(const OpPtr& op) {
  const std::string error = error_of(op);
  expect(error.empty(), error);
}

class Player {
 public:
  Player(Rank& rank, Store& store, Together& all, uint32_t seed)
      : rank_(rank),
        store_(store),
        all_(all),
        same_(seed),
        mine_(seed + 77u * uint32_t(rank.rank + 1)) {
    rank_.channels.clear();
    rank_.channels.resize(kChannels);
    windows_.assign(kChannels, std::vector<int64_t>(kRanks * kSlotElements));
    given_.assign(kChannels, std::vector<int64_t>(kRanks));
    for (size_t c = 0; c < kChannels; ++c) meet(c);
  }
  ~Player() {
    for (auto& channel : rank_.channels) {
      if (channel != nullptr) channel->close();
    }
  }

  void play(int count) {
    for (int done = 0; done < count;) {
      done += some(std::min(count - done, int(same_() % 64) + 1));
      if (same_() % 40 == 0) spoil(same_() % kChannels);
      if (same_() % 40 == 0) fork_one(int(same_() % kRanks));
    }
  }

 private:
  Group& group(size_t channel) { return *rank_.channels[channel]; }

  void meet(size_t channel) {
    NotesUnder notes(store_, std::to_string(channel) + "/");
    rank_.channels[channel] = Group::create(rank_.engine, notes, rank_.rank, kRanks,
                                            "channel" + std::to_string(channel), "", 60);
    std::fill(windows_[channel].begin(), windows_[channel].end(), 0);
    std::fill(given_[channel].begin(), given_[channel].end(), 0);
    group(channel).with_windows([&](Windows& windows) {
      auto& memory = windows_[channel];
      windows.add(kWindow, {reinterpret_cast<char*>(memory.data()), memory.size() * 8}, kRanks,
                  DType::i64);
    });
    all_.wait();
  }

  Drawn draw_one() {
    Drawn drawn{};
    drawn.channel = same_() % kChannels;
    switch (same_() % 4) {
      case 0:
        drawn.kind = Drawn::message;
        drawn.letter.from = int(same_() % kRanks);
        drawn.letter.to = (drawn.letter.from + 1 + int(same_() % (kRanks - 1))) % kRanks;
        drawn.letter.tag = ++tags_;
        drawn.letter.bytes = kSizes[same_() % std::size(kSizes)];
        break;
      case 1:
        drawn.kind = Drawn::addition;
        drawn.target = int(same_() % kRanks);
        ++given_[drawn.channel][size_t(drawn.target)];
        break;
      default: drawn.kind = Drawn::collective; drawn.of = draw(same_, kRanks);
    }
    return drawn;
  }

  // Starts this rank's part of the operation, if it has one.
  void begin(const Drawn& drawn, std::vector<Pending>& pending) {
    Group& on = group(drawn.channel);
    if (drawn.kind == Drawn::collective) {
      const std::shared_ptr<Running> running = start(on, drawn.of);
      pending.push_back({[running] { running->check(); }});
    } else if (drawn.kind == Drawn::message) {
      const Message m = drawn.letter;
      if (m.from != rank_.rank && m.to != rank_.rank) return;
      const bool sends = m.from == rank_.rank;
      auto data = std::make_shared<std::vector<char>>(m.bytes);
      OpSpec spec;
      spec.kind = sends ? OpKind::send : OpKind::recv;
      spec.peer = sends ? m.to : m.from;
      spec.tag = m.tag;
      if (sends) {
        for (size_t i = 0; i < m.bytes; ++i) (*data)[i] = m.byte(i);
        spec.inputs = {{data->data(), m.bytes}};
      } else {
        spec.outputs = {{data->data(), m.bytes}};
      }
      const OpPtr op = on.submit(std::move(spec));
      pending.push_back({[op, data, m] {
        expect_right(op);
        for (size_t i = 0; i < m.bytes; i += 1 + i / 8) {
          expect((*data)[i] == m.byte(i), op->describe() + ": wrong byte");
        }
      }});
    } else {
      auto ones = std::make_shared<std::vector<int64_t>>(kSlotElements, 1);
      OpSpec spec;
      spec.kind = OpKind::accumulate;
      spec.dtype = DType::i64;
      spec.peer = drawn.target;
      spec.window = kWindow;
      spec.slot = uint32_t(rank_.rank);
      spec.inputs = {{reinterpret_cast<char*>(ones->data()), ones->size() * 8}};
      const OpPtr op = on.submit(std::move(spec));
      pending.push_back({[op, ones] { expect_right(op); }});
    }
  }

  int some(int count) {
    std::vector<std::deque<Drawn>> queues(kChannels);
    for (int i = 0; i < count; ++i) {
      const Drawn drawn = draw_one();
      queues[drawn.channel].push_back(drawn);
    }
    std::vector<Pending> pending;
    for (int left = count; left > 0;) {
      auto& queue = queues[mine_() % kChannels];
      if (queue.empty()) continue;
      begin(queue.front(), pending);
      queue.pop_front();
      --left;
    }
    std::shuffle(pending.begin(), pending.end(), mine_);
    for (const Pending& one : pending) one.check();
    all_.wait();
    for (size_t c = 0; c < kChannels; ++c) {
      const int64_t given = given_[c][size_t(rank_.rank)];
      std::vector<int64_t> found(kRanks * kSlotElements);
      group(c).with_windows([&](Windows& windows) {
        windows.read(kWindow, 0, kRanks, reinterpret_cast<char*>(found.data()), false, false);
      });
      expect(found == std::vector<int64_t>(found.size(), given), "an addition was lost");
    }
    all_.wait();
    return count;
  }

  // Makes a group fail in one of several ways, with operations in flight, and creates it again.
  void spoil(size_t channel) {
    const int culprit = int(same_() % kRanks);
    const auto how = same_() % 3;
    const bool mine = culprit == rank_.rank;
    Group& on = group(channel);
    std::vector<char> in(3000, 1), out(3000);
    OpSpec spec;
    spec.kind = OpKind::all_reduce;
    spec.inputs = {{in.data(), in.size()}};
    spec.outputs = {{out.data(), out.size()}};
    std::vector<OpPtr> ops;
    if (how == 0) {  // the culprit aborts
      if (!mine) ops.push_back(on.submit(spec));
      if (mine) on.abort("it was drawn");
    } else if (how == 1) {  // the culprit does not call, and another rank has a short time-out
      spec.timeout_s = (culprit + 1) % kRanks == rank_.rank ? 0.02 : 30;
      if (!mine) ops.push_back(on.submit(spec));
      OpSpec none;
      none.kind = OpKind::recv;
      none.peer = (rank_.rank + 1) % kRanks;
      none.tag = UINT64_MAX;
      none.outputs = {{out.data(), 1}};
      ops.push_back(on.submit(std::move(none)));
    } else {  // the culprit leaves
      if (!mine) ops.push_back(on.submit(spec));
      if (mine) on.close();
    }
    for (const OpPtr& op : ops) expect(!error_of(op).empty(), "did not fail: " + op->describe());
    on.close();
    all_.wait();
    meet(channel);
  }

  // A forked child cannot use its parent's groups, and its end does not affect them.
  void fork_one(int who) {
    if (who != rank_.rank) return;
    const pid_t child = fork();
    if (child == 0) {
      bool refused = false;
      try {
        OpSpec barrier;
        group(0).submit(std::move(barrier));
      } catch (const AbortedError&) {
        refused = true;
      }
      for (auto& channel : rank_.channels) channel->close();
      _exit(refused ? 0 : 1);
    }
    int status = -1;
    waitpid(child, &status, 0);
    expect(status == 0, "a child ended with status " + std::to_string(status));
  }

  Rank& rank_;
  Store& store_;
  Together& all_;
  std::mt19937 same_, mine_;
  uint64_t tags_ = 0;
  std::vector<std::vector<int64_t>> windows_;  // by channel: a slot for each rank
  std::vector<std::vector<int64_t>> given_;    // additions of each rank, by channel and target
};

}  // namespace

int main(int argc, char** argv) {
  const int count = argc > 1 ? atoi(argv[1]) : 2000;
  const uint32_t seed = argc > 2 ? uint32_t(atoi(argv[2])) : 1;
  try {
    for (const Wiring& wiring : kWirings) {
      World world = wired(wiring, kRanks);
      world.channels = 0;
      MemoryStore store;
      Together all(kRanks);
      const double began = now_s();
      run_ranks(world, [&](Rank& rank) { Player(rank, store, all, seed).play(count); });
      printf("%d operations, %d hosts%s%s: right (%.1f s)\n", count, wiring.hosts,
             *wiring.transport ? ", " : "", wiring.transport, now_s() - began);
      fflush(stdout);
    }
  } catch (const std::exception& error) {
    printf("FAILED: %s\n", error.what());
    return 1;
  }
  return 0;
}
