// Tests collectives over lanes in memory, without a group and without an engine: the ranks of one
// thread take turns.
#include "check.h"
#include "collectives/collectives.h"
#include "memory_lanes.h"

using namespace comm_core;
using namespace comm_core::testing;

namespace {

// What a rank of a group has.
struct Member {
  std::vector<PeerInfo> peers;
  Topology topology;
  Options options;
  ScratchPool scratch;
  std::unique_ptr<Lanes> lanes;
  Stages stages;
  size_t stage = 0;

  // Returns whether it has moved, until all its stages are done.
  bool step() {
    if (stage == stages.size()) return false;
    const Progress progress = stages[stage]->step();
    stage += progress == Progress::done;
    return progress != Progress::blocked;
  }
};

class Members {
 public:
  // Wires hold `room` bytes, so that transfers stop in the middle.
  Members(int size, size_t room) : wires_(room) {
    std::vector<PeerInfo> peers{size_t(size)};
    for (int r = 0; r < size; ++r) {
      peers[size_t(r)].host_id = std::to_string(r);
      peers[size_t(r)].label = "rank " + std::to_string(r);
    }
    for (int r = 0; r < size; ++r) {
      Member& member = *members_.emplace_back(std::make_unique<Member>());
      member.peers = peers;
      member.topology = Topology::of(peers);
      member.options.tcp_chunk = 16 << 10;
      member.lanes = std::make_unique<Lanes>(
          member.peers, size, member.options.tcp_chunk,
          [this, r](int to) { return wires_.lane(r, to, "rank " + std::to_string(to)); });
      for (int from = 0; from < size; ++from) {
        if (from != r) member.lanes->enter(from, wires_.lane(from, r, peers[size_t(from)].label));
      }
    }
  }

  int size() const { return int(members_.size()); }
  Member& operator[](int rank) { return *members_[size_t(rank)]; }
  Wires& wires() { return wires_; }

  void begin(int rank, const OpSpec& spec) {
    Member& member = (*this)[rank];
    FrameHeader frame;
    frame.kind = spec.kind;
    frame.dtype = spec.dtype;
    frame.op = spec.op;
    frame.root = spec.root;
    frame.sequence = ++begun_[rank];
    frame.total_bytes = total_bytes(spec, size());
    member.lanes->begin();
    const GroupView view{rank,          member.options, member.topology,
                         *member.lanes, nullptr,        member.scratch};
    member.stages = plan(view, spec, frame);
    member.stage = 0;
  }

  // Lets all ranks take turns until none of them can move.
  void run() {
    for (bool moved = true; moved;) {
      moved = false;
      for (auto& member : members_) moved = member->step() || moved;
    }
  }

  void expect_done() {
    for (auto& member : members_) {
      expect(member->stage == member->stages.size(),
             "stopped: " + (member->stage < member->stages.size()
                                ? member->stages[member->stage]->status()
                                : std::string()));
    }
  }

