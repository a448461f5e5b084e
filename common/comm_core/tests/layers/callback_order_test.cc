// Tests the order of a group's collectives when callbacks of futures start collectives, too.
#include <algorithm>
#include <map>
#include <random>

#include "base/clock.h"
#include "check.h"
#include "group/callback_order.h"

using namespace comm_core;
using namespace comm_core::testing;

namespace {

constexpr uint64_t kProgram = CallbackOrder::kProgram;

OpPtr new_op() { return std::make_shared<Op>(OpSpec{}, nullptr, nullptr); }

// torch's PowerSGD hook: a callback of each bucket's collective starts the next one, while the
// program has already started the first of the next bucket.
void a_later_collective_waits_for_callbacks() {
  CallbackOrder order;
  const OpPtr first = new_op(), of_callback = new_op(), later = new_op();
  expect(!order.keep(1, kProgram, first, 0), "the first one waits");
  order.open(1, kProgram);
  expect(order.keep(2, kProgram, later, 5), "does not wait for the callbacks");
  expect(order.deadline_s() == 5, "another deadline");
  expect(!order.keep(3, 1, of_callback, 0), "that of the callback waits");
  expect(order.close(1) == std::vector<OpPtr>{later}, "does not start after the callbacks");
  expect(order.deadline_s() == kNever && !order.keep(4, kProgram, new_op(), 0), "still waits");
}

void callbacks_of_callbacks_come_first() {
  CallbackOrder order;
  const OpPtr inner = new_op(), later_inner = new_op(), later = new_op();
  order.open(1, kProgram);
  expect(order.keep(2, kProgram, later, 0), "does not wait");
  expect(!order.keep(3, 1, inner, 0), "that of the callback waits");
  order.open(3, 1);
  expect(order.keep(4, 1, later_inner, 0), "does not wait for the inner callbacks");
  expect(order.close(1).empty(), "starts before the inner callbacks");
  expect(order.close(3) == std::vector<OpPtr>({later_inner, later}), "another order");
}

void what_waits_can_have_callbacks_itself() {
  CallbackOrder order;
  const OpPtr second = new_op(), third = new_op();
  order.open(1, kProgram);
  expect(order.keep(2, kProgram, second, 0), "does not wait");
  order.open(2, kProgram);
  expect(order.keep(3, kProgram, third, 0), "does not wait");
  expect(order.close(1) == std::vector<OpPtr>{second}, "the third starts with the second");
  expect(order.close(2) == std::vector<OpPtr>{third}, "the third does not start");
}

void the_end_frees_all() {
  CallbackOrder order;
  const OpPtr waiting = new_op();
  order.open(1, kProgram);
  expect(order.keep(2, kProgram, waiting, 3), "does not wait");
  expect(order.end() == std::vector<OpPtr>{waiting}, "lost an operation");
  expect(order.deadline_s() == kNever && !order.keep(3, kProgram, new_op(), 0), "still waits");
  expect(order.close(1).empty(), "starts twice");
}

// A program that starts operations. Those with a future have callbacks, which are programs, too.
struct Program {
  struct Start {
    int label;
    bool has_future = false;
    std::shared_ptr<Program> callbacks;
  };
  std::vector<Start> starts;
};

std::shared_ptr<Program> random_program(std::mt19937& random, int depth, int& label) {
  auto program = std::make_shared<Program>();
  for (unsigned i = random() % 4 + (depth == 0 ? 4 : 0); i > 0; --i) {
    Program::Start start{label++, depth < 3 && random() % 2 == 0, nullptr};
    if (start.has_future) start.callbacks = random_program(random, depth + 1, label);
    program->starts.push_back(start);
  }
  return program;
}

// The order of a program whose callbacks run at once.
void run_at_once(const Program& program, std::vector<int>& order) {
  for (const Program::Start& start : program.starts) {
    order.push_back(start.label);
    if (start.has_future) run_at_once(*start.callbacks, order);
  }
}

// A rank, on which the program and its callbacks take their steps in a random order.
class Rank {
 public:
  Rank(const Program& program, unsigned seed) : random_(seed) {
    running_.push_back({&program, kProgram});
  }

  std::vector<int> run() {
    while (!running_.empty()) {
      const size_t i = random_() % running_.size();
      Thread& thread = running_[i];
      if (thread.next < thread.program->starts.size()) {
        submit(thread.program->starts[thread.next++], thread.context);
        continue;
      }
      const uint64_t context = thread.context;
      running_.erase(running_.begin() + long(i));
      if (context == kProgram) continue;
      for (const OpPtr& op : order_.close(context)) start(op.get());
    }
    return started_;
  }

 private:
  struct Thread {
    const Program* program;
    uint64_t context;
    size_t next = 0;
  };
  struct Submitted {
    const Program::Start* start;
    uint64_t number;
  };

  void submit(const Program::Start& what, uint64_t context) {
    const OpPtr op = ops_.emplace_back(new_op());
    const uint64_t number = ops_.size();
    submitted_[op.get()] = {&what, number};
    const bool waits = order_.keep(number, context, op, kNever);
    if (what.has_future) order_.open(number, context);
    if (!waits) start(op.get());
  }

  // Its callbacks run from now on, some steps later.
  void start(const Op* op) {
    const auto [what, number] = submitted_.at(op);
    started_.push_back(what->label);
    if (what->has_future) running_.push_back({what->callbacks.get(), number});
  }

  std::mt19937 random_;
  CallbackOrder order_;
  std::vector<Thread> running_;
  std::vector<OpPtr> ops_;
  std::map<const Op*, Submitted> submitted_;
  std::vector<int> started_;
};

void all_ranks_keep_the_order_of_callbacks_that_run_at_once() {
  std::mt19937 random(1);
  size_t starts = 0;
  for (int round = 0; round < 500; ++round) {
    int label = 0;
    const auto program = random_program(random, 0, label);
    std::vector<int> right;
    run_at_once(*program, right);
    starts += right.size();
    for (int rank = 0; rank < 4; ++rank) {
      expect(Rank(*program, unsigned(random())).run() == right,
             "another order in round " + std::to_string(round));
    }
  }
  expect(starts > 5000, "the programs are short");
}

}  // namespace

int main(int argc, char** argv) {
  return run_tests(
      argc, argv,
      {{"a later collective waits for callbacks", a_later_collective_waits_for_callbacks},
       {"callbacks of callbacks come first", callbacks_of_callbacks_come_first},
       {"what waits can have callbacks itself", what_waits_can_have_callbacks_itself},
       {"the end frees all", the_end_frees_all},
       {"all ranks keep the order of callbacks that run at once",
        all_ranks_keep_the_order_of_callbacks_that_run_at_once}});
}
