#include "group/group.h"

#include <algorithm>
#include <thread>

#include "base/clock.h"
#include "collectives/collectives.h"
#include "collectives/stage.h"
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
  if (!point_to_point(op->spec_.kind)) {
    queue_.push_back(op);
    if (op->spec_.priority != 0) engine_->rank_by_priority();
    for (size_t r = 0; r < shown_.size() && !error_; ++r) compare(int(r), shown_[r]);
    return;
  }
  if (op->held_) {
    held_messages_.push_back(op);
  } else {
    start_message(op);
  }
}

void Group::release(const OpPtr& op) {
  engine_->run_soon([this, op] {
    op->held_ = false;
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

void Group::begin(Op& op) const {
  op.times_.started_s = now_s();
  op.flight_.started(op.times_.started_s);
  const double timeout_s = op.spec_.timeout_s > 0 ? op.spec_.timeout_s : timeout_s_.load();
  op.deadline_s_ = op.times_.started_s + timeout_s;
}

void Group::start_message(const OpPtr& op) {
  begin(*op);
  messenger_->start(op);
}

// Throws PeerLostError if a rank has left before `op`. A rank may leave while others still run an
// operation that is finished for it, but no operation can finish without its part.
void Group::expect_everybody(const Op& op) const {
  for (size_t r = 0; r < finished_by_.size(); ++r) {
    if (op.sequence_ <= finished_by_[r]) continue;
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

// Ranks that disagree about sizes may choose different algorithms, one in shared memory and one
// over TCP, and then never see each other's frames. So all ranks report to rank 0, which compares.
void Group::compare(int peer, const FrameHeader& theirs) {
  shown_.resize(size_t(size_));
  shown_[size_t(peer)] = theirs;  // for operations that are submitted later
  for (const OpPtr& op : queue_) {
    if (op->sequence_ != theirs.sequence) continue;
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
  held_ = held;
  const bool moved = advance(op);
  if (moved) moved_s_ = now_s();
  return moved;
}

bool Group::advance(const OpPtr& op) {
  bool moved = false;
  try {
    if (op->times_.started_s == 0) {
      expect_everybody(*op);
      begin(*op);
      met_ = false;
      op->stages_ = plan(*this, op->spec_, frame(*op));
      moved = true;
    }
    while (op->stage_ < op->stages_.size()) {
      const Progress progress = op->stages_[op->stage_]->step();
      if (progress == Progress::blocked) return moved;
      if (progress == Progress::moved) return true;
      ++op->stage_;
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
  if (op->spec_.epilogue && !op->followed_) {
    try {
      op->followed_ = op->spec_.epilogue();
    } catch (const std::exception&) {  // fails this operation only
      error = std::current_exception();
    }
    if (!op->followed_ && !error) return true;
  }
  queue_.pop_front();
  engine_->complete(op, error);
  return true;
}

void Group::fail(std::exception_ptr error, bool tell) {
  if (error_ || closed_) return;
  std::string progress;
  if (!queue_.empty()) {
    const Op& op = *queue_.front();
    if (op.stage_ < op.stages_.size()) progress = op.stages_[op.stage_]->status() + "; ";
  }
  error_ = error;
  suspicion_ = nullptr;
  std::string told = message_of(error);
  bool first = true;
  std::deque<OpPtr> ending;
  ending.swap(queue_);
  for (const OpPtr& op : ending) {
    const std::string prefix = op->describe() + ": " + (first ? progress : "");
    if (first) told = prefix + told;
    first = false;
    engine_->complete(op, with_context(error, prefix));
  }
  for (const OpPtr& op : std::exchange(held_messages_, {})) {
    engine_->complete(op, with_context(error, op->describe() + ": "));
  }
  if (messenger_ != nullptr) messenger_->fail(error);
  if (shm_ != nullptr) shm_->fail();
  keep_none();
  if (tell && control_ != nullptr) control_->tell_failure(told, is_mismatch(error));
}

void Group::abort(const std::string& reason) {
  engine_->call([&] {
    fail(std::make_exception_ptr(
             AbortedError("aborted on rank " + std::to_string(rank_) + ": " + reason)),
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
      (queue_.empty() ? next_sequence_.load() : queue_.front()->sequence_) - 1;
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
  engine_->remove_group(this);
  control_.reset();
  messenger_.reset();
  in_.clear();
  out_.clear();
  in_.resize(size_t(size_));
  out_.resize(size_t(size_));
  if (shm_ != nullptr) engine_->poller().remove(bell_id_, shm_->doorbell(), Watch::when_active);
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
  if (queue_.empty() || queue_.front()->times_.started_s == 0) return next;
  Op& op = *queue_.front();
  if (op.deadline_s_ <= now) {
    const double waited = now - op.times_.started_s;
    fail(std::make_exception_ptr(
             TimeoutError("timed out after " + std::to_string(waited).substr(0, 6) + " s")),
         true);
    return next;
  }
  next = std::min(next, op.deadline_s_);
  if (rank_ == 0 || op.shown_) return next;
  const double show = op.times_.started_s + kShowAfterS;
  if (show > now) return std::min(next, show);
  op.shown_ = true;
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
  std::string text = "group " + name_ + ": " + std::to_string(size_) + " ranks";
  if (size_ == 1) return text;
  text += " on " + std::to_string(topology_.hosts.size()) + " hosts, ";
  if (shm_ != nullptr) text += "shared memory inside";
  if (shm_ != nullptr && !topology_.one_host()) text += ", ";
  if (shm_ == nullptr || !topology_.one_host()) text += "TCP between";
  return text + "; this is rank " + std::to_string(rank_) + " at " +
         peers_[size_t(rank_)].address.text();
}

void Group::with_windows(const std::function<void(Windows&)>& work) {
  engine_->call([&] {
    if (messenger_ == nullptr) throw AbortedError("group " + name_ + " was destroyed");
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
  header.total_bytes = total_bytes(op.spec());
  if (header.kind == OpKind::all_gather) header.blocks = digest_of_sizes(op.spec().outputs);
  if (header.kind == OpKind::reduce_scatter) header.blocks = digest_of_sizes(op.spec().inputs);
  return header;
}

std::string Group::describe(const Op& op) const {
  std::string text = comm_core::describe(frame(op));
  if (point_to_point(op.spec().kind)) {
    text += op.spec().kind == OpKind::recv || op.spec().kind == OpKind::get ? " from " : " to ";
    text += op.spec().peer < 0 ? "any rank" : "rank " + std::to_string(op.spec().peer);
  }
  return text + " on rank " + std::to_string(rank_) + " of group " + name_;
}

}  // namespace comm_core
