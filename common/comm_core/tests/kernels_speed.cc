// Prints how fast the kernels are on one thread. Columns: "dst" is bytes of the result per second;
// "traffic" is that times the streams, the sources read and the one result written (what a write
// first reads into the cache is not counted).
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "reduce/kernels.h"

using namespace comm_core;

namespace {

constexpr size_t kL2Bytes = 256 * 1024;
constexpr size_t kMemoryBytes = 25 * 1000 * 1000;

template <class Run>
double best_seconds(size_t bytes, Run run) {
  using Clock = std::chrono::steady_clock;
  const int inner = bytes < 1000000 ? 100 : 1;
  double best = 1e9;
  for (int trial = 0; trial < 25; ++trial) {
    const auto begin = Clock::now();
    for (int i = 0; i < inner; ++i) run();
    const double seconds = std::chrono::duration<double>(Clock::now() - begin).count() / inner;
    if (seconds < best) best = seconds;
  }
  return best;
}

void print(const char* what, int streams, size_t bytes, double seconds) {
  const double rate = static_cast<double>(bytes) / seconds * 1e-9;
  std::printf("%-44s %8zu KB  dst %6.1f GB/s  traffic %6.1f GB/s\n", what, bytes / 1024, rate,
              rate * streams);
}

// Zeros stay zeros, however often a sum in place is repeated.
char* allocate(size_t bytes) {
  char* p = static_cast<char*>(std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096));
  std::memset(p, 0, bytes);
  return p;
}

void measure(size_t bytes) {
  char* dst = allocate(bytes);
  std::vector<const void*> srcs;
  for (int i = 0; i < 8; ++i) srcs.push_back(allocate(bytes));

  const DType dtypes[] = {DType::f32, DType::f16, DType::bf16};
  char label[64];
  for (DType dtype : dtypes) {
    const size_t count = bytes / size_of(dtype);
    std::vector<const void*> in_place = srcs;
    in_place[0] = dst;
    for (int n : {2, 4, 8}) {
      double seconds = best_seconds(
          bytes, [&] { reduce(dtype, ReduceOp::sum, dst, in_place.data(), n, count); });
      std::snprintf(label, sizeof(label), "%s sum of %d, in place", name(dtype), n);
      print(label, n + 1, bytes, seconds);
      for (bool streaming : {false, true}) {
        seconds = best_seconds(
            bytes, [&] { reduce(dtype, ReduceOp::sum, dst, srcs.data(), n, count, streaming); });
        std::snprintf(label, sizeof(label), "%s sum of %d%s", name(dtype), n,
                      streaming ? ", streaming" : "");
        print(label, n + 1, bytes, seconds);
      }
    }
  }
  for (bool streaming : {false, true}) {
    print(streaming ? "copy, streaming" : "copy", 2, bytes,
          best_seconds(bytes, [&] { copy(dst, srcs[0], bytes, streaming); }));
  }
  for (const void* p : srcs) std::free(const_cast<void*>(p));
  std::free(dst);
}

}  // namespace

// Arguments: further sizes in MB. A run repeats over the same memory, so that 25 MB partly stay in
// a large L3; 200 show what the memory itself gives.
int main(int argc, char** argv) {
  measure(kL2Bytes);
  measure(kMemoryBytes);
  for (int i = 1; i < argc; ++i) measure(static_cast<size_t>(std::atoi(argv[i])) * 1000000);
  return 0;
}
