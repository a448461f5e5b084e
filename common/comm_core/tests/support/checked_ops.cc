#include "checked_ops.h"

#include "reduce/kernels.h"
#include "shm/buffers.h"
#include "typed.h"

namespace comm_core::testing {

namespace {

// Value of element i of the block that rank `from` has for rank `to`: fits into every type.
int value(const Case& c, int from, int to, size_t i) {
  const uint32_t x = c.salt * 2654435761u + uint32_t(from) * 40503u + uint32_t(to) * 69069u +
                     uint32_t(i) * 2246822519u;
  return int((x >> 16) % 4) + 1;
}

double folded(ReduceOp op, double a, double b) {
  switch (op) {
    case ReduceOp::sum:
    case ReduceOp::avg: return a + b;
    case ReduceOp::min: return std::fmin(a, b);
    case ReduceOp::max: return std::fmax(a, b);
    case ReduceOp::product: return a * b;
    case ReduceOp::band: return double(int(a) & int(b));
    case ReduceOp::bor: return double(int(a) | int(b));
    case ReduceOp::bxor: return double(int(a) ^ int(b));
  }
  return 0;
}

// Bytes on the heap or in memory that other processes can map.
class Memory {
 public:
  explicit Memory(bool shared) : shared_(shared) {}
  ~Memory() {
    if (shared_ && data_ != nullptr) {
      SharedBuffers::instance().free(data_);
    } else {
      delete[] data_;
    }
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  Span allocate(size_t size) {
    if (size > 0) data_ = shared_ ? SharedBuffers::instance().allocate(size) : new char[size]();
    return {data_, size};
  }

 private:
  const bool shared_;
  char* data_ = nullptr;
};

class Checked : public Running {
 public:
  Checked(Group& group, const Case& c)
      : group_(group),
        c_(c),
        n_(group.size()),
        me_(group.rank()),
        in_(c.shared >> std::min(me_, 63) & 1),
        out_(c.shared >> std::min(me_, 63) & 1) {
    OpSpec spec;
    spec.kind = c.kind;
    spec.dtype = c.dtype;
    spec.op = c.op;
    spec.root = c.root;
    spec.priority = c.priority;
    const bool root = me_ == c.root;
    const size_t me = size_t(me_), bytes = c.count * size_of(c.dtype);
    switch (c.kind) {
      case OpKind::all_reduce:
      case OpKind::reduce: {
        const Span in = in_.allocate(bytes), out = out_.allocate(bytes);
        fill(in, me_, 0);
        spec.inputs = {in};
        if (c.kind == OpKind::reduce && !root) break;
        spec.outputs = {c.in_place ? in : out};
        expect_in(spec.outputs[0], kFolded, 0);
        break;
      }
      case OpKind::broadcast:
        spec.outputs = {out_.allocate(bytes)};
        if (root) fill(spec.outputs[0], me_, 0);
        expect_in(spec.outputs[0], c.root, 0);
        break;
      case OpKind::reduce_scatter: {
        const auto blocks = lay_out(in_, [&](int to) { return block(to, to); });
        for (int to = 0; to < n_; ++to) fill(blocks[size_t(to)], me_, to);
        spec.inputs = {blocks.begin(), blocks.end()};
        spec.outputs = {c.in_place ? blocks[me] : out_.allocate(blocks[me].bytes)};
        expect_in(spec.outputs[0], kFolded, me_);
        break;
      }
      case OpKind::all_gather: {
        spec.outputs = lay_out(out_, [&](int from) { return block(from, from); });
        const Span own = spec.outputs[me];
        const Span in = c.in_place ? own : in_.allocate(own.bytes);
        fill(in, me_, 0);
        spec.inputs = {in};
        for (int from = 0; from < n_; ++from) expect_in(spec.outputs[size_t(from)], from, 0);
        break;
      }
      case OpKind::gather: {
        const Span in = in_.allocate(bytes);
        fill(in, me_, 0);
        spec.inputs = {in};
        if (!root) break;
        spec.outputs = lay_out(out_, [&](int) { return c.count; });
        for (int from = 0; from < n_; ++from) expect_in(spec.outputs[size_t(from)], from, 0);
        break;
      }
      case OpKind::scatter: {
        spec.outputs = {out_.allocate(bytes)};
        expect_in(spec.outputs[0], c.root, me_);
        if (!root) break;
        const auto blocks = lay_out(in_, [&](int) { return c.count; });
        for (int to = 0; to < n_; ++to) fill(blocks[size_t(to)], me_, to);
        spec.inputs = {blocks.begin(), blocks.end()};
        break;
      }
      case OpKind::all_to_all: {
        const auto blocks = lay_out(in_, [&](int to) { return block(me_, to); });
        for (int to = 0; to < n_; ++to) fill(blocks[size_t(to)], me_, to);
        spec.inputs = {blocks.begin(), blocks.end()};
        spec.outputs = lay_out(out_, [&](int from) { return block(from, me_); });
        for (int from = 0; from < n_; ++from) expect_in(spec.outputs[size_t(from)], from, me_);
        break;
      }
      default: break;
    }
    op_ = group.submit(std::move(spec));
  }

