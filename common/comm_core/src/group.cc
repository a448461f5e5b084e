#include "group.h"

#include <unistd.h>

#include <algorithm>
#include <thread>

#include "clock.h"
#include "planner.h"
#include "stage.h"
#include "tcp/control.h"
#include "tcp/messenger.h"

namespace comm_core {

namespace {

// A rank that fails tells why and may then end at once: its end can be noticed before its reason.
constexpr double kReasonGraceS = 0.25;

// A collective that takes longer is shown to rank 0, in case it waits for one that never comes.
constexpr double kShowAfterS = 1.0;

uint64_t next_number() {
  static std::atomic<uint64_t> number{0};
  return number++;
}

}  // namespace

struct Group::Connection {
  Connection(Poller& p, std::unique_ptr<Link> l) : poller(p), link(std::move(l)) {
    id = poller.add(link->fd(), Watch::when_active, nullptr);
  }
  ~Connection() { poller.remove(id, link->fd(), Watch::when_active); }
  Poller& poller;
  std::unique_ptr<Link> link;
  uint64_t id;
};

Group::Group(std::shared_ptr<Engine> engine, int rank, int size, std::string name,
             double timeout_s)
    : engine_(std::move(engine)),
      rank_(rank),
      size_(size),
      name_(std::move(name)),
      number_(next_number()),
      timeout_s_(timeout_s),
      in_(size_t(size)),
      out_(size_t(size)),
      finished_by_(size_t(size), UINT64_MAX) {}

std::shared_ptr<Group> Group::create(std::shared_ptr<Engine> engine, Store& store, int rank,
                                     int size, const std::string& name,
                                     const std::string& towards, double timeout_s) {
  if (size < 1 || rank < 0 || rank >= size) {
    throw InvalidRequestError("rank " + std::to_string(rank) + " is none of a group of " +
                              std::to_string(size));
  }
  std::shared_ptr<Group> group(new Group(std::move(engine), rank, size, name, timeout_s));
  if (size > 1) {
    group->meet(store, towards);
  } else {
    group->peers_.resize(1);
    group->topology_ = Topology::of(group->peers_);
    group->engine_->call([&] {
      group->engine_->add_group(group.get());
      group->messenger_ = std::make_unique<Messenger>(*group);
    });
  }
  return group;
}

void Group::meet(Store& store, const std::string& towards) {
  const Options& options = engine_->options();
  if (rank_ == 0) {
    std::string secret(32, '\0'), id(16, '\0');
    random_bytes(secret.data(), secret.size());
    random_bytes(id.data(), id.size());
    store.set("secret", secret + id);
  }
  const std::string secret = store.get("secret");
  if (secret.size() != 48) throw MismatchError("the store holds a malformed secret");
  secret_ = secret.substr(0, 32);
  std::copy(secret.begin() + 32, secret.end(), id_.begin());

  const std::string host = !options.interface.empty() ? address_of_interface(options.interface)
                           : towards.empty()          ? "127.0.0.1"
                                                      : address_towards(towards);
  PeerInfo mine;
  mine.host_id = host_identity(options);
  mine.host_name = host_name();
  mine.pid = int(getpid());
  engine_->call([&] {
    mine.address = engine_->listener(host).address();
    engine_->add_group(this);
    engine_->listener(host).add_group(
        id_, {secret_, size_, rank_,
              [this](const Hello& hello, Fd fd) { accept(hello, std::move(fd)); }});
  });
  try {
    const std::string note = "r";
    store.set(note + std::to_string(rank_), mine.serialize());
    std::vector<PeerInfo> peers;
    for (int r = 0; r < size_; ++r) {
      peers.push_back(PeerInfo::parse(r, store.get(note + std::to_string(r))));
    }
    Topology topology = Topology::of(peers);
    for (const PeerInfo& peer : peers) {
      const bool reachable = !peer.address.is_loopback() || options.allow_loopback;
      if (topology.one_host() || reachable) continue;
      std::string known;
      for (const Interface& i : interfaces()) known += " " + i.name + "=" + i.address;
      throw InvalidRequestError(peer.label + " would be reached over a loopback address, but the " +
                                "ranks are on " + std::to_string(topology.hosts.size()) +
                                " hosts; set COMM_CORE_IFNAME to the interface of the network "
                                "(here:" + known + ")");
    }
    const auto& local = topology.hosts[size_t(topology.host_of[size_t(rank_)])];
    if (options.transport == TransportChoice::shm && !topology.one_host()) {
      throw InvalidRequestError("COMM_CORE_TRANSPORT=shm, but the ranks are on " +
                                std::to_string(topology.hosts.size()) + " hosts");
    }
    std::unique_ptr<ShmStreams> shm;
    if (options.transport != TransportChoice::tcp && local.size() > 1) {
      const int me = topology.local_rank[size_t(rank_)];
      shm = std::make_unique<ShmStreams>(store, local, me, options.shm_slot);
    }
    engine_->call([&] {
      peers_ = std::move(peers);
      topology_ = std::move(topology);
      shm_ = std::move(shm);
      if (shm_ != nullptr) {
        bell_id_ = engine_->poller().add(shm_->doorbell(), Watch::when_active, shm_.get());
      }
      messenger_ = std::make_unique<Messenger>(*this);
      control_ = std::make_unique<Control>(*this);
      for (auto& [hello, fd] : early_) accept(hello, std::move(fd));
      early_.clear();
    });
    const double deadline = now_s() + timeout_s_;
    for (bool connected = false; !connected;) {
      engine_->call([&] {
        if (error_) std::rethrow_exception(error_);
        connected = control_->connected();
      });
      if (!connected && now_s() > deadline) {
        throw TimeoutError("group " + name_ + ": not all ranks have connected to " +
                           peers_[0].label);
      }
      if (!connected) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  } catch (...) {
    close();
    throw;
  }
}

Group::~Group() { close(); }

void Group::accept(const Hello& hello, Fd fd) {
  if (closed_) return;
  if (control_ == nullptr) {
    early_.emplace_back(hello, std::move(fd));
    return;
  }
  const int peer = hello.from;
  tune_socket(fd.get(), sockets_towards(hello.from));
  if (hello.kind == LinkKind::data) {
    std::unique_ptr<Connection>& in = in_[size_t(peer)];
    if (in == nullptr) {
      in = std::make_unique<Connection>(
          engine_->poller(),
          std::make_unique<InLink>(std::move(fd), peers_[size_t(peer)].label));
    }
  } else if (hello.kind == LinkKind::messages) {
    messenger_->accept(peer, std::move(fd));
  } else {
    control_->accept(peer, std::move(fd));
  }
}

SocketOptions Group::sockets_towards(int peer) const {
  SocketOptions sockets = engine_->options().sockets;
  const bool loopback = peers_[size_t(peer)].address.is_loopback();
  // Without a wire, buffers that grow only push what is in them out of the caches.
  if (loopback && sockets.send_buffer == 0) sockets.send_buffer = 256 << 10;
  if (loopback && sockets.receive_buffer == 0) sockets.receive_buffer = 512 << 10;
  return sockets;
}

LinkTarget Group::target(int peer, LinkKind kind) const {
  LinkTarget target;
  target.address = peers_[size_t(peer)].address;
  target.peer = peers_[size_t(peer)].label;
  target.secret = secret_;
  target.hello.from = rank_;
  target.hello.to = peer;
  target.hello.kind = kind;
  target.hello.group = id_;
  target.options = sockets_towards(peer);
  return target;
}

OutLink& Group::out(int peer) {
  std::unique_ptr<Connection>& out = out_[size_t(peer)];
  if (out == nullptr) {
    out = std::make_unique<Connection>(engine_->poller(),
                                       std::make_unique<OutLink>(target(peer, LinkKind::data)));
  }
  return static_cast<OutLink&>(*out->link);
}

InLink* Group::in(int peer) {
  std::unique_ptr<Connection>& in = in_[size_t(peer)];
  return in == nullptr ? nullptr : static_cast<InLink*>(in->link.get());
}

OpPtr Group::submit(OpSpec spec) {
  if (closed_) throw AbortedError("group " + name_ + " was destroyed");
  check(spec);
  auto op = std::make_shared<Op>(std::move(spec), engine_.get(), shared_from_this());
  // Numbers and queue positions must agree, whatever threads submit.
  std::lock_guard<std::mutex> lock(submit_mutex_);
  if (!point_to_point(op->spec_.kind)) op->sequence_ = next_sequence_++;
  engine_->submit(op);
  return op;
}

void Group::enqueue(const OpPtr& op) {
  if (error_ || closed_) {
    const auto destroyed = std::make_exception_ptr(AbortedError("the group was destroyed"));
    const auto error = error_ ? error_ : destroyed;
    engine_->complete(op, with_context(error, op->describe() + ": "));
    return;
  }
  if (!point_to_point(op->spec_.kind)) {
    queue_.push_back(op);
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

void Group::start_message(const OpPtr& op) {
  op->times_.started_s = now_s();
  op->deadline_s_ =
      op->times_.started_s + (op->spec_.timeout_s > 0 ? op->spec_.timeout_s : timeout_s_.load());
  messenger_->start(op);
}

// A rank may leave while others are at work on an operation that it has done its part of, but none
// that it has not taken part in can end.
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

// Ranks that disagree about the sizes may take different ways, one through shared memory and one
// over TCP, and never meet there. Everybody meets rank 0 here.
void Group::compare(int peer, const FrameHeader& theirs) {
  shown_.resize(size_t(size_));
  shown_[size_t(peer)] = theirs;  // for the operations that are not yet in the queue
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

bool Group::step() {
  const OpPtr op = queue_.front();  // stays alive should the group fail
  bool moved = false;
  try {
    if (op->times_.started_s == 0) {
      expect_everybody(*op);
      op->times_.started_s = now_s();
      op->deadline_s_ =
          op->times_.started_s + (op->spec_.timeout_s > 0 ? op->spec_.timeout_s : timeout_s_.load());
      op->stages_ = plan(*this, op->spec_, op->sequence_);
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
  queue_.pop_front();
  engine_->complete(op, nullptr);
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
  if (tell && control_ != nullptr) control_->tell_failure(told);
}

void Group::abort(const std::string& reason) {
  engine_->call([&] {
    fail(std::make_exception_ptr(AbortedError("aborted on rank " + std::to_string(rank_) + ": " +
                                              reason)),
         true);
  });
}

void Group::close() {
  if (closed_.exchange(true)) return;
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
  for (const OpPtr& op : ending) engine_->complete(op, with_context(error, op->describe() + ": "));
  if (messenger_ != nullptr) messenger_->fail(error_ ? error_ : error);
  if (control_ != nullptr && !error_) control_->tell_goodbye(finished);
  if (shm_ != nullptr) shm_->leave();
  if (size_ > 1) engine_->stop_listening(id_);
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

double Group::check_deadlines(double now) {
  double next = messenger_ != nullptr ? messenger_->check_deadlines(now) : -1;
  if (suspicion_) {
    if (suspicion_until_s_ <= now) {
      fail(std::exchange(suspicion_, nullptr), true);
    } else if (next < 0 || suspicion_until_s_ < next) {
      next = suspicion_until_s_;
    }
  }
  if (!queue_.empty() && queue_.front()->times_.started_s > 0) {
    const Op& op = *queue_.front();
    if (op.deadline_s_ <= now) {
      const double waited = now - op.times_.started_s;
      fail(std::make_exception_ptr(
               TimeoutError("timed out after " + std::to_string(waited).substr(0, 6) + " s")),
           true);
      return next;
    }
    double then = op.deadline_s_;
    if (rank_ != 0 && !op.shown_) {
      const double show = op.times_.started_s + kShowAfterS;
      if (show <= now) {
        queue_.front()->shown_ = true;
        control_->show(frame(op));
      } else {
        then = std::min(then, show);
      }
    }
    if (next < 0 || then < next) next = then;
  }
  return next;
}

void Group::announce_sleep(bool asleep) {
  if (shm_ != nullptr && !queue_.empty()) shm_->announce_sleep(asleep);
}

bool Group::spins() const {
  // Where ranks outnumber processors, spinning keeps away the one that is waited for.
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
  return text + "; this is rank " + std::to_string(rank_) + " at " + peers_[size_t(rank_)].address.text();
}

void Group::with_windows(const std::function<void(Windows&)>& work) {
  if (closed_) throw AbortedError("group " + name_ + " was destroyed");
  engine_->call([&] { work(messenger_->windows()); });
}

uint64_t Group::dropped_connections() {
  uint64_t dropped = 0;
  engine_->call([&] { dropped = engine_->dropped_connections(); });
  return dropped;
}

}  // namespace comm_core