 private:
  Wires wires_;
  std::vector<std::unique_ptr<Member>> members_;
  std::map<int, uint64_t> begun_;
};

using Numbers = std::vector<int32_t>;

ConstSpan read(const Numbers& numbers, size_t begin, size_t count) {
  return {reinterpret_cast<const char*>(numbers.data() + begin), count * 4};
}
Span write(Numbers& numbers, size_t begin, size_t count) {
  return {reinterpret_cast<char*>(numbers.data() + begin), count * 4};
}

OpSpec spec_of(OpKind kind) {
  OpSpec spec;
  spec.kind = kind;
  spec.dtype = DType::i32;
  return spec;
}

int32_t value(int rank, size_t i) { return int32_t(i * 7 + size_t(rank) * 1000003); }

// Runs one collective of blocks of `count` elements and checks all results.
void check_one(OpKind kind, int n, size_t count, size_t room) {
  Members members(n, room);
  const size_t blocks = size_t(n), whole = blocks * count;
  std::vector<Numbers> in(blocks, Numbers(whole)), out(blocks, Numbers(whole, -1));
  Numbers sum(whole);
  for (int r = 0; r < n; ++r) {
    for (size_t i = 0; i < whole; ++i) sum[i] += in[size_t(r)][i] = value(r, i);
  }
  const int root = n - 1;
  for (int r = 0; r < n; ++r) {
    const size_t me = size_t(r);
    OpSpec spec = spec_of(kind);
    if (kind == OpKind::broadcast) {
      spec.root = root;
      if (r == root) out[me] = in[me];
      spec.outputs = {write(out[me], 0, whole)};
    } else if (kind == OpKind::all_reduce) {
      spec.inputs = {read(in[me], 0, whole)};
      spec.outputs = {write(out[me], 0, whole)};
    } else {
      for (size_t b = 0; b < blocks; ++b) {
        if (kind != OpKind::all_gather) spec.inputs.push_back(read(in[me], b * count, count));
        if (kind != OpKind::reduce_scatter)
          spec.outputs.push_back(write(out[me], b * count, count));
      }
      if (kind == OpKind::all_gather) spec.inputs = {read(in[me], me * count, count)};
      if (kind == OpKind::reduce_scatter) spec.outputs = {write(out[me], me * count, count)};
    }
    members.begin(r, spec);
  }
  members.run();
  members.expect_done();
  for (size_t r = 0; r < blocks; ++r) {
    for (size_t i = 0; i < whole; ++i) {
      const size_t block = i / std::max<size_t>(count, 1);
      int32_t right = sum[i];
      if (kind == OpKind::broadcast) right = in[size_t(root)][i];
      if (kind == OpKind::all_gather) right = in[block][i];
      if (kind == OpKind::all_to_all) right = in[block][r * count + i % count];
      if (kind == OpKind::reduce_scatter && block != r) right = -1;
      expect(out[r][i] == right, std::string(name(kind)) + " on " + std::to_string(n) +
                                     " ranks: element " + std::to_string(i) + " of rank " +
                                     std::to_string(r));
    }
  }
}

void results() {
  const OpKind kinds[] = {OpKind::all_reduce, OpKind::reduce_scatter, OpKind::all_gather,
                          OpKind::broadcast, OpKind::all_to_all};
  for (OpKind kind : kinds) {
    for (int n : {1, 2, 3, 9}) {
      for (size_t count : {0, 5, 6000, 20000}) check_one(kind, n, count, 5000);
    }
  }
}

void ranks_that_disagree() {
  Members members(2, 1000);
  Numbers numbers(8), result(8);
  OpSpec mine = spec_of(OpKind::all_reduce), theirs = spec_of(OpKind::broadcast);
  mine.inputs = {read(numbers, 0, 8)};
  mine.outputs = theirs.outputs = {write(result, 0, 8)};
  members.begin(0, theirs);
  members.begin(1, mine);
  std::string text;
  try {
    members.run();
  } catch (const MismatchError& error) {
    text = error.what();
  }
  expect_text(text,
              "the ranks disagree: here all_reduce #1 (int32, sum, 32 bytes), rank 0 called "
              "broadcast #1 (int32, root 0, 32 bytes)");
}

void a_held_collective_sends_nothing() {
  Members members(2, 1000);
  std::vector<Numbers> numbers(2, Numbers(8, 1)), results(2, Numbers(8));
  for (int r = 0; r < 2; ++r) {
    OpSpec spec = spec_of(OpKind::all_reduce);
    spec.inputs = {read(numbers[size_t(r)], 0, 8)};
    spec.outputs = {write(results[size_t(r)], 0, 8)};
    members.begin(r, spec);
  }
  members[0].lanes->hold(true);
  members.run();
  expect(members.wires().at(0, 1).written == 0, "sent while held");
  expect(members[0].lanes->met() && !members[1].lanes->met(), "met the wrong rank");
  expect_text(members[1].stages[0]->status(), "waiting for rank 0 (0 of 32 bytes received)");
  members[0].lanes->hold(false);
  members.run();
  members.expect_done();
  expect(results[1] == Numbers(8, 2), "another sum");
}

void a_lost_rank() {
  Members members(3, 1000);
  std::vector<Numbers> numbers(3, Numbers(8, 1)), results(3, Numbers(8));
  for (int r = 0; r < 2; ++r) {
    OpSpec spec = spec_of(OpKind::all_reduce);
    spec.inputs = {read(numbers[size_t(r)], 0, 8)};
    spec.outputs = {write(results[size_t(r)], 0, 8)};
    members.begin(r, spec);
  }
  members.run();
  members.wires().at(2, 0).lost = true;
  std::string text;
  try {
    members.run();
  } catch (const PeerLostError& error) {
    text = error.what();
  }
  expect_text(text, "lost rank 2");
}

}  // namespace

int main(int argc, char** argv) {
  return run_tests(argc, argv,
                   {{"results", results},
                    {"ranks that disagree", ranks_that_disagree},
                    {"a held collective sends nothing", a_held_collective_sends_nothing},
                    {"a lost rank", a_lost_rank}});
}
