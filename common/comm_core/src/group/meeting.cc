// How the ranks of a group find each other and connect.
#include <unistd.h>

#include <algorithm>
#include <thread>

#include "base/clock.h"
#include "group/group.h"
#include "messages/messenger.h"
#include "tcp/control.h"

namespace comm_core {

namespace {

uint64_t next_number() {
  static std::atomic<uint64_t> number{0};
  return number++;
}

}  // namespace

Group::Group(std::shared_ptr<Engine> engine, int rank, int size, std::string name, double timeout_s)
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
                                     int size, const std::string& name, const std::string& towards,
                                     double timeout_s) {
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
  // Operations under way keep the group alive: what its user holds closes it when he drops that.
  return std::shared_ptr<Group>(group.get(), [group](Group*) { group->close(); });
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
                                "(here:" +
                                known + ")");
    }
    const auto& local = topology.beside(rank_);
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
          engine_->poller(), std::make_unique<InLink>(std::move(fd), peers_[size_t(peer)].label));
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

}  // namespace comm_core
