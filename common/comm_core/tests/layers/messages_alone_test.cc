// Tests messages and windows over lanes in memory, without a group and without an engine.
#include <random>

#include "base/clock.h"
#include "check.h"
#include "engine/queue.h"
#include "memory_lanes.h"
#include "messages/messenger.h"

using namespace comm_core;
using namespace comm_core::testing;

namespace {

constexpr size_t kEager = 100;

// Gives operations the name of their group; nothing runs them.
class NoQueue : public OpQueue {
 public:
  using OpQueue::OpQueue;
  void enqueue(const OpPtr&) override {}
  const Op* head() const override { return nullptr; }
  bool step(bool) override { return false; }
  double moved_s() const override { return 0; }
  bool met() const override { return false; }
  void limit_unsent() override {}
  void announce_sleep(bool) override {}
  bool spins() const override { return false; }
  void warn(const std::string&) override {}
  double next_deadline_s(double) override { return kNever; }
};

// A connection that has arrived over a wire.
class FromWire : public Arrival {
 public:
  FromWire(Wires& wires, int from, int to) : wires_(wires), from_(from), to_(to) {}
  std::unique_ptr<Lane> lane(std::string peer, const Watching& watching) override {
    watcher = watching.watcher;
    return wires_.lane(from_, to_, peer);
  }
  Watcher* watcher = nullptr;

 private:
  Wires& wires_;
  const int from_, to_;
};

struct Member {
  std::shared_ptr<OpQueue> queue;
  std::unique_ptr<Messenger> messenger;
  std::map<const Op*, std::exception_ptr> ended;  // with its error, or null
  std::exception_ptr failure;                     // of the group
};

class Members {
 public:
  Members(int size, size_t room) : wires_(room), members_(size_t(size)) {
    std::vector<std::string> labels;
    for (int r = 0; r < size; ++r) labels.push_back("rank " + std::to_string(r));
    for (int r = 0; r < size; ++r) {
      Member& member = members_[size_t(r)];
      member.queue = std::make_shared<NoQueue>("g", r, size);
      member.messenger = std::make_unique<Messenger>(MessageGroup{
          r, labels, kEager, poller_,
          [this, r](int to, const Watching& watching) {
            watchers_.push_back(watching.watcher);
            connected_.emplace_back(r, to);
            return wires_.lane(r, to, "rank " + std::to_string(to));
          },
          [&member](const OpPtr& op, const std::exception_ptr& error) {
            member.ended[op.get()] = error;
          },
          [&member](const std::exception_ptr& error) { member.failure = error; },
          [](const std::string&) {}, [](const std::exception_ptr& error) { return error; }});
    }
  }

  Member& operator[](int rank) { return members_[size_t(rank)]; }
  Wires& wires() { return wires_; }

  OpPtr start(int rank, OpSpec spec) {
    Member& member = (*this)[rank];
    auto op = std::make_shared<Op>(std::move(spec), nullptr, member.queue);
    op->begin(60);
    member.messenger->start(op);
    return op;
  }

  // Lets every connection deliver what fits into the wires. Returns whether bytes have moved.
  bool turn() {
    const uint64_t before = moved();
    for (const auto& [from, to] : std::exchange(connected_, {})) {
      FromWire arrival(wires_, from, to);
      (*this)[to].messenger->enter(from, arrival);
      watchers_.push_back(arrival.watcher);
    }
    for (size_t i = 0; i < watchers_.size(); ++i) watchers_[i]->on_event();
    return moved() != before || !connected_.empty();
  }

  // Delivers until nothing moves.
  void run() {
    while (turn()) {
    }
  }

  bool ended(int rank, const OpPtr& op) { return (*this)[rank].ended.count(op.get()) > 0; }
  void expect_well(int rank, const OpPtr& op) {
    expect(ended(rank, op) && !(*this)[rank].ended[op.get()], op->describe() + " did not end well");
  }
  std::string error(int rank, const OpPtr& op) {
    expect(ended(rank, op) && (*this)[rank].ended[op.get()], op->describe() + " did not fail");
    return message_of((*this)[rank].ended[op.get()]);
  }

