// Tests point-to-point messages.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <latch>
#include <random>

#include "run_tests.h"

using namespace comm_core;
using namespace comm_core::testing;

namespace {

constexpr size_t kSizes[] = {0, 1, 100, 16 << 10, (16 << 10) + 1, 300000, 1300000};

struct Message {
  int from, to;
  uint64_t tag;
  size_t bytes;
};

char byte_of(const Message& m, size_t i) {
  return char(uint32_t(m.from) * 31 + uint32_t(m.tag) * 7 + uint32_t(i) * 2654435761u / 4096);
}

void fill(std::vector<char>& data, const Message& m) {
  data.resize(m.bytes);
  for (size_t i = 0; i < m.bytes; ++i) data[i] = byte_of(m, i);
}

OpPtr send_filled(Group& group, std::vector<char>& data, const Message& m) {
  OpSpec spec;
  spec.kind = OpKind::send;
  spec.peer = m.to;
  spec.tag = m.tag;
  spec.inputs = {{data.data(), data.size()}};
  return group.submit(std::move(spec));
}

OpPtr send(Group& group, std::vector<char>& data, const Message& m) {
  fill(data, m);
  return send_filled(group, data, m);
}

OpPtr receive(Group& group, std::vector<char>& data, int peer, uint64_t tag, size_t bytes,
              double timeout_s = 0) {
  data.assign(bytes, '?');
  OpSpec spec;
  spec.kind = OpKind::recv;
  spec.peer = peer;
  spec.tag = tag;
  spec.timeout_s = timeout_s;
  spec.outputs = {{data.data(), data.size()}};
  return group.submit(std::move(spec));
}

void expect_content(const std::vector<char>& data, const Message& m) {
  for (size_t i = 0; i < m.bytes; ++i) {
    if (data[i] == byte_of(m, i)) continue;
    throw std::runtime_error("byte " + std::to_string(i) + " of message " + std::to_string(m.tag) +
                             " from rank " + std::to_string(m.from) + " is wrong");
  }
}

void expect_right(const OpPtr& op) {
  const std::string error = error_of(op);
  expect(error.empty(), error);
}

// Each rank starts its sends and receives in a different order; every tag is used once.
void many_in_flight() {
  for (const Wiring& wiring : kWirings) {
    run_ranks(wired(wiring, 4), [&](Rank& rank) {
      std::mt19937 same(7), mine(uint32_t(rank.rank));
      for (int round = 0; round < 5; ++round) {
        std::vector<Message> messages;
        for (int i = 0; i < 200; ++i) {
          const int from = int(same() % 4), to = (from + 1 + int(same() % 3)) % 4;
          messages.push_back({from, to, uint64_t(i), kSizes[same() % std::size(kSizes)]});
        }
        std::erase_if(messages, [&](auto& m) { return m.from != rank.rank && m.to != rank.rank; });
        std::shuffle(messages.begin(), messages.end(), mine);
        std::vector<std::vector<char>> data(messages.size());
        std::vector<OpPtr> ops;
        for (size_t i = 0; i < messages.size(); ++i) {
          const Message& m = messages[i];
          Group& group = *rank.channels[0];
          ops.push_back(m.from == rank.rank ? send(group, data[i], m)
                                            : receive(group, data[i], m.from, m.tag, m.bytes));
        }
        for (size_t i = 0; i < ops.size(); ++i) {
          expect_right(ops[i]);
          expect_content(data[i], messages[i]);
        }
      }
    });
  }
}

// Small and large messages with the same sender and tag arrive in the order of sending.
void one_tag_in_order() {
  run_ranks(wired({"", 1}, 2), [&](Rank& rank) {
    Group& group = *rank.channels[0];
    std::vector<std::vector<char>> data(60);
    std::vector<OpPtr> ops;
    for (size_t i = 0; i < data.size(); ++i) {
      const Message m{0, 1, 9, kSizes[i % std::size(kSizes)]};
      ops.push_back(rank.rank == 0 ? send(group, data[i], m)
                                   : receive(group, data[i], 0, 9, m.bytes));
    }
    for (const OpPtr& op : ops) expect_right(op);
  });
}

// A small message overtakes the large ones in flight on its connection. These have 160 MiB, of
// which the first 4 MiB have arrived when the small one is sent. The test uses the engine's times,
// because callbacks run only when a core is free.
void small_ones_overtake() {
  constexpr size_t kLarge = 40;
  const Message last{0, 1, kLarge, 100};
  std::latch begun(1);
  std::atomic<bool> overtaken{false};
  Together all(2);
  run_ranks(wired({"tcp", 1}, 2), [&](Rank& rank) {
    Group& group = *rank.channels[0];
    std::vector<std::vector<char>> data(kLarge);
    std::vector<char> small;
    std::vector<OpPtr> ops;
    if (rank.rank == 0) {
      for (size_t i = 0; i < kLarge; ++i) fill(data[i], {0, 1, i, size_t(4) << 20});
      all.wait();
      for (size_t i = 0; i < kLarge; ++i) {
        ops.push_back(send_filled(group, data[i], {0, 1, i, data[i].size()}));
      }
      begun.wait();  // now the receiver has asked for all large messages
      ops.push_back(send(group, small, last));
    } else {
      for (size_t i = 0; i < kLarge; ++i) {
        ops.push_back(receive(group, data[i], 0, i, size_t(4) << 20));
      }
      ops[0]->on_done([&] { begun.count_down(); });
      ops.push_back(receive(group, small, 0, kLarge, last.bytes));
      all.wait();
    }
    for (const OpPtr& op : ops) expect_right(op);
    if (rank.rank == 1) {
      overtaken = ops[kLarge]->times().finished_s < ops[kLarge - 1]->times().finished_s;
    }
    expect_content(small, last);
    for (size_t i = 0; i < kLarge; ++i) expect_content(data[i], {0, 1, i, data[i].size()});
  });
  expect(overtaken, "the small message arrived after the large ones");
}

void times_out() {
  run_ranks(wired({"", 1}, 2), [&](Rank& rank) {
    Group& group = *rank.channels[0];
    std::vector<char> data, other;
    if (rank.rank == 0) {
      const double began = now_s();
      const OpPtr op = receive(group, data, 1, 3, 4096, 0.3);
      const std::string error = error_of(op);
      expect(is<TimeoutError>(op->error()), "wrong error: " + error);
      expect_text(error, "rank 1");
      expect_text(error, "4096 bytes");
      expect(now_s() - began > 0.25 && now_s() - began < 3, "timed out too early or too late");
    } else {
      const std::string error = error_of(receive(group, data, -1, 3, 77));
      expect_text(error, "rank 0");
      expect_text(error, "timed out");
    }
  });
}

// A caller that hears of a time limit may destroy its group at once. The peer hears the reason all
// the same.
void times_out_and_leaves() {
  for (int round = 0; round < 20; ++round) {
    run_ranks(wired({"", 1}, 2), [&](Rank& rank) {
      Group& group = *rank.channels[0];
      std::vector<char> data;
      if (rank.rank == 0) {
        const OpPtr op = receive(group, data, 1, 3, 16, 0.02);
        while (!op->done()) std::this_thread::yield();
        group.close();
      } else {
        expect_text(error_of(receive(group, data, -1, 3, 77)), "timed out");
      }
    });
  }
}

// Messages that a rank sent before it left still arrive; later operations with it fail at once.
void sender_leaves() {
  for (size_t bytes : {size_t(16), size_t(100000)}) {
    run_ranks(wired({"", 1}, 3), [&](Rank& rank) {
      Group& group = *rank.channels[0];
      std::vector<char> data, other;
      if (rank.rank == 1) {
        expect_right(send(group, data, {1, 0, 2, bytes}));
        group.close();
        return;
      }
      if (rank.rank == 2) {  // leaves without a message to rank 0
        group.close();
        return;
      }
      if (bytes < 1000) std::this_thread::sleep_for(std::chrono::milliseconds(100));
      expect_right(receive(group, data, 1, 2, bytes));
      expect_content(data, {1, 0, 2, bytes});
      for (int peer : {1, 2, -1}) {
        const OpPtr op = receive(group, data, peer, 2, bytes);
        const std::string error = error_of(op);
        expect(is<PeerLostError>(op->error()), "wrong error: " + error);
      }
      const OpPtr op = send(group, other, {0, 2, 2, bytes});
      expect(is<PeerLostError>((error_of(op), op->error())), "sent to a rank that has left");
    });
  }
}

void refused() {
  run_ranks(wired({"", 1}, 2), [&](Rank& rank) {
    Group& group = *rank.channels[0];
    for (int peer : {rank.rank, 2, -2}) {
      std::vector<char> data;
      bool thrown = false;
      try {
        receive(group, data, peer, 0, 1);
      } catch (const InvalidRequestError&) {
        thrown = true;
      }
      expect(thrown, "accepted a receive from rank " + std::to_string(peer));
    }
  });
}

}  // namespace

int main(int argc, char** argv) {
  return run_tests(argc, argv,
                   {{"many in flight", many_in_flight},
                    {"one tag in order", one_tag_in_order},
                    {"small ones overtake", small_ones_overtake},
                    {"times out", times_out},
                    {"times out and leaves", times_out_and_leaves},
                    {"sender leaves", sender_leaves},
                    {"refused", refused}});
}
