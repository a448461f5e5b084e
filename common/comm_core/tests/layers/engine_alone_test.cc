// Tests the engine with queues that are not groups: it knows neither ranks nor collectives.
#include <atomic>
#include <deque>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "check.h"
#include "engine/engine.h"

using namespace comm_core;
using namespace comm_core::testing;

namespace {

// A queue whose operations take a number of steps, each noted in `log`.
class Steps : public OpQueue {
 public:
  Steps(Engine& engine, std::string name, int steps, std::string* log)
      : OpQueue(std::move(name), 1, 4), engine_(engine), steps_(steps), log_(log) {
    engine_.call([this] { engine_.add(this); });
  }
  ~Steps() override {
    engine_.call([this] { engine_.remove(this); });
  }

  void enqueue(const OpPtr& op) override {
    op->begin(kNever);
    ops_.push_back(op);
    if (op->spec().priority != 0) engine_.rank_by_priority();
  }
  const Op* head() const override { return ops_.empty() ? nullptr : ops_.front().get(); }
  bool step(bool) override {
    if (steps_ == 0) return false;  // waits for ever
    if (log_ != nullptr) *log_ += name();
    moved_s_ = now_s();
    if (++done_ < steps_) return true;
    done_ = 0;
    end(nullptr);
    return true;
  }
  double moved_s() const override { return moved_s_; }
  bool met() const override { return true; }
  void limit_unsent() override { limits_unsent_ = true; }
  void announce_sleep(bool) override {}
  bool spins() const override { return false; }
  void warn(const std::string&) override {}
  double next_deadline_s(double now) override {
    if (ops_.empty()) return kNever;
    const OpPtr op = ops_.front();
    if (op->state().deadline_s > now) return op->state().deadline_s;
    end(std::make_exception_ptr(TimeoutError(op->describe() + ": timed out")));
    return kNever;
  }
  // Ends the first operation.
  void end(std::exception_ptr error) {
    const OpPtr op = ops_.front();
    ops_.pop_front();
    engine_.complete(op, error);
  }
  bool limits_unsent() const { return limits_unsent_; }

 private:
  Engine& engine_;
  const int steps_;
  std::string* const log_;
  std::deque<OpPtr> ops_;
  int done_ = 0;
  double moved_s_ = 0;
  bool limits_unsent_ = false;
};

struct World {
  Engine engine{Options{}};
  std::vector<std::shared_ptr<Steps>> queues;

  // The engine's thread must not be the last owner of a queue, whose end it would wait for.
  ~World() {
    engine.call([] {});
  }
  std::shared_ptr<Steps> queue(const std::string& name, int steps, std::string* log = nullptr) {
    queues.push_back(std::make_shared<Steps>(engine, name, steps, log));
    return queues.back();
  }
  OpPtr op(const std::shared_ptr<Steps>& queue, OpSpec spec = {}) {
    return std::make_shared<Op>(std::move(spec), &engine, queue);
  }
};

void runs_operations() {
  World world;
  const auto queue = world.queue("a", 3);
  OpSpec spec;
  spec.kind = OpKind::all_reduce;
  spec.dtype = DType::f32;
  char data[400];
  spec.inputs = {{data, sizeof data}};
  const OpPtr op = world.op(queue, std::move(spec));
  op->state().sequence = 7;
  expect(op->describe() == "all_reduce #7 (float32, sum, 400 bytes) on rank 1 of group a",
         op->describe());
  std::atomic<bool> called{false};
  op->on_done([&] { called = true; });
  world.engine.submit(op, false);
  expect(op->wait(60) && op->done() && !op->error(), "did not end well");
  // A wait may end just before the callbacks run.
  for (const double end_s = now_s() + 60; !called && now_s() < end_s;) std::this_thread::yield();
  expect(called, "the callback was not called");
  const OpTimes times = op->times();
  expect(times.enqueued_s <= times.started_s && times.started_s <= times.finished_s, "times");
  const std::vector<Event> events = world.engine.events();
  expect(events.size() == 1 && events[0].ok && events[0].sequence == 7 && events[0].bytes == 400 &&
             events[0].group == queue->number(),
         "another event");
}

void the_most_urgent_queue_goes_first() {
  World world;
  std::string log;
  const auto calm = world.queue("c", 3, &log), urgent = world.queue("u", 3, &log);
  OpSpec first;
  first.priority = 1;
  const OpPtr slow = world.op(calm), fast = world.op(urgent, std::move(first));
  // Within one step of the engine, so that it sees both at the same time.
  world.engine.call([&] {
    world.engine.submit(slow, true);
    world.engine.submit(fast, true);
  });
  expect(slow->wait(60) && fast->wait(60), "hangs");
  expect(log == "uuuccc", "steps in the order " + log);
  expect(calm->limits_unsent() && urgent->limits_unsent(), "sockets may buffer much");
}

void an_operation_times_out() {
  World world;
  OpSpec spec;
  spec.timeout_s = 0.01;
  const auto queue = world.queue("a", 0);
  const OpPtr op = world.op(queue, std::move(spec));
  world.engine.submit(op, true);
  expect(op->wait(60), "hangs");
  expect(is<TimeoutError>(op->error()), "another error");
}

void a_wait_ends_before_its_operation() {
  World world;
  OpSpec spec;
  spec.timeout_s = 60;
  const auto queue = world.queue("a", 0);
  const OpPtr op = world.op(queue, std::move(spec));
  world.engine.submit(op, false);
  expect(!op->wait(0.01) && !op->done(), "waited to the end");
  world.engine.call([&] { queue->end(nullptr); });
  expect(op->done(), "has not ended");
}

void epilogues_run_in_parts_and_memory_dies_in_the_caller() {
  World world;
  int parts = 0;
  std::thread::id where;
  OpSpec spec;
  spec.epilogue = [&] { return ++parts == 3; };
  spec.keep_alive =
      std::shared_ptr<void>(nullptr, [&](void*) { where = std::this_thread::get_id(); });
  const OpPtr op = world.op(world.queue("a", 1), std::move(spec));
  world.engine.submit(op, true);
  expect(op->wait(60), "hangs");
  expect(parts == 3, "the epilogue ran " + std::to_string(parts) + " times");
  expect(where == std::this_thread::get_id(), "destroyed elsewhere");
}

void a_call_rethrows() {
  World world;
  std::string text;
  try {
    world.engine.call([] { throw InvalidRequestError("no"); });
  } catch (const InvalidRequestError& error) {
    text = error.what();
  }
  expect(text == "no", "threw nothing");
  world.engine.stop();
  bool ran = false;
  world.engine.call([&] { ran = true; });
  expect(ran, "a caller does not drive a stopped engine");
}

}  // namespace

int main(int argc, char** argv) {
  return run_tests(argc, argv,
                   {{"runs operations", runs_operations},
                    {"the most urgent queue goes first", the_most_urgent_queue_goes_first},
                    {"an operation times out", an_operation_times_out},
                    {"a wait ends before its operation", a_wait_ends_before_its_operation},
                    {"epilogues run in parts, and memory dies in the caller",
                     epilogues_run_in_parts_and_memory_dies_in_the_caller},
                    {"a call rethrows", a_call_rethrows}});
}
