// Compares every collective with directly computed results, over every kind of connection.
//   collectives_test                    all sizes and worlds
//   collectives_test 5                  a world of 5 ranks only
//   collectives_test random N [SEED]    N random operations on 4 ranks and 3 channels
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <deque>

#include "checked_ops.h"
#include "reduce/kernels.h"

using namespace comm_core;
using namespace comm_core::testing;

namespace {

void every_collective(const World& world) {
  run_ranks(world, [&](Rank& rank) {
    const size_t n = size_t(rank.size);
    uint32_t salt = 0;
    for (OpKind kind :
         {OpKind::all_reduce, OpKind::reduce_scatter, OpKind::all_gather, OpKind::broadcast,
          OpKind::reduce, OpKind::gather, OpKind::scatter, OpKind::all_to_all, OpKind::barrier}) {
      for (size_t count : {size_t(0), size_t(1), n - 1, n, n + 1, size_t(1000), size_t(100003)}) {
        for (bool in_place : {false, true}) {
          for (bool uneven : {false, true}) {
            Case c{kind, DType::f32, ReduceOp::sum, int(salt % n), count, ++salt, in_place, uneven};
            start(*rank.channels[0], c)->check();
            c.op = ReduceOp::avg;
            c.dtype = DType::f64;
            start(*rank.channels[0], c)->check();
          }
        }
      }
    }
    Case large{OpKind::all_reduce, DType::f32, ReduceOp::sum, 0, 1000003, 7};
    for (OpKind kind : {OpKind::all_reduce, OpKind::broadcast, OpKind::reduce}) {
      large.kind = kind;
      start(*rank.channels[0], large)->check();
    }
    // Buffers that peers can map: on all ranks, or on all but rank 0, so that no rank may map any.
    for (OpKind kind : {OpKind::all_reduce, OpKind::reduce_scatter, OpKind::all_gather}) {
      for (uint64_t shared : {~0ull, ~1ull}) {
        for (bool in_place : {false, true}) {
          Case c{kind, DType::f32, ReduceOp::avg, 0, 150001, ++salt, in_place};
          c.shared = shared;
          start(*rank.channels[0], c)->check();
        }
      }
    }
  });
}

// More ranks than processors, on data as small as the smallest in training.
void many_ranks(int n) {
  World world{n, 1, 1, ""};
  run_ranks(world, [](Rank& rank) {
    uint32_t salt = 0;
    for (OpKind kind : {OpKind::all_reduce, OpKind::reduce_scatter, OpKind::all_gather,
                        OpKind::broadcast, OpKind::all_to_all, OpKind::barrier}) {
      for (size_t count : {size_t(1), size_t(65), size_t(2000)}) {
        Case c{kind, DType::f32, ReduceOp::sum, int(salt) % rank.size, count, ++salt, false, true};
        start(*rank.channels[0], c)->check();
      }
    }
    // Every rank maps the buffers of all others.
    for (OpKind kind : {OpKind::all_gather, OpKind::all_reduce, OpKind::all_gather}) {
      Case c{kind, DType::f32, ReduceOp::sum, 0, 3000, ++salt};
      if (kind == OpKind::all_reduce) c.count = 200000, c.in_place = true;
      c.shared = ~0ull;
      start(*rank.channels[0], c)->check();
    }
  });
}

// All ranks draw the same operations, several at a time. The order within a channel is the same on
// all ranks. Each rank interleaves the channels and orders its waits differently.
void random_operations(const World& world, int count, uint32_t seed) {
  run_ranks(world, [&](Rank& rank) {
    const size_t channels = rank.channels.size();
    std::mt19937 draws(seed), mine(seed + 1000u * uint32_t(rank.rank + 1));
    for (int done = 0; done < count;) {
      const int window = std::min(count - done, int(draws() % 64) + 1);
      std::vector<std::deque<Case>> queues(channels);
      for (int i = 0; i < window; ++i) {
        const Case c = draw(draws, rank.size);
        queues[draws() % channels].push_back(c);
      }
      std::vector<std::unique_ptr<Running>> running;
      while (int(running.size()) < window) {
        const size_t i = mine() % channels;
        if (queues[i].empty()) continue;
        running.push_back(start(*rank.channels[i], queues[i].front()));
        queues[i].pop_front();
      }
      std::shuffle(running.begin(), running.end(), mine);
      for (auto& r : running) r->check();
      done += window;
    }
  });
}

}  // namespace

int main(int argc, char** argv) {
  try {
    if (argc > 1 && strcmp(argv[1], "random") == 0) {
      const int count = argc > 2 ? atoi(argv[2]) : 20000;
      const uint32_t seed = argc > 3 ? uint32_t(atoi(argv[3])) : 1;
      for (const char* transport : {"", "tcp"}) {
        World world{4, 3, 1, transport};
        random_operations(world, count, seed);
        printf("%d random operations over %s: right\n", count,
               *transport ? "TCP" : "shared memory");
      }
      World world{4, 3, 2, ""};
      random_operations(world, count, seed);
      printf("%d random operations over both: right\n", count);
      return 0;
    }
    const int only = argc > 1 ? atoi(argv[1]) : 0;
    for (int n = only > 0 ? only : 1; n <= (only > 0 ? only : 8); ++n) {
      for (const char* transport : {"", "tcp"}) {
        printf("%d ranks%s%s\n", n, *transport ? ", " : "", transport);
        fflush(stdout);
        every_collective({n, 1, 1, transport});
      }
    }
    for (int hosts : {2, 3, 4}) {
      printf("%d hosts\n", hosts);
      every_collective({4, 1, hosts, ""});
      every_collective({6, 1, hosts, ""});
    }
    // Trees and recursive doubling, with a power of two and with other numbers of ranks.
    for (int n : {9, 11, 16}) {
      printf("%d ranks, tcp\n", n);
      every_collective({n, 1, 1, "tcp"});
    }
    for (int n : {64, 67}) {
      printf("%d ranks\n", n);
      many_ranks(n);
    }
    // The data in flight is much larger than the kernel's buffers.
    printf("small socket buffers\n");
    World tight{4, 1, 1, "tcp"};
    tight.options.sockets.send_buffer = tight.options.sockets.receive_buffer = 16 << 10;
    every_collective(tight);
    tight.size = 3;
    every_collective(tight);
  } catch (const std::exception& error) {
    printf("FAILED: %s\n", error.what());
    return 1;
  }
  return 0;
}