 private:
  uint64_t moved() {
    uint64_t bytes = 0;
    for (int from = 0; from < int(members_.size()); ++from) {
      for (int to = 0; to < int(members_.size()); ++to) {
        bytes += wires_.at(from, to).written + wires_.at(from, to).read;
      }
    }
    return bytes;
  }

  Poller poller_;
  Wires wires_;
  std::vector<Watcher*> watchers_;
  std::vector<std::pair<int, int>> connected_;
  std::vector<Member> members_;
};

OpSpec spec_of(OpKind kind, int peer, std::string& data, uint64_t tag = 0) {
  OpSpec spec;
  spec.kind = kind;
  spec.peer = peer;
  spec.tag = tag;
  if (kind == OpKind::send || kind == OpKind::put) spec.inputs = {{data.data(), data.size()}};
  if (kind == OpKind::recv || kind == OpKind::get) spec.outputs = {{data.data(), data.size()}};
  return spec;
}

std::string text_of(size_t bytes, unsigned seed) {
  std::mt19937 random(seed);
  std::string text(bytes, 0);
  for (char& c : text) c = char(random());
  return text;
}

// Small and large messages, received before and after they are sent, whose tags go their own ways.
void messages_arrive() {
  for (size_t bytes : {size_t(0), size_t(1), kEager, kEager + 1, size_t(2000000)}) {
    for (bool receive_first : {true, false}) {
      Members members(2, 3000);
      std::string first = text_of(bytes, 1), second = text_of(bytes, 2);
      std::string got_first(bytes, '?'), got_second(bytes, '?');
      std::vector<OpPtr> sends, receives;
      const auto receive = [&] {
        receives.push_back(members.start(1, spec_of(OpKind::recv, -1, got_second, 8)));
        receives.push_back(members.start(1, spec_of(OpKind::recv, 0, got_first, 7)));
      };
      if (receive_first) receive();
      sends.push_back(members.start(0, spec_of(OpKind::send, 1, first, 7)));
      sends.push_back(members.start(0, spec_of(OpKind::send, 1, second, 8)));
      members.run();
      if (!receive_first) receive();
      members.run();
      for (const OpPtr& op : sends) members.expect_well(0, op);
      for (const OpPtr& op : receives) {
        members.expect_well(1, op);
        expect(op->source() == 0, "another source");
      }
      expect(got_first == first && got_second == second, "other bytes");
    }
  }
}

void a_large_message_waits_for_its_receiver() {
  Members members(2, 3000);
  std::string data = text_of(5000, 1), got(5000, '?');
  const OpPtr send = members.start(0, spec_of(OpKind::send, 1, data));
  members.run();
  expect(!members.ended(0, send), "ended before it was asked for");
  expect(members.wires().at(0, 1).written == sizeof(MessageHeader), "sent before it was asked for");
  members.start(1, spec_of(OpKind::recv, 0, got));
  members.run();
  members.expect_well(0, send);
  expect(got == data, "other bytes");
}

void small_messages_overtake_large_ones() {
  Members members(2, 3000);
  std::string large = text_of(3000000, 1), small = text_of(10, 2), got(3000000, '?'),
              first(10, '?');
  const OpPtr slow = members.start(1, spec_of(OpKind::recv, 0, got, 1));
  members.start(0, spec_of(OpKind::send, 1, large, 1));
  while (members.wires().at(0, 1).written < 600000) expect(members.turn(), "stopped");
  const OpPtr fast = members.start(1, spec_of(OpKind::recv, 0, first, 2));
  members.start(0, spec_of(OpKind::send, 1, small, 2));
  while (!members.ended(1, fast)) expect(members.turn(), "stopped");
  expect(!members.ended(1, slow), "the small message came last");
  members.run();
  members.expect_well(1, fast);
  members.expect_well(1, slow);
  expect(got == large && first == small, "other bytes");
}

void sizes_that_differ_fail_the_group() {
  Members members(2, 3000);
  std::string data(10, 'x'), got(11, '?');
  members.start(1, spec_of(OpKind::recv, 0, got));
  members.start(0, spec_of(OpKind::send, 1, data));
  members.run();
  expect(is<MismatchError>(members[1].failure), "the group did not fail");
  expect_text(message_of(members[1].failure), "expects 11 bytes of uint8, rank 0 sends 10 bytes");
}

void a_lost_peer_fails_what_needs_it() {
  Members members(3, 3000);
  std::string data(10, 'x'), from_lost(10, '?'), from_any(10, '?'), from_other(10, '?');
  const OpPtr lost = members.start(1, spec_of(OpKind::recv, 0, from_lost, 1));
  const OpPtr any = members.start(1, spec_of(OpKind::recv, -1, from_any, 2));
  const OpPtr other = members.start(1, spec_of(OpKind::recv, 2, from_other, 3));
  members[1].messenger->left(0);
  expect_text(members.error(1, lost), "on rank 1 of group g: lost rank 0: it left the group");
  expect(!members.ended(1, any) && !members.ended(1, other), "others failed, too");
  members.start(2, spec_of(OpKind::send, 1, data, 3));
  members.run();
  members.expect_well(1, other);
  members[1].messenger->lost(2, std::make_exception_ptr(PeerLostError("lost rank 2")));
  expect_text(members.error(1, any), "lost rank 2");
}

void a_late_message_times_out() {
  Members members(2, 3000);
  std::string got(10, '?');
  OpSpec spec = spec_of(OpKind::recv, 0, got);
  spec.timeout_s = 5;
  const OpPtr op = members.start(1, std::move(spec));
  const double deadline = op->times().started_s + 5;
  expect(members[1].messenger->next_deadline_s(deadline - 1) == deadline, "another deadline");
  expect(members[1].messenger->next_deadline_s(deadline + 1) == kNever, "another deadline");
  expect_text(members.error(1, op), "timed out waiting for rank 0");
  expect(is<TimeoutError>(members[1].failure), "the group did not fail");
}

void windows() {
  Members members(3, 3000);
  std::string memory(4000, '.');
  members[1].messenger->windows().add(5, {memory.data(), memory.size()}, 2, DType::u8);
  std::string data = text_of(1500, 1), got(1500, '?');
  const auto at = [](OpSpec spec) {
    spec.window = 5;
    spec.slot = 1;
    spec.offset = 100;
    return spec;
  };
  const OpPtr put = members.start(0, at(spec_of(OpKind::put, 1, data)));
  members.run();
  members.expect_well(0, put);
  expect(memory.substr(2100, 1500) == data && memory.substr(0, 2100) == std::string(2100, '.'),
         "other memory");
  const OpPtr get = members.start(2, at(spec_of(OpKind::get, 1, got)));
  members.run();
  members.expect_well(2, get);
  expect(got == data, "other bytes");
  OpSpec wrong = at(spec_of(OpKind::get, 1, got));
  wrong.offset = 501;
  const OpPtr refused = members.start(2, std::move(wrong));
  members.run();
  expect_text(members.error(2, refused), "rank 1 refused: the slots of its window have 2000 bytes");
}

void a_lock_goes_to_one_at_a_time() {
  Members members(3, 3000);
  std::string memory(10, '.'), none;
  members[1].messenger->windows().add(0, {memory.data(), memory.size()}, 1, DType::u8);
  const OpPtr first = members.start(0, spec_of(OpKind::lock, 1, none));
  members.run();
  const OpPtr second = members.start(2, spec_of(OpKind::lock, 1, none));
  members.run();
  members.expect_well(0, first);
  expect(!members.ended(2, second), "two hold the lock");
  members[1].messenger->lost(0, std::make_exception_ptr(PeerLostError("lost rank 0")));
  members.run();
  members.expect_well(2, second);
}

}  // namespace

int main(int argc, char** argv) {
  return run_tests(
      argc, argv,
      {{"messages arrive", messages_arrive},
       {"a large message waits for its receiver", a_large_message_waits_for_its_receiver},
       {"small messages overtake large ones", small_messages_overtake_large_ones},
       {"sizes that differ fail the group", sizes_that_differ_fail_the_group},
       {"a lost peer fails what needs it", a_lost_peer_fails_what_needs_it},
       {"a late message times out", a_late_message_times_out},
       {"windows", windows},
       {"a lock goes to one at a time", a_lock_goes_to_one_at_a_time}});
}
