// Rendezvous of a group: its ranks exchange addresses through the store and connect.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <thread>

#include "base/clock.h"
#include "base/text.h"
#include "group/control.h"
#include "group/group.h"
#include "messages/messenger.h"
#include "secret/sha256.h"

namespace comm_core {

namespace {

// Store value of a rank that has no error to report.
const std::string kFine = "fine";

// First byte of a store value by which a rank says, in place of what the others wait for, that it
// cannot join them and why. The secret may begin with any byte, but has this length.
constexpr char kDeclined = '!';
constexpr size_t kSecretBytes = 48;

// Seconds between looks for ranks that decline while the ranks connect.
constexpr double kLookS = 0.1;
// Seconds for which a rank may be unable to accept the others' connections.
constexpr double kExhaustedS = 2.0;
// Seconds that rank 0 waits for the others to read why they cannot join.
constexpr double kHearS = 3.0;

// A rank that cannot join because another one cannot. It passes on the text.
struct Declined : PeerLostError {
  using PeerLostError::PeerLostError;
};

std::string accepted(const std::string& note) {
  if (!note.empty() && note[0] == kDeclined) throw Declined(note.substr(1));
  return note;
}

// Returns what a rank has left under a key. If it has left nothing in time, the error names it.
std::string left_by(int rank, Store& store, const std::string& key, const std::string& group) {
  try {
    return store.get(key);
  } catch (const StoreError& error) {
    throw StoreError("group " + group + ": rank " + std::to_string(rank) +
                     " has not joined in time: " + error.what());
  }
}

// Returns the words in which two texts differ: "A=1 and A=2".
std::string difference(const std::string& one, const std::string& other) {
  const std::vector<std::string> words = split(one, ' '), others = split(other, ' ');
  std::string ours, all;
  for (size_t i = 0; i < words.size(); ++i) {
    const std::string theirs = i < others.size() ? others[i] : "";
    if (words[i] == theirs) continue;
    ours += (ours.empty() ? "" : " ") + words[i];
    all += (all.empty() ? "" : " ") + theirs;
  }
  return ours + " and " + all;
}

// Removes what the ranks have exchanged.
void forget_notes(Store& store, int size) {
  store.remove("secret");
  store.remove("declined");
  for (int r = 0; r < size; ++r) {
    for (const char* what : {"r", "shm", "bell", "made", "open"})
      store.remove(what + std::to_string(r));
  }
}

// The store may hold entries of earlier groups of this name, because torchrun's store lives as long
// as the job. All ranks have been in equally many of them, so their count serves as a prefix.
std::string next_prefix(Store& all, int rank) {
  return std::to_string(all.add("times/" + std::to_string(rank), 1)) + "/";
}

// Writes the reason wherever the others may wait for this rank. Those that have its address
// (`introduced`) may find the same error by themselves, in their own words. Rank 0, whose process
// mostly serves the store, stays until the others have read it.
void leave_reason(Store& store, int rank, int size, const std::exception& error, bool introduced) {
  std::string text = error.what();
  text = text.substr(0, text.find('\n'));  // errors of torch's store have a backtrace
  if (dynamic_cast<const Declined*>(&error) == nullptr) {
    text = "rank " + std::to_string(rank) + " (host " + host_name() +
           ") cannot join the group: " + text;
  }
  std::string note = kDeclined + text;
  if (note.size() == kSecretBytes) note += ' ';
  try {
    store.set("why", text);
    store.add("declined", 1);
    if (!introduced && rank == 0) store.set("secret", note);
    if (!introduced) store.set("r" + std::to_string(rank), note);
    for (const char* what : {"shm", "bell", "made", "open"})
      store.set(what + std::to_string(rank), note);
    const double until_s = now_s() + kHearS;
    while (rank == 0 && store.add("declined", 0) < size && now_s() < until_s) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  } catch (const std::exception&) {
    // Without the store nobody can be told.
  }
}

}  // namespace

Group::Group(std::shared_ptr<Engine> engine, int rank, int size, std::string name, double timeout_s)
    : OpQueue(std::move(name), rank, size),
      engine_(std::move(engine)),
      timeout_s_(timeout_s),
      lanes_(peers_, size, engine_->options().tcp_chunk,
             [this](int peer) { return connect(peer, LaneKind::data, {engine_->poller()}); }),
      finished_by_(size_t(size), UINT64_MAX) {}

std::shared_ptr<Group> Group::create(std::shared_ptr<Engine> engine, Store& store, int rank,
                                     int size, const std::string& name, const std::string& towards,
                                     double timeout_s) {
  if (size < 1 || rank < 0 || rank >= size) {
    throw InvalidRequestError("rank " + std::to_string(rank) + " is not a rank of a group of " +
                              std::to_string(size));
  }
  std::shared_ptr<Group> group(new Group(std::move(engine), rank, size, name, timeout_s));
  if (size > 1) {
    group->meet(store, towards);
  } else {
    group->peers_.resize(1);
    group->topology_ = Topology::of(group->peers_);
    group->engine_->call([&] {
      group->engine_->add(group.get());
      group->messenger_ = group->messenger();
    });
  }
  // Operations in flight keep the group alive, so the pointer of the caller closes it at its end.
  return std::shared_ptr<Group>(group.get(), [group](Group*) { group->close(); });
}

void Group::meet(Store& all, const std::string& towards) {
  NotesUnder store(all, next_prefix(all, rank()));
  bool introduced = false;
  try {
    introduce(store, towards);
    introduced = true;
    join(store);
    connect_all(store);
  } catch (const std::exception& error) {
    leave_reason(store, rank(), size(), error, introduced);
    close();
    throw;
  }
}

void Group::decline(Store& store, int rank, int size, const std::exception& error) {
  NotesUnder notes(store, next_prefix(store, rank));
  leave_reason(notes, rank, size, error, false);
}

// Begins to listen, and publishes the address.
void Group::introduce(Store& store, const std::string& towards) {
  const Options& options = engine_->options();
  if (rank() == 0) {
    std::string secret(32, '\0'), id(16, '\0');
    random_bytes(secret.data(), secret.size());
    random_bytes(id.data(), id.size());
    store.set("secret", secret + id);
  }
  const std::string secret = left_by(0, store, "secret", name());
  if (secret.size() != kSecretBytes) {
    accepted(secret);
    throw MismatchError("the store holds a malformed secret");
  }
  secret_ = secret.substr(0, 32);
  if (!options.secret.empty()) {  // then knowing the secret in the store is not enough
    const Digest both = hmac_sha256(options.secret, secret_);
    secret_.assign(both.begin(), both.end());
  }
  std::copy(secret.begin() + 32, secret.end(), id_.begin());

  const std::string host = !options.interface.empty() ? address_of_interface(options.interface)
                           : towards.empty()          ? "127.0.0.1"
                                                      : address_towards(towards);
  PeerInfo mine;
  mine.host_id = host_identity(options);
  mine.host_name = host_name();
  mine.pid = int(getpid());
  mine.settings = options.agreed() + " build=" COMM_CORE_BUILD;
  engine_->call([&] {
    Device& device = engine_->device(host);
    mine.address = device.address();
    engine_->add(this);
    device.open(id_, {secret_, size(), rank(), [this](const LaneName& name, auto arrival) {
                        enter(name, std::move(arrival));
                      }});
  });
  store.set("r" + std::to_string(rank()), mine.serialize());
}

// Learns the addresses of all ranks, and shares memory with those of this host.
void Group::join(Store& store) {
  const Options& options = engine_->options();
  std::vector<PeerInfo> peers;
  for (int r = 0; r < size(); ++r) {
    const std::string note = left_by(r, store, "r" + std::to_string(r), name());
    peers.push_back(PeerInfo::parse(r, accepted(note)));
  }
  for (const PeerInfo& peer : peers) {
    if (peer.settings == peers[0].settings) continue;
    throw MismatchError(peers[0].label + " and " + peer.label + " have different settings: " +
                        difference(peers[0].settings, peer.settings));
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
  if (options.transport == TransportChoice::shm && !topology.one_host()) {
    throw InvalidRequestError("COMM_CORE_TRANSPORT=shm, but the ranks are on " +
                              std::to_string(topology.hosts.size()) + " hosts");
  }
  std::unique_ptr<ShmStreams> shm;
  const bool alone = topology.hosts.size() == peers.size();
  if (options.transport != TransportChoice::tcp && !alone) {
    shm = share_memory(store, peers, topology);
  }
  engine_->call([&] {
    peers_ = std::move(peers);
    topology_ = std::move(topology);
    shm_ = std::move(shm);
    if (shm_ != nullptr) {
      local_ = std::make_unique<LocalRanks>(LocalRanks{*shm_, {}});
      for (int r : topology_.beside(rank())) local_->labels.push_back(peers_[size_t(r)].label);
      bell_id_ = engine_->poller().add(shm_->doorbell(), Watch::when_active, shm_.get());
    }
    messenger_ = messenger();
    control_ = std::make_unique<Control>(*this);
    for (auto& [name, arrival] : early_) enter(name, std::move(arrival));
    early_.clear();
  });
}

// Waits until the control connections stand.
void Group::connect_all(Store& store) {
  const double began_s = now_s(), deadline = began_s + timeout_s_;
  double look_s = began_s + kLookS;
  for (int absent = 0; absent >= 0;) {
    engine_->call([&] {
      if (error_) std::rethrow_exception(error_);
      absent = control_->absent();
      const double since_s = engine_->device()->exhausted_since_s();
      if (absent >= 0 && now_s() - std::max(began_s, since_s) > kExhaustedS) {
        throw SystemError("it has no descriptor for the connection of another rank");
      }
    });
    if (absent < 0) break;
    if (now_s() > deadline) {
      throw TimeoutError("group " + name() + ": " + peers_[size_t(absent)].label + " and " +
                         peers_[size_t(rank())].label + " are not connected");
    }
    if (now_s() > look_s) {
      if (store.add("declined", 0) > 0) throw Declined(store.get("why"));
      look_s = now_s() + kLookS;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  // A rank that has connected to rank 0 has read all entries.
  if (rank() == 0) forget_notes(store, size());
}

// Sets up shared memory on all hosts, or returns null if one host cannot: all ranks must choose the
// same algorithms.
std::unique_ptr<ShmStreams> Group::share_memory(Store& store, const std::vector<PeerInfo>& peers,
                                                const Topology& topology) {
  const Options& options = engine_->options();
  const std::vector<int>& local = topology.beside(rank());
  std::unique_ptr<ShmStreams> shm;
  const auto make = [&] {
    const int me = topology.local_rank[size_t(rank())];
    shm = std::make_unique<ShmStreams>(store, local, me, options.shm_slot);
  };
  const auto connect = [&] { shm->connect(store, local); };
  const std::pair<const char*, std::function<void()>> parts[] = {{"made", make}, {"open", connect}};
  for (const auto& [key, part] : parts) {
    std::string mine = kFine;
    try {
      if (local.size() > 1) part();
    } catch (const SystemError& error) {
      mine = error.what();
    }
    store.set(key + std::to_string(rank()), mine);
    for (int r = 0; r < size(); ++r) {
      const std::string told = accepted(left_by(r, store, key + std::to_string(r), name()));
      if (told == kFine) continue;
      const std::string reason = peers[size_t(r)].label + " cannot share memory: " + told;
      if (options.transport == TransportChoice::shm) {
        throw SystemError("COMM_CORE_TRANSPORT=shm, but " + reason);
      }
      if (rank() == 0) {
        fprintf(stderr, "comm_core: group %s uses TCP inside hosts, too, which is slower: %s\n",
                name().c_str(), reason.c_str());
      }
      return nullptr;
    }
  }
  if (shm != nullptr) shm->connected();
  return shm;
}

void Group::enter(const LaneName& name, std::unique_ptr<Arrival> arrival) {
  if (closed_) return;
  if (control_ == nullptr) {
    early_.emplace_back(name, std::move(arrival));
    return;
  }
  const int peer = name.from;
  try {
    if (name.kind == LaneKind::data) {
      if (lanes_.in(peer) != nullptr) return;
      lanes_.enter(peer, arrival->lane(lanes_.label(peer), {engine_->poller()}));
    } else if (name.kind == LaneKind::messages) {
      messenger_->enter(peer, *arrival);
    } else {
      control_->enter(peer, *arrival);
    }
  } catch (const SystemError&) {
    fail(std::current_exception(), true);
  }
}

std::unique_ptr<Lane> Group::connect(int peer, LaneKind kind, const Watching& watching) const {
  const PeerInfo& info = peers_[size_t(peer)];
  return engine_->device()->connect({info.address, info.label, secret_, {id_, rank(), peer, kind}},
                                    watching);
}

}  // namespace comm_core
