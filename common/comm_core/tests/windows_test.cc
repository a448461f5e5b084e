// Tests one-sided operations: their effect on a window, refused operations, and locks.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <numeric>

#include "messages/windows.h"
#include "run_tests.h"

using namespace comm_core;
using namespace comm_core::testing;

namespace {

constexpr uint32_t kWindow = 7;
using Values = std::vector<float>;

// A window of `slots` slots of `count` elements on every rank, filled with the rank number.
struct Memory {
  Memory(Rank& rank, size_t slots, size_t count)
      : group(*rank.channels[0]), slots(slots), count(count), values(slots * count, rank.rank) {
    group.with_windows([&](Windows& windows) {
      windows.add(kWindow, {reinterpret_cast<char*>(values.data()), values.size() * sizeof(float)},
                  slots, DType::f32);
    });
  }
  ~Memory() { remove(); }

  void remove() {
    if (!there) return;
    there = false;
    group.with_windows([](Windows& windows) { windows.remove(kWindow); });
  }
  std::vector<uint64_t> versions() {
    std::vector<uint64_t> found;
    group.with_windows([&](Windows& windows) { found = windows.versions(kWindow); });
    return found;
  }
  Values read(size_t first, size_t num, bool reset, bool clear) {
    Values found(num * count);
    group.with_windows([&](Windows& windows) {
      windows.read(kWindow, first, num, reinterpret_cast<char*>(found.data()), reset, clear);
    });
    return found;
  }

  Group& group;
  const size_t slots, count;
  Values values;
  bool there = true;
};

OpSpec on_window(OpKind kind, int peer) {
  OpSpec spec;
  spec.kind = kind;
  spec.dtype = DType::f32;
  spec.peer = peer;
  spec.window = kWindow;
  return spec;
}

OpPtr give(Group& group, OpKind kind, int peer, const Values& values, uint32_t slot = 0,
           uint64_t offset = 0, ReduceOp op = ReduceOp::sum) {
  OpSpec spec = on_window(kind, peer);
  spec.inputs = {{reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)}};
  spec.slot = slot;
  spec.offset = offset;
  spec.op = op;
  return group.submit(std::move(spec));
}

OpPtr fetch(Group& group, int peer, Values& values, uint32_t slot = 0, uint64_t offset = 0) {
  OpSpec spec = on_window(OpKind::get, peer);
  spec.outputs = {{reinterpret_cast<char*>(values.data()), values.size() * sizeof(float)}};
  spec.slot = slot;
  spec.offset = offset;
  return group.submit(std::move(spec));
}

OpPtr ask(Group& group, OpKind kind, int peer) { return group.submit(on_window(kind, peer)); }

void expect_right(const OpPtr& op) {
  const std::string error = error_of(op);
  expect(error.empty(), error);
}

void expect_refused(const OpPtr& op, const std::string& why) {
  expect_text(error_of(op), why);
  expect(is<InvalidRequestError>(op->error()), "wrong kind of error: " + error_of(op));
}

// Every rank puts into, adds to and reads every window, including its own.
void what_is_given_is_there() {
  for (const Wiring& wiring : kWirings) {
    for (size_t count : {size_t(1), size_t(1000), size_t(300001)}) {
      Together all(4);
      run_ranks(wired(wiring, 4), [&](Rank& rank) {
        Memory memory(rank, 5, count);
        Group& group = memory.group;
        all.wait();
        std::vector<OpPtr> ops;
        const Values mine(count, float(10 + rank.rank));
        for (int peer = 0; peer < 4; ++peer) {
          ops.push_back(give(group, OpKind::put, peer, mine, uint32_t(rank.rank)));
          ops.push_back(give(group, OpKind::accumulate, peer, mine, 4));
          ops.push_back(give(group, OpKind::accumulate, peer, mine, 4, 0, ReduceOp::max));
        }
        for (const OpPtr& op : ops) expect_right(op);
        all.wait();
        for (int peer = 0; peer < 4; ++peer) {
          for (uint32_t slot = 0; slot < 4; ++slot) {
            Values found(count);
            expect_right(fetch(group, peer, found, slot));
            expect(found == Values(count, float(10 + slot)), "the put of a rank is missing");
          }
        }
        // Sums and maxima in any order: the initial value and four values of at most 13.
        Values sum(1);
        expect_right(fetch(group, 0, sum, 4, (count - 1) * sizeof(float)));
        expect(sum[0] >= 46 && sum[0] <= 46 + 3, "wrong sum: " + std::to_string(sum[0]));
        all.wait();
        expect(memory.versions() == std::vector<uint64_t>{1, 1, 1, 1, 8}, "wrong versions");
        expect(memory.read(1, 2, true, true).back() == 12, "the wrong slot was read");
        expect(memory.versions() == std::vector<uint64_t>{1, 0, 0, 1, 8},
               "versions were not reset");
        expect(memory.read(1, 2, false, false) == Values(2 * count, 0), "slots were not cleared");
        all.wait();
      });
    }
  }
}

