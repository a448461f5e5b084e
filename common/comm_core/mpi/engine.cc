#include "engine.h"

#ifdef __linux__
#include <sys/prctl.h>
#endif

#include <algorithm>
#include <future>

#include "datatypes.h"
#include "library.h"

namespace comm_core::mpi {
namespace {

using std::chrono::microseconds;

// Polling without pause costs a core that may be computing; small messages end within this time.
constexpr microseconds kSpin{50};
constexpr microseconds kShortestPause{20};
constexpr microseconds kLongestPause{500};

// A pause is this part of the time since the last news, so that it delays an operation little.
constexpr int kPausePart = 8;

// A poll in which nothing happens takes about a microsecond; one that moved data, longer. MPI moves
// large messages in many steps, all of them inside such polls.
constexpr microseconds kBusyPoll{10};

}  // namespace

Engine& Engine::get() {
  static Engine* const engine = new Engine;
  return *engine;
}

Engine::Engine()
    : futures_([this](WorkPtr work) {
        const std::lock_guard lock(mutex_);
        spent_.push_back(std::move(work));
      }),
      requests_([this](WorkPtr work) {
        const std::lock_guard lock(mutex_);
        spent_.push_back(std::move(work));
      }) {}

void Engine::open() {
  const std::lock_guard opening(open_mutex_);
  {
    const std::lock_guard lock(mutex_);
    TORCH_CHECK_WITH(DistBackendError, state_ != State::ended,
                     "MPI has ended in this process and cannot start again");
    if (state_ == State::running) return;
    state_ = State::running;
  }
  thread_ = std::thread([this] { run(); });
  try {
    call([this] {
      owns_library_ = start_library();
      check(MPI_Comm_rank(MPI_COMM_WORLD, &world_rank_), "MPI_Comm_rank");
      check(MPI_Comm_size(MPI_COMM_WORLD, &world_size_), "MPI_Comm_size");
      create_types();
    });
  } catch (...) {
    finalize(/*failed=*/true, std::chrono::milliseconds(0));
    throw;
  }
}

void Engine::push(Item item) {
  {
    const std::lock_guard lock(mutex_);
    TORCH_CHECK_WITH(DistBackendError, state_ == State::running, "MPI has ended in this process");
    queue_.push_back(std::move(item));
  }
  wake_.notify_one();
}

void Engine::submit(WorkPtr work) {
  drop_spent();
  push({std::move(work), nullptr});
}

void Engine::call(std::function<void()> task) {
  auto packaged = std::make_shared<std::packaged_task<void()>>(std::move(task));
  auto done = packaged->get_future();
  push({{}, [packaged] { (*packaged)(); }});
  done.get();
}

void Engine::post(std::function<void()> task) {
  {
    const std::lock_guard lock(mutex_);
    if (state_ != State::running) return;
    queue_.push_back({{}, std::move(task)});
  }
  wake_.notify_one();
}

void Engine::drop_spent() {
  std::vector<WorkPtr> spent;
  const std::lock_guard lock(mutex_);
  spent.swap(spent_);
}

size_t Engine::finalize(bool failed, std::chrono::milliseconds grace) {
  {
    const std::lock_guard lock(mutex_);
    if (state_ != State::running) return 0;
    state_ = State::ended;
    queue_.push_back({{}, [this, failed, grace] {
                        stopping_ = true;
                        failed_ = failed;
                        stop_at_ = MpiWork::Clock::now() + grace;
                      }});
  }
  wake_.notify_one();
  thread_.join();
  futures_.stop();
  drop_spent();
  return requests_.size();
}

std::vector<Engine::Item> Engine::take() {
  std::vector<Item> items;
  std::unique_lock lock(mutex_);
  const auto has_item = [this] { return !queue_.empty(); };
  if (requests_.empty()) {
    if (!stopping_) wake_.wait(lock, has_item);
  } else if (pause_.count() > 0) {
    wake_.wait_for(lock, pause_, has_item);
  }
  items.swap(queue_);
  return items;
}

void Engine::run() {
  block_signals();
#ifdef __linux__
  // Otherwise Linux rounds the short pauses up by 50 us.
  prctl(PR_SET_TIMERSLACK, 1000UL, 0UL, 0UL, 0UL);
#endif
  while (true) {
    std::vector<Item> items = take();
    for (Item& item : items) {
      if (item.work) {
        requests_.begin(std::move(item.work));
      } else {
        item.task();
      }
    }
    if (stopping_ && (requests_.empty() || MpiWork::Clock::now() >= stop_at_)) break;
    poll(!items.empty());
  }
  end();
}

void Engine::poll(bool has_news) {
  const auto before = MpiWork::Clock::now();
  const bool ended = requests_.poll();
  const auto now = MpiWork::Clock::now();
  if (has_news || ended || now - before > kBusyPoll) last_news_ = now;
  const auto quiet = now - last_news_;
  if (quiet < kSpin) {
    pause_ = std::chrono::nanoseconds(0);
    return;
  }
  pause_ = std::clamp<std::chrono::nanoseconds>(quiet / kPausePart, kShortestPause, kLongestPause);
  requests_.expire(now);
}

void Engine::end() {
  if (!library_usable()) return;
  if (!requests_.empty()) return;
  free_types();
  if (owns_library_ && !failed_) end_library();
}

}  // namespace comm_core::mpi
