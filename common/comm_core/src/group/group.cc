#include "group/group.h"

#include <algorithm>
#include <thread>

#include "base/clock.h"
#include "collectives/collectives.h"
#include "group/control.h"
#include "messages/messenger.h"

namespace comm_core {
namespace {

// Seconds to wait for the reason of a lost peer. A rank that fails reports why and may exit at
// once, so its end can be noticed before its report.
constexpr double kReasonGraceS = 0.25;

// A group whose peer has ended without a farewell fails when no collective has progressed for so
// many seconds: what the peer sent before its end may still arrive.
constexpr double kLostGraceS = 0.25;

// A collective that takes longer is reported to rank 0, in case another rank never calls it.
constexpr double kShowAfterS = 1.0;

}  // namespace

Group::~Group() { close(); }

void Group::enqueue(const OpPtr& op) {
  if (error_ || closed_) {
    const auto destroyed = std::make_exception_ptr(AbortedError("the group was destroyed"));
    const auto error = error_ ? error_ : destroyed;
    engine_->complete(op, with_context(error, op->describe() + ": "));
    return;
  }
  if (!point_to_point(op->spec().kind)) {
    queue_.push_back(op);
    if (op->spec().priority != 0) engine_->rank_by_priority();
    for (size_t r = 0; r < shown_.size() && !error_; ++r) compare(int(r), shown_[r]);
    return;
  }
  if (op->state().held) {
    held_messages_.push_back(op);
  } else {
    start_message(op);
  }
}

void Group::release(const OpPtr& op) {
  engine_->run_soon([this, op] {
    op->state().held = false;
    const auto found = std::find(held_messages_.begin(), held_messages_.end(), op);
    if (found == held_messages_.end()) return;
    held_messages_.erase(found);
    if (!op->done()) start_message(op);
  });
}

std::exception_ptr Group::error() {
  std::exception_ptr error;
  engine_->call([&] { error = error_; });
  return error;
}

GroupView Group::view() {
  return {rank(), engine_->options(), topology_, lanes_, local_.get(), scratch_};
}

std::unique_ptr<Messenger> Group::messenger() {
  std::vector<std::string> labels;
  for (const PeerInfo& peer : peers_) labels.push_back(peer.label);
  MessageGroup group{
      rank(),
      std::move(labels),
      engine_->options().tcp_eager,
      engine_->poller(),
      [this](int peer, const Watching& watching) {
        return connect(peer, LaneKind::messages, watching);
      },
      [this](const OpPtr& op, const std::exception_ptr& error) { engine_->complete(op, error); },
      [this](const std::exception_ptr& error) { fail(error, true); },
      [this](const std::string& reason) { engine_->warn(reason); },
      [this](const std::exception_ptr& error) { return explained(error); }};
  return std::make_unique<Messenger>(std::move(group));
}

void Group::start_message(const OpPtr& op) {
  op->begin(timeout_s_);
  messenger_->start(op);
}

// Throws PeerLostError if a rank has left before `op`. A rank may leave while others still run an
// operation that is finished for it, but no operation can finish without its part.
void Group::expect_everybody(const Op& op) const {
  for (size_t r = 0; r < finished_by_.size(); ++r) {
    if (op.state().sequence <= finished_by_[r]) continue;
    throw PeerLostError("lost " + peers_[r].label + ": it left the group after operation #" +
                        std::to_string(finished_by_[r]));
  }
}

void Group::peer_left(int peer, uint64_t finished) {
  finished_by_[size_t(peer)] = finished;
  messenger_->left(peer);
  if (queue_.empty()) return;
  try {
    expect_everybody(*queue_.front());
  } catch (const PeerLostError&) {
    fail(std::current_exception(), true);
  }
}

void Group::peer_lost(std::exception_ptr error) {
  if (!lost_) lost_at_s_ = now_s();
  if (!lost_) lost_ = error;
}

void Group::peer_in_trouble(int peer, const std::string& reason) {
  if (trouble_.empty()) trouble_ = peers_[size_t(peer)].label + " reported: " + reason + "; ";
}

// What a peer has reported before its end has arrived, but may not have been read.
std::exception_ptr Group::explained(const std::exception_ptr& error) {
  if (control_ == nullptr || !holds<PeerLostError>(error)) return error;
  if (trouble_.empty()) control_->listen();
  return with_context(error, trouble_);
}

void Group::warn(const std::string& reason) {
  if (control_ != nullptr && !error_) control_->tell_trouble(reason);
}

// Ranks that disagree about sizes may choose different algorithms, one in shared memory and one
// over TCP, and then never see each other's frames. So all ranks report to rank 0, which compares.
void Group::compare(int peer, const FrameHeader& theirs) {
  shown_.resize(size_t(size()));
  shown_[size_t(peer)] = theirs;  // for operations that are submitted later
  for (const OpPtr& op : queue_) {
    if (op->state().sequence != theirs.sequence) continue;
    try {
      check_header(frame(*op), theirs, peers_[size_t(peer)].label);
    } catch (const MismatchError&) {
      fail(std::current_exception(), true);
    }
    return;
  }
}

bool Group::step(bool held) {
  const OpPtr op = queue_.front();  // keeps it alive if the group fails
  lanes_.hold(held);
  const bool moved = advance(op);
  if (moved) moved_s_ = now_s();
  return moved;
}

bool Group::advance(const OpPtr& op) {
  bool moved = false;
  try {
    if (op->times().started_s == 0) {
      expect_everybody(*op);
      op->begin(timeout_s_);
      lanes_.begin();
      op->state().stages = plan(view(), op->spec(), frame(*op));
      moved = true;
    }
    while (op->state().stage < op->state().stages.size()) {
      const Progress progress = op->state().stages[op->state().stage]->step();
      if (progress == Progress::blocked) return moved;
      if (progress == Progress::moved) return true;
      ++op->state().stage;
      moved = true;
    }
  } catch (const PeerLostError&) {
    suspicion_ = std::current_exception();
    suspicion_until_s_ = now_s() + kReasonGraceS;
    return true;
  } catch (const std::exception&) {
    fail(std::current_exception(), true);
    return true;
  }
  std::exception_ptr error;
  if (op->spec().epilogue && !op->state().followed) {
    try {
      op->state().followed = op->spec().epilogue();
    } catch (const std::exception&) {  // fails this operation only
      error = std::current_exception();
    }
    if (!op->state().followed && !error) return true;
  }
  queue_.pop_front();
  engine_->complete(op, error);
  return true;
}

void Group::fail(std::exception_ptr error, bool tell) {
  if (error_ || closed_) return;
  error = explained(error);
  if (error_) return;  // a report that `explained` has read was the better error
  std::string progress;
  if (!queue_.empty()) {
    const Op& op = *queue_.front();
    if (op.state().stage < op.state().stages.size())
      progress = op.state().stages[op.state().stage]->status() + "; ";
  }
  error_ = error;
  suspicion_ = nullptr;
  std::deque<OpPtr> ending;
  ending.swap(queue_);
  std::string told = message_of(error);
  if (!ending.empty()) told = ending.front()->describe() + ": " + progress + told;
  // Before its caller hears of it, who may end this process at once.
  if (tell && control_ != nullptr) control_->tell_failure(told, holds<MismatchError>(error));
  engine_->warn(told, this);
  std::string behind;  // what the operations after the first wait for
  for (const OpPtr& op : ending) {
    engine_->complete(op, with_context(error, op->describe() + ": " + behind + progress));
    behind = "it waits for " + ending.front()->describe() + ": ";
  }
  for (const OpPtr& op : std::exchange(held_messages_, {})) {
    engine_->complete(op, with_context(error, op->describe() + ": "));
  }
  if (messenger_ != nullptr) messenger_->fail(error);
  if (shm_ != nullptr) shm_->fail();
  keep_none();
}

void Group::abort(const std::string& reason) {
  engine_->call([&] {
    fail(std::make_exception_ptr(
             AbortedError("aborted on rank " + std::to_string(rank()) + ": " + reason)),
         true);
  });
}

void Group::close() {
  if (closed_.exchange(true) || engine_->forked()) return;
  engine_->call([&] { leave(); });
  engine_->bury();
}

void Group::leave() {
  const uint64_t finished =
      (queue_.empty() ? next_sequence_.load() : queue_.front()->state().sequence) - 1;
  const auto error = std::make_exception_ptr(AbortedError("the group was destroyed"));
  std::deque<OpPtr> ending;
  ending.swap(queue_);
  for (const OpPtr& op : std::exchange(held_messages_, {})) ending.push_back(op);
  keep_none();
  for (const OpPtr& op : ending) engine_->complete(op, with_context(error, op->describe() + ": "));
  if (messenger_ != nullptr) messenger_->fail(error_ ? error_ : error);
  if (control_ != nullptr && !error_) control_->tell_goodbye(finished);
  if (shm_ != nullptr) shm_->leave();
  if (engine_->device() != nullptr) engine_->device()->close(id_);
  engine_->remove(this);
  control_.reset();
  messenger_.reset();
  lanes_.close();
  if (shm_ != nullptr) engine_->poller().remove(bell_id_, shm_->doorbell(), Watch::when_active);
  local_.reset();
  shm_.reset();
}

double Group::next_deadline_s(double now) {
  double next = messenger_ != nullptr ? messenger_->next_deadline_s(now) : kNever;
  if (suspicion_) {
    if (suspicion_until_s_ <= now) {
      fail(std::exchange(suspicion_, nullptr), true);
    } else {
      next = std::min(next, suspicion_until_s_);
    }
  }
  if (lost_) {
    const double until_s = std::max(lost_at_s_, moved_s_) + kLostGraceS;
    if (until_s <= now)
      fail(std::exchange(lost_, nullptr), false);  // all ranks know of the loss
    else
      next = std::min(next, until_s);
  }
  if (kept_until_s_ <= now) {
    fail(std::make_exception_ptr(TimeoutError(
             "timed out: a collective waited for callbacks of an earlier one's future to return")),
         true);
    return next;
  }
  next = std::min(next, kept_until_s_.load());
  if (queue_.empty() || queue_.front()->times().started_s == 0) return next;
  Op& op = *queue_.front();
  if (op.state().deadline_s <= now) {
    const double waited = now - op.times().started_s;
    fail(std::make_exception_ptr(
             TimeoutError("timed out after " + std::to_string(waited).substr(0, 6) + " s")),
         true);
    return next;
  }
  next = std::min(next, op.state().deadline_s);
  if (rank() == 0 || op.state().shown) return next;
  const double show = op.times().started_s + kShowAfterS;
  if (show > now) return std::min(next, show);
  op.state().shown = true;
  control_->show(frame(op));
  return next;
}

void Group::announce_sleep(bool asleep) {
  if (shm_ != nullptr && !queue_.empty()) shm_->announce_sleep(asleep);
}

bool Group::spins() const {
  // With more ranks than processors, spinning would delay the rank that this one waits for.
  return shm_ != nullptr && !queue_.empty() &&
         shm_->size() <= int(std::thread::hardware_concurrency());
}

std::string Group::summary() const {
  std::string text = "group " + name() + ": " + std::to_string(size()) + " ranks";
  if (size() == 1) return text;
  text += " on " + std::to_string(topology_.hosts.size()) + " hosts, ";
  if (shm_ != nullptr) text += "shared memory inside";
  if (shm_ != nullptr && !topology_.one_host()) text += ", ";
  if (shm_ == nullptr || !topology_.one_host()) text += "TCP between";
  return text + "; this is rank " + std::to_string(rank()) + " at " +
         peers_[size_t(rank())].address.text();
}

void Group::with_windows(const std::function<void(Windows&)>& work) {
  engine_->call([&] {
    if (messenger_ == nullptr) throw AbortedError("group " + name() + " was destroyed");
    work(messenger_->windows());
  });
}

uint64_t Group::dropped_connections() {
  uint64_t dropped = 0;
  engine_->call([&] { dropped = engine_->dropped_connections(); });
  return dropped;
}

FrameHeader Group::frame(const Op& op) const {
  FrameHeader header;
  header.kind = op.spec().kind;
  header.dtype = op.spec().dtype;
  header.op = op.spec().op;
  header.root = op.spec().root;
  header.sequence = op.sequence();
  header.total_bytes = op.total_bytes();
  if (header.kind == OpKind::all_gather) header.blocks = digest_of_sizes(op.spec().outputs);
  if (header.kind == OpKind::reduce_scatter) header.blocks = digest_of_sizes(op.spec().inputs);
  return header;
}

}  // namespace comm_core