// Operations on a part of a slot change no other byte.
void parts_of_a_slot() {
  Together all(2);
  run_ranks(wired({"", 1}, 2), [&](Rank& rank) {
    Memory memory(rank, 2, 8);
    all.wait();
    if (rank.rank == 0) {
      const Values three{5, 6, 7};
      expect_right(give(memory.group, OpKind::put, 1, three, 1, 2 * sizeof(float)));
      Values found(4);
      expect_right(fetch(memory.group, 1, found, 1, sizeof(float)));
      expect(found == Values{1, 5, 6, 7}, "wrong values");
      Values nothing;
      expect_right(fetch(memory.group, 1, nothing, 1, 8 * sizeof(float)));
    }
    all.wait();
    if (rank.rank == 1) {
      Values wanted(16, 1);
      std::iota(wanted.begin() + 10, wanted.begin() + 13, 5);
      expect(memory.values == wanted, "bytes outside the part were written");
    }
  });
}

void what_makes_no_sense_is_refused_and_harms_nothing() {
  for (int peer : {0, 1}) {  // rank 0's own window, and that of rank 1
    Together all(2);
    run_ranks(wired({"", 1}, 2), [&](Rank& rank) {
      Memory memory(rank, 2, 8);
      Group& group = memory.group;
      all.wait();
      if (rank.rank == 0) {
        const Values eight(8, 3);
        expect_refused(give(group, OpKind::put, peer, eight, 2), "2 slots");
        expect_refused(give(group, OpKind::put, peer, eight, 0, 4), "32 bytes");
        expect_refused(give(group, OpKind::put, peer, eight, 0, UINT64_MAX - 3), "32 bytes");
        expect_refused(give(group, OpKind::accumulate, peer, eight, 0, 0, ReduceOp::bxor),
                       "bxor of float32");
        expect_refused(give(group, OpKind::accumulate, peer, eight, 0, 0, ReduceOp::avg),
                       "avg of float32");
        OpSpec other = on_window(OpKind::put, peer);
        const Values more(8);
        other.inputs = {{reinterpret_cast<const char*>(more.data()), 32}};
        other.dtype = DType::i32;
        expect_refused(group.submit(other), "dtype float32, not int32");
        other.dtype = DType::f32;
        other.window = 8;
        expect_refused(group.submit(other), "no such window");
        expect_refused(ask(group, OpKind::unlock, peer), "does not hold the lock");
        Values found(8);
        expect_right(fetch(group, peer, found));
        expect(found == Values(8, float(peer)), "a refused operation changed the window");
        bool thrown = false;
        try {
          memory.read(1, 2, false, false);
        } catch (const InvalidRequestError&) {
          thrown = true;
        }
        expect(thrown, "a slot that does not exist was read");
      }
      all.wait();
    });
  }
}

// Ranks read, increment and write a value under the lock: no increment is lost.
void one_holds_the_lock() {
  constexpr int kTurns = 25;
  for (const Wiring& wiring : kWirings) {
    Together all(4);
    run_ranks(wired(wiring, 4), [&](Rank& rank) {
      Memory memory(rank, 1, 1);
      all.wait();
      for (int turn = 0; turn < kTurns; ++turn) {
        expect_right(ask(memory.group, OpKind::lock, 2));
        Values value(1);
        expect_right(fetch(memory.group, 2, value));
        ++value[0];
        expect_right(give(memory.group, OpKind::put, 2, value));
        expect_right(ask(memory.group, OpKind::unlock, 2));
      }
      all.wait();
      if (rank.rank == 2) expect(memory.values[0] == 2 + 4 * kTurns, "an addition was lost");
    });
  }
}