  void check() override {
    op_->wait();
    if (op_->error()) std::rethrow_exception(op_->error());
    as_type(c_.dtype, [&](auto zero) {
      using T = decltype(zero);
      if constexpr (std::is_arithmetic_v<T>) {
        for (const Expected& e : expected_) {
          for (size_t i = 0; i < e.memory.bytes / sizeof(T); ++i) {
            const double got = double(load<T>(e.memory.data, i));
            const double wanted =
                e.from == kFolded ? fold_all(e.to, i) : value(c_, e.from, e.to, i);
            if (std::fabs(got - wanted) <= 1e-5 * std::fabs(wanted)) continue;
            throw std::runtime_error(describe(c_) + ": element " + std::to_string(i) + " is " +
                                     std::to_string(got) + ", not " + std::to_string(wanted) +
                                     " (" + op_->describe() + ")");
          }
        }
      }
    });
  }

 private:
  static constexpr int kFolded = -1;
  // Memory that must contain the block of `from` for `to`; with kFolded, the reduction of the
  // blocks of all ranks for `to`.
  struct Expected {
    Span memory;
    int from, to;
  };
  void expect_in(Span memory, int from, int to) { expected_.push_back({memory, from, to}); }

  // Number of elements that `from` has for `to`.
  size_t block(int from, int to) const {
    return c_.uneven ? (c_.count * size_t(from + 2 * to + 1)) % (c_.count + 3) : c_.count;
  }

  // Allocates contiguous blocks, one per rank, of `count(rank)` elements.
  template <typename F>
  std::vector<Span> lay_out(Memory& memory, F count) {
    std::vector<Span> blocks;
    size_t total = 0;
    for (int r = 0; r < n_; ++r) {
      blocks.push_back({nullptr, count(r) * size_of(c_.dtype)});
      total += blocks.back().bytes;
    }
    char* next = memory.allocate(total).data;
    for (Span& block : blocks) block.data = std::exchange(next, next + block.bytes);
    return blocks;
  }

  void fill(Span memory, int from, int to) {
    as_type(c_.dtype, [&](auto zero) {
      using T = decltype(zero);
      if constexpr (std::is_arithmetic_v<T>) {
        for (size_t i = 0; i < memory.bytes / sizeof(T); ++i) {
          store(memory.data, i, T(value(c_, from, to, i)));
        }
      }
    });
  }

  double fold_all(int to, size_t i) const {
    double v = value(c_, 0, to, i);
    for (int from = 1; from < n_; ++from) v = folded(c_.op, v, value(c_, from, to, i));
    return c_.op == ReduceOp::avg ? v / n_ : v;
  }

  Group& group_;
  const Case c_;
  const int n_, me_;
  Memory in_, out_;
  std::vector<Expected> expected_;
  OpPtr op_;
};

}  // namespace

std::string describe(const Case& c) {
  return std::string(name(c.kind)) + "(" + name(c.dtype) + ", " + name(c.op) + ", root " +
         std::to_string(c.root) + ", count " + std::to_string(c.count) +
         (c.in_place ? ", in place" : "") + (c.uneven ? ", uneven" : "") +
         (c.shared != 0 ? ", shared " + std::to_string(c.shared) : "") + ")";
}

Case draw(std::mt19937& random, int n) {
  constexpr OpKind kKinds[] = {OpKind::all_reduce, OpKind::reduce_scatter, OpKind::all_gather,
                               OpKind::broadcast,  OpKind::reduce,         OpKind::gather,
                               OpKind::scatter,    OpKind::all_to_all,     OpKind::barrier};
  constexpr DType kTypes[] = {DType::f32, DType::f64, DType::i32, DType::i64, DType::i8, DType::u8};
  constexpr ReduceOp kOps[] = {ReduceOp::sum, ReduceOp::avg, ReduceOp::min,
                               ReduceOp::max, ReduceOp::bor, ReduceOp::bxor};
  constexpr size_t kCounts[] = {0, 1, 2, 3, 7, 64, 1000, 1024, 5003, 40000};
  Case c;
  c.kind = kKinds[random() % std::size(kKinds)];
  c.dtype = kTypes[random() % std::size(kTypes)];
  do {
    c.op = kOps[random() % std::size(kOps)];
  } while (!supports(c.dtype, c.op));
  c.root = int(random() % uint32_t(n));
  c.count = kCounts[random() % std::size(kCounts)];
  c.salt = random();
  c.in_place = random() % 2 == 0;
  c.uneven = random() % 2 == 0;
  c.priority = int(random() % 3);
  // Mostly the memory of no rank is shared, else that of all ranks, sometimes that of some.
  constexpr uint32_t kShared[] = {0, 0, 0, 0, 0, ~0u, ~0u, 0b0101};
  c.shared = kShared[random() % std::size(kShared)];
  return c;
}

std::unique_ptr<Running> start(Group& group, const Case& c) {
  return std::make_unique<Checked>(group, c);
}

}  // namespace comm_core::testing
