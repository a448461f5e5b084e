// The time that memory alone needs for a reduce-scatter and an all-gather among ranks of one
// machine: usage `memory_bound WORLD BYTES REPEATS THREADS`, prints one JSON line.
//
// Reduce-scatter: d = sum of WORLD streams, each of BYTES, read once; BYTES are written.
// All-gather: WORLD copies of BYTES. Both with ordinary and with non-temporal stores, because which
// of the two is faster depends on whether the output stays in cache.

#include <sched.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#if defined(__AVX__)
#include <immintrin.h>
#endif

namespace {

using Clock = std::chrono::steady_clock;
using Buffer = std::unique_ptr<float[], decltype(&std::free)>;

constexpr size_t kBlock = 64;  // floats: sums of one block of all streams stay in registers

constexpr size_t kLanes = 8;
using Vector = float __attribute__((vector_size(kLanes * sizeof(float))));

Vector load(const float* block, size_t index) {
  Vector value;
  std::memcpy(&value, block + index * kLanes, sizeof(value));
  return value;
}

Buffer allocate(size_t count, float value) {
  const size_t bytes = (count * sizeof(float) + 4095) / 4096 * 4096;
  Buffer buffer(static_cast<float*>(std::aligned_alloc(4096, bytes)), &std::free);
  if (!buffer) {
    std::fprintf(stderr, "cannot allocate %zu bytes\n", bytes);
    std::exit(1);
  }
  std::fill_n(buffer.get(), count, value);  // page faults belong to nobody's time
  return buffer;
}

void store(float* to, const float* from, size_t count, bool non_temporal) {
#if defined(__AVX__)
  if (non_temporal) {
    for (size_t i = 0; i < count; i += 8) _mm256_stream_ps(to + i, _mm256_loadu_ps(from + i));
    return;
  }
#endif
  std::memcpy(to, from, count * sizeof(float));
}

struct Work {
  std::vector<Buffer> many;
  Buffer one;
  size_t blocks;
  int threads;

  // Slices are of whole blocks, where the buffers are aligned for vector stores.
  size_t bound(int thread) const { return blocks * thread / threads * kBlock; }

  // Summing in registers: with the sums in an array in L1 this took twice as long.
  void reduce(int thread, bool non_temporal) const {
    for (size_t at = bound(thread); at < bound(thread + 1); at += kBlock) {
      Vector sums[kBlock / kLanes];
      for (size_t j = 0; j < kBlock / kLanes; ++j) sums[j] = load(many[0].get() + at, j);
      for (size_t k = 1; k < many.size(); ++k) {
        for (size_t j = 0; j < kBlock / kLanes; ++j) sums[j] += load(many[k].get() + at, j);
      }
      float sum[kBlock];
      std::memcpy(sum, sums, sizeof(sum));
      store(one.get() + at, sum, kBlock, non_temporal);
    }
  }

  void copy(int thread, bool non_temporal) const {
    const size_t from = bound(thread), length = bound(thread + 1) - from;
    for (const Buffer& to : many) store(to.get() + from, one.get() + from, length, non_temporal);
  }
};

// A core per thread: these runs are shorter than the scheduler needs to part two threads.
void pin(int thread, const cpu_set_t& allowed) {
  int core = 0;
  for (int left = thread % CPU_COUNT(&allowed);; ++core) {
    if (CPU_ISSET(core, &allowed) && left-- == 0) break;
  }
  cpu_set_t mine;
  CPU_ZERO(&mine);
  CPU_SET(core, &mine);
  sched_setaffinity(0, sizeof(mine), &mine);
}

// Sorted seconds per repetition, the first one left out.
template <typename Function>
std::vector<double> measure(const Work& work, int repeats, Function function) {
  std::barrier<> together(work.threads);
  cpu_set_t allowed;
  sched_getaffinity(0, sizeof(allowed), &allowed);
  std::vector<Clock::time_point> starts(work.threads * (repeats + 1)), ends(starts.size());
  auto run = [&](int thread) {
    pin(thread, allowed);
    for (int repeat = 0; repeat <= repeats; ++repeat) {
      together.arrive_and_wait();
      starts[repeat * work.threads + thread] = Clock::now();
      function(thread);
      ends[repeat * work.threads + thread] = Clock::now();
      together.arrive_and_wait();
    }
  };
  std::vector<std::jthread> others;
  for (int thread = 1; thread < work.threads; ++thread) others.emplace_back(run, thread);
  run(0);
  others.clear();
  sched_setaffinity(0, sizeof(allowed), &allowed);
  // From the first thread's start: one that is late has left the others the memory to themselves.
  std::vector<double> seconds;
  for (size_t at = work.threads; at < starts.size(); at += work.threads) {
    const auto first = std::min_element(&starts[at], &starts[at] + work.threads);
    const auto last = std::max_element(&ends[at], &ends[at] + work.threads);
    seconds.push_back(std::chrono::duration<double>(*last - *first).count());
  }
  std::sort(seconds.begin(), seconds.end());
  return seconds;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) {
    std::fprintf(stderr, "usage: %s WORLD BYTES REPEATS THREADS\n", argv[0]);
    return 2;
  }
  const int world = std::atoi(argv[1]), repeats = std::max(1, std::atoi(argv[3]));
  // Bytes are rounded up to whole blocks, which are far below the noise.
  const size_t block_bytes = kBlock * sizeof(float);
  const size_t blocks = (std::strtoull(argv[2], nullptr, 10) + block_bytes - 1) / block_bytes;
  Work work{{}, allocate(blocks * kBlock, 1.0F), blocks, std::max(1, std::atoi(argv[4]))};
  for (int k = 0; k < world; ++k) work.many.push_back(allocate(blocks * kBlock, 2.0F));

  double reduce = 1e9, copy = 1e9;
  for (const bool non_temporal : {false, true}) {
    auto median = [&](auto function) { return measure(work, repeats, function)[repeats / 2]; };
    reduce = std::min(reduce, median([&](int thread) { work.reduce(thread, non_temporal); }));
    copy = std::min(copy, median([&](int thread) { work.copy(thread, non_temporal); }));
  }
  std::printf("{\"reduce_scatter\": %.9f, \"all_gather\": %.9f}\n", reduce, copy);
  return 0;
}