// Ranks get the lock in the order of their requests. If the holder leaves, the next rank gets the
// lock; if the window is freed, the waiting requests are refused.
void locks_of_the_gone() {
  Together all(3);
  run_ranks(wired({"", 1}, 3), [&](Rank& rank) {
    Memory memory(rank, 1, 1);
    Group& group = memory.group;
    all.wait();
    if (rank.rank == 1) expect_right(ask(group, OpKind::lock, 0));
    all.wait();
    OpPtr waiting;
    if (rank.rank == 2) {
      waiting = ask(group, OpKind::lock, 0);
      Values value(1);
      expect_right(fetch(group, 0, value));  // now rank 0 has received the request for the lock
      expect(!waiting->done(), "two ranks hold the lock");
    }
    all.wait();
    if (rank.rank == 1) {
      memory.there = false;
      group.close();
    }
    if (rank.rank == 2) expect_right(waiting);
    if (rank.rank == 0) {
      const OpPtr mine = ask(group, OpKind::lock, 0);
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      memory.remove();
      expect_refused(mine, "the window was freed");
    }
    all.wait();
    if (rank.rank == 2) {
      Values value(1);
      expect_refused(fetch(group, 0, value), "no such window");
      expect_text(error_of(ask(group, OpKind::lock, 1)), "lost rank 1");
    }
    all.wait();
  });
}

// The holder never unlocks: the waiting rank times out, and the error names the rank waited for.
void a_lock_that_is_not_given_back() {
  Together all(2);
  run_ranks(wired({"", 1}, 2), [&](Rank& rank) {
    Memory memory(rank, 1, 1);
    all.wait();
    if (rank.rank == 0) expect_right(ask(memory.group, OpKind::lock, 0));
    all.wait();
    if (rank.rank == 1) {
      OpSpec spec = on_window(OpKind::lock, 0);
      spec.timeout_s = 0.2;
      const OpPtr op = memory.group.submit(std::move(spec));
      expect_text(error_of(op), "timed out waiting for rank 0");
      expect(is<TimeoutError>(op->error()), "not a TimeoutError");
    }
    all.wait();
    memory.there = false;
  });
}

// More requests than fit into a connection's buffers, in both directions at once.
void many_under_way() {
  Together all(3);
  run_ranks(wired({"tcp", 1}, 3), [&](Rank& rank) {
    constexpr size_t kCount = 100000;
    Memory memory(rank, 3, kCount);
    all.wait();
    const Values ones(kCount, 1);
    std::vector<Values> found(30, Values(kCount));
    std::vector<OpPtr> ops;
    for (Values& values : found) {
      for (int peer = 0; peer < 3; ++peer) {
        ops.push_back(give(memory.group, OpKind::accumulate, peer, ones, uint32_t(rank.rank)));
      }
      ops.push_back(fetch(memory.group, (rank.rank + 1) % 3, values, uint32_t(rank.rank)));
    }
    for (const OpPtr& op : ops) expect_right(op);
    for (size_t i = 0; i < found.size(); ++i) {  // the operations of one rank are applied in order
      expect(found[i] == Values(kCount, float((rank.rank + 1) % 3 + int(i) + 1)), "out of order");
    }
    all.wait();
    expect(memory.values[0] == float(rank.rank + 30), "an addition was lost");
  });
}

}  // namespace

int main(int argc, char** argv) {
  return run_tests(argc, argv,
                   {{"what is given is there", what_is_given_is_there},
                    {"parts of a slot", parts_of_a_slot},
                    {"refused", what_makes_no_sense_is_refused_and_harms_nothing},
                    {"one holds the lock", one_holds_the_lock},
                    {"locks of the gone", locks_of_the_gone},
                    {"not given back", a_lock_that_is_not_given_back},
                    {"many under way", many_under_way}});
}
