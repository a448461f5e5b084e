// Tests how groups fail and end: time-outs, aborts, ranks that leave, unauthorised connections.
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <latch>
#include <random>

#include "run_tests.h"
#include "tcp/tcp_lane.h"

using namespace comm_core;
using namespace comm_core::testing;

namespace {

// A store that never removes anything.
struct KeptNotes : MemoryStore {
  void remove(const std::string&) override {}
};

struct Data {
  std::vector<char> in, out;
};

OpPtr all_reduce(Group& group, Data& data, size_t bytes, double timeout_s = 0) {
  data.in.assign(bytes, 1);
  data.out.assign(bytes, 0);
  OpSpec spec;
  spec.kind = OpKind::all_reduce;
  spec.inputs = {{data.in.data(), bytes}};
  spec.outputs = {{data.out.data(), bytes}};
  spec.timeout_s = timeout_s;
  return group.submit(std::move(spec));
}

void expect_sum(Group& group) {
  Data data;
  const std::string error = error_of(all_reduce(group, data, 1000));
  expect(error.empty(), error);
  expect(data.out == std::vector<char>(1000, char(group.size())), "wrong sum");
}

void sleep_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

void time_outs() {
  for (const Wiring& wiring : kWirings) {
    for (size_t bytes : {size_t(400), size_t(4) << 20}) {
      Together all(4);
      run_ranks(wired(wiring, 4), [&](Rank& rank) {
        Group& group = *rank.channels[0];
        Data data;
        all.wait();
        if (rank.rank != 2) {
          const double began = now_s();
          const OpPtr op = all_reduce(group, data, bytes, rank.rank == 0 ? 0.3 : 0);
          const std::string error = error_of(op);
          expect_text(error, "timed out");
          expect_text(error, "rank ");
          expect_text(error, " of ");
          expect_text(error, " bytes");
          expect(now_s() - began < 5, "the time-out came too late");
          if (rank.rank == 0) expect(is<TimeoutError>(op->error()), error);
        }
        all.wait();
        for (int i = 0; i < 5000 && !group.error(); ++i) sleep_ms(1);  // rank 2 has no operation
        expect_text(error_of(all_reduce(group, data, 4)), "timed out");
      });
    }
  }
}

void aborts() {
  for (const Wiring& wiring : kWirings) {
    Together all(4);
    run_ranks(wired(wiring, 4), [&](Rank& rank) {
      Group& group = *rank.channels[0];
      Data data, second;
      expect_sum(group);
      all.wait();
      if (rank.rank == 2) {
        sleep_ms(20);
        group.abort("enough of it");
      } else {
        const OpPtr first = all_reduce(group, data, 100000);
        const OpPtr next = all_reduce(group, second, 100);
        expect_text(error_of(first), "enough of it");
        expect(is<AbortedError>(first->error()), "not an AbortedError");
        expect_text(error_of(next), "enough of it");
      }
      all.wait();
      expect_text(error_of(all_reduce(group, data, 4)), "enough of it");
    });
  }
}

void closes_in_any_order() {
  for (const Wiring& wiring : kWirings) {
    for (uint32_t seed = 0; seed < 8; ++seed) {
      World world = wired(wiring, 4);
      world.channels = 2;
      run_ranks(world, [&](Rank& rank) {
        std::mt19937 random(seed * 4 + uint32_t(rank.rank));
        for (auto& channel : rank.channels) expect_sum(*channel);
        if (random() % 2) std::swap(rank.channels[0], rank.channels[1]);
        for (auto& channel : rank.channels) {
          if (random() % 2) sleep_ms(int(random() % 5));
          channel->close();
          channel->close();
          bool refused = false;
          try {
            Data data;
            all_reduce(*channel, data, 4);
          } catch (const AbortedError&) {
            refused = true;
          }
          expect(refused, "a closed group accepted an operation");
        }
        if (random() % 2) rank.channels.clear();
      });
    }
  }
}

// Operations that no thread waits for end when the group is closed.
void closes_under_way() {
  for (const Wiring& wiring : kWirings) {
    for (int i = 0; i < 10; ++i) {
      run_ranks(wired(wiring, 2), [&](Rank& rank) {
        std::vector<Data> data(3);
        std::vector<OpPtr> ops;
        if (rank.rank == 0) {
          for (Data& d : data) ops.push_back(all_reduce(*rank.channels[0], d, 1 << 20));
        }
        if (i % 2) sleep_ms(2);
        rank.channels[0]->close();
        for (const OpPtr& op : ops) expect(!error_of(op).empty(), "an operation did not fail");
      });
    }
  }
}

// The last pointer to a group is dropped with operations in flight: the same as closing the group.
void dropped_under_way() {
  for (const Wiring& wiring : kWirings) {
    for (bool keeps_operations : {false, true}) {
      run_ranks(wired(wiring, 2), [&](Rank& rank) {
        std::vector<Data> data(3);
        std::vector<OpPtr> ops;
        expect_sum(*rank.channels[0]);
        if (rank.rank == 0) {
          for (Data& d : data) {
            const OpPtr op = all_reduce(*rank.channels[0], d, 1 << 20);
            if (keeps_operations) ops.push_back(op);
          }
        }
        rank.forget();
        for (const OpPtr& op : ops) {
          expect_text(error_of(op), "all_reduce");
          expect(is<AbortedError>(op->error()) || is<PeerLostError>(op->error()), "wrong error");
        }
      });
    }
  }
}

void peer_leaves() {
  for (const Wiring& wiring : kWirings) {
    for (size_t bytes : {size_t(40), size_t(2) << 20}) {
      for (bool early : {false, true}) {
        Together all(4);
        run_ranks(wired(wiring, 4), [&](Rank& rank) {
          Group& group = *rank.channels[0];
          if (!early) expect_sum(group);
          all.wait();
          if (rank.rank == 2) return group.close();
          Data data;
          const OpPtr op = all_reduce(group, data, bytes);
          const std::string error = error_of(op);
          expect(is<PeerLostError>(op->error()) || is<AbortedError>(op->error()), error);
          expect_text(error, "lost rank ");
          sleep_ms(50);
        });
      }
    }
  }
}

// While rank 0 fails for the loss of rank 1, it reads why that rank has failed. Its operations end
// for that reason, those in flight and later ones.
void keeps_the_better_error() {
  bool heard = false;
  for (int tries = 0; !heard && tries < 50; ++tries) {  // the report may arrive too late
    std::latch busy(1), reported(1);
    run_ranks(wired({"tcp", 1}, 2), [&](Rank& rank) {
      Group& group = *rank.channels[0];
      expect_sum(group);
      if (rank.rank == 1) {
        busy.wait();
        group.abort("enough of it");
        reported.count_down();
        return;
      }
      Data data, later;
      const OpPtr op = all_reduce(group, data, 400);
      rank.engine->call([&] {  // so that the engine does not read the report before
        busy.count_down();
        reported.wait();
        group.fail(std::make_exception_ptr(PeerLostError("lost rank 1")), true);
      });
      heard = is<AbortedError>(op->error());
      expect_text(error_of(op), heard ? "enough of it" : "lost rank 1");
      expect_text(error_of(all_reduce(group, later, 400)), message_of(group.error()));
      expect(is<AbortedError>(group.error()) == heard, message_of(group.error()));
    });
  }
  expect(heard, "rank 0 has never read the report in time");
}

// Unauthorised connections to rank 1, while the ranks work.
void strangers() {
  World world = wired({"tcp", 1}, 2);
  world.store = std::make_shared<KeptNotes>();
  const auto connect_to = [](const Address& address) {
    Fd fd(socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    expect(connect(fd.get(), address.get(), address.length) == 0, "cannot connect");
    return fd;
  };
  const auto say = [](const Fd& fd, const void* data, size_t bytes) {
    expect(send(fd.get(), data, bytes, MSG_NOSIGNAL) == ssize_t(bytes), "cannot send");
  };
  const auto hung_up = [](const Fd& fd) {
    pollfd ready{fd.get(), POLLIN, 0};
    char byte;
    return poll(&ready, 1, 8000) == 1 && recv(fd.get(), &byte, 1, 0) <= 0;
  };
  std::atomic<int> ended{0};
  run_ranks(world, [&](Rank& rank) {
    Group& group = *rank.channels[0];
    if (rank.rank == 1) {
      while (ended == 0) sleep_ms(1);
      expect_sum(group);
      const uint64_t dropped = group.dropped_connections();
      expect(dropped == 6 || dropped == 7, std::to_string(dropped) + " dropped, expected 6");
      return;
    }
    const Address door = group.peer(1).address;
    const std::string note = world.store->get("0/1/secret");
    Hello hello;
    hello.from = 0;
    hello.to = 1;
    std::copy(note.begin() + 32, note.end(), hello.group.begin());

    Fd silent = connect_to(door);  // for about 5 s, only the kernel knows of it
    const Fd half = connect_to(door), mute = connect_to(door);
    say(half, &hello, sizeof hello / 2);
    say(mute, &hello, sizeof hello);  // sends no proof

    const Fd garbage = connect_to(door);
    say(garbage, std::string(4096, 'x').data(), 4096);
    expect(hung_up(garbage), "garbage was accepted");

    Hello other = hello;
    other.group[3] ^= 1;
    const Fd lost_way = connect_to(door);
    say(lost_way, &other, sizeof other);
    expect(hung_up(lost_way), "another job's rank was accepted");

    const Fd liar = connect_to(door);
    say(liar, &hello, sizeof hello);
    Bytes16 challenge;
    expect(recv(liar.get(), challenge.data(), 16, MSG_WAITALL) == 16, "no challenge");
    const Digest wrong = proof(std::string(32, 'x'), 'c', hello, challenge);
    say(liar, wrong.data(), wrong.size());
    expect(hung_up(liar), "a wrong secret was accepted");

    Fd brief = connect_to(door);
    say(brief, &hello, 7);
    brief.reset();

    silent.reset();
    expect(hung_up(half), "a connection with half a greeting was not dropped");
    expect(recv(mute.get(), challenge.data(), 16, MSG_WAITALL) == 16, "no challenge");
    expect(hung_up(mute), "a connection without a proof was not dropped");
    ended = 1;
    expect_sum(group);
  });
}

// A rank that stalls during the handshake is dropped as unauthorised, and connects again.
void who_was_held_up_comes_again() {
  World world = wired({"tcp", 1}, 2);
  auto store = std::make_shared<KeptNotes>();
  world.store = store;
  Together all(2);
  std::latch away(1), greeted(1);
  run_ranks(world, [&](Rank& rank) {
    Group& group = *rank.channels[0];
    if (rank.rank == 0) {
      const std::string note = store->get("0/1/secret");
      const LaneName name{{}, 0, 1, LaneKind::control};  // rank 1 does not use it
      LaneTarget target{group.peer(1).address, "rank 1", note.substr(0, 32), name};
      std::copy(note.begin() + 32, note.end(), target.name.group.begin());
      away.wait();
      Poller poller;
      ConnectingLane lane(target, {}, {poller});
      for (int i = 0; i < 100; ++i) {  // long enough to connect
        expect(!lane.ready(), "the lane is ready although rank 1 is blocked");
        sleep_ms(1);
      }
      greeted.count_down();
      sleep_ms(5800);
      const double until = now_s() + kHangsS;
      while (!lane.ready() && now_s() < until) sleep_ms(1);
      expect(lane.ready(), "the rank was not accepted");
    } else {
      // Blocks rank 1's engine, which otherwise might complete the handshake at once.
      rank.engine->call([&] {
        away.count_down();
        greeted.wait();
      });
    }
    all.wait();
    expect_sum(group);
    if (rank.rank == 1) expect(group.dropped_connections() >= 1, "no connection was dropped");
    all.wait();
  });
}

// Every rank begins with a different group, so each waits for one that others have not started yet.
void many_groups_each_rank_in_its_own_order() {
  constexpr int kGroups = 70;
  World world = wired(kWirings[1], 3);
  world.channels = kGroups;
  run_ranks(world, [&](Rank& rank) {
    std::vector<Data> data(kGroups);
    std::vector<OpPtr> ops(kGroups);
    for (int i = 0; i < kGroups; ++i) {
      const int order[] = {i, kGroups - 1 - i, i * 37 % kGroups};
      const int channel = order[rank.rank];
      ops[size_t(channel)] =
          all_reduce(*rank.channels[size_t(channel)], data[size_t(channel)], 400);
    }
    for (int i = 0; i < kGroups; ++i) {
      const std::string error = error_of(ops[size_t(i)]);
      expect(error.empty(), error);
      expect(data[size_t(i)].out == std::vector<char>(400, 3), "wrong sum");
    }
  });
}

// A different threshold on one rank would make the ranks choose different algorithms.
void settings_must_agree() {
  for (const Wiring& wiring : kWirings) {
    World world = wired(wiring, 3);
    world.change = [](int rank, Options& options) {
      if (rank == 2) options.shm_flat = 100;
    };
    std::string said;
    try {
      run_ranks(world, [](Rank&) {});
    } catch (const std::runtime_error& error) {
      said = error.what();
    }
    for (const char* rank : {"rank 0: rank 0 (", "rank 1: rank 0 (", "rank 2: rank 0 ("}) {
      expect_text(said, rank);
    }
    expect_text(said, "and rank 2 (");
    expect_text(said, "COMM_CORE_SHM_FLAT=16384 and COMM_CORE_SHM_FLAT=100");
  }
}

// With a job secret, the store's secret alone does not suffice, and a wrong job secret fails.
void a_secret_of_the_job() {
  const std::string known(32, 'k'), other(32, 'o');
  for (int who : {-1, 0, 1}) {
    World world = wired({"tcp", 1}, 2);
    auto store = std::make_shared<KeptNotes>();
    world.store = store;
    world.change = [&](int rank, Options& options) {
      options.secret = rank == who ? other : known;
    };
    std::string said;
    try {
      run_ranks(world, [&](Rank& rank) {
        Group& group = *rank.channels[0];
        expect_sum(group);
        if (rank.rank == 1) return;
        // An unauthorised process that has read the store.
        const std::string note = store->get("0/1/secret");
        LaneTarget target{group.peer(1).address, "rank 1", note.substr(0, 32), {{}, 0, 1}};
        std::copy(note.begin() + 32, note.end(), target.name.group.begin());
        Poller poller;
        ConnectingLane stranger(target, {}, {poller});
        bool refused = false;
        for (const double until = now_s() + 10; !refused && now_s() < until; sleep_ms(1)) {
          try {
            expect(!stranger.ready(), "the store's secret was accepted");
          } catch (const PeerLostError&) {
            refused = true;
          }
        }
        expect(refused, "an unauthorised connection was not refused");
      });
    } catch (const std::runtime_error& error) {
      said = error.what();
    }
    if (who < 0) expect(said.empty(), said);
    if (who >= 0) expect_text(said, "have different settings: COMM_CORE_SECRET_FILE=");
  }
}

// A store that keeps the notes of earlier groups. torchrun's does: it lives as long as the job.
void a_store_that_keeps_what_earlier_groups_have_left() {
  const auto kept = std::make_shared<KeptNotes>();
  const auto emptied = std::make_shared<MemoryStore>();
  for (const std::shared_ptr<MemoryStore>& store : {std::shared_ptr<MemoryStore>(kept), emptied}) {
    for (int time = 0; time < 3; ++time) {
      for (const Wiring& wiring : kWirings) {
        World world = wired(wiring, 4);
        world.store = store;
        run_ranks(world, [](Rank& rank) { expect_sum(*rank.channels[0]); });
      }
    }
  }
  expect(emptied->size() == 0, "notes remain in the store");
}

}  // namespace

int main(int argc, char** argv) {
  return run_tests(argc, argv,
                   {{"time-outs", time_outs},
                    {"aborts", aborts},
                    {"closes in any order", closes_in_any_order},
                    {"closes under way", closes_under_way},
                    {"dropped under way", dropped_under_way},
                    {"peer leaves", peer_leaves},
                    {"better error", keeps_the_better_error},
                    {"strangers", strangers},
                    {"many groups", many_groups_each_rank_in_its_own_order},
                    {"held up", who_was_held_up_comes_again},
                    {"secret", a_secret_of_the_job},
                    {"settings", settings_must_agree},
                    {"kept store", a_store_that_keeps_what_earlier_groups_have_left}});
}
