#include "checked_ops.h"

#include <cmath>
#include <cstring>

#include "reduce/kernels.h"
#include "shm/buffers.h"

namespace comm_core::testing {

namespace {

// Value of element i of the block that `from` contributes for `to`: small enough for every type.
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

template <typename T>
void put_as(char* data, size_t i, double v) {
  reinterpret_cast<T*>(data)[i] = T(v);
}
template <typename T>
double get_as(const char* data, size_t i) {
  return double(reinterpret_cast<const T*>(data)[i]);
}

void put(DType dtype, char* data, size_t i, double v) {
  switch (dtype) {
    case DType::f32: return put_as<float>(data, i, v);
    case DType::f64: return put_as<double>(data, i, v);
    case DType::i32: return put_as<int32_t>(data, i, v);
    case DType::i64: return put_as<int64_t>(data, i, v);
    case DType::i8: return put_as<int8_t>(data, i, v);
    case DType::u8: return put_as<uint8_t>(data, i, v);
    default: throw std::logic_error("no such type in this test");
  }
}

double get(DType dtype, const char* data, size_t i) {
  switch (dtype) {
    case DType::f32: return get_as<float>(data, i);
    case DType::f64: return get_as<double>(data, i);
    case DType::i32: return get_as<int32_t>(data, i);
    case DType::i64: return get_as<int64_t>(data, i);
    case DType::i8: return get_as<int8_t>(data, i);
    case DType::u8: return get_as<uint8_t>(data, i);
    default: throw std::logic_error("no such type in this test");
  }
}

// A vector of bytes, in the heap or where other processes can map it.
class Memory {
 public:
  explicit Memory(bool shared) : shared_(shared) {}
  ~Memory() { release(); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  char* data() const { return data_; }
  size_t size() const { return size_; }
  void resize(size_t size) {
    if (size <= size_) return;
    char* grown = shared_ ? SharedBuffers::instance().allocate(size) : new char[size]();
    if (size_ > 0) std::memcpy(grown, data_, size_);
    release();
    data_ = grown;
    size_ = size;
  }

 private:
  void release() {
    if (shared_ && data_ != nullptr) {
      SharedBuffers::instance().free(data_);
    } else {
      delete[] data_;
    }
  }
  const bool shared_;
  char* data_ = nullptr;
  size_t size_ = 0;
};

class Checked : public Running {
 public:
  Checked(Group& group, const Case& c)
      : group_(group),
        c_(c),
        n_(group.size()),
        me_(group.rank()),
        element_(size_of(c.dtype)),
        in_(c.shared >> me_ & 1),
        out_(c.shared >> me_ & 1) {
    OpSpec spec;
    spec.kind = c.kind;
    spec.dtype = c.dtype;
    spec.op = c.op;
    spec.root = c.root;
    spec.priority = c.priority;
    const bool root = me_ == c.root;
    const size_t n = size_t(n_);
    switch (c.kind) {
      case OpKind::all_reduce: whole(spec, c.in_place); break;
      case OpKind::reduce:
        whole(spec, c.in_place);
        if (!root) spec.outputs.clear();
        break;
      case OpKind::broadcast:
        out_.resize(c.count * element_);
        if (root) fill(out_.data(), c.count, me_, 0);
        spec.outputs = {{out_.data(), out_.size()}};
        break;
      case OpKind::reduce_scatter: {
        for (int to = 0; to < n_; ++to) offsets_.push_back(grow(in_, block(to, to)));
        offsets_.push_back(in_.size());
        for (int to = 0; to < n_; ++to) {
          fill(in_.data() + offsets_[size_t(to)], block(to, to), me_, to);
          spec.inputs.push_back({in_.data() + offsets_[size_t(to)], block(to, to) * element_});
        }
        out_.resize(block(me_, me_) * element_);
        char* out = c.in_place ? in_.data() + offsets_[size_t(me_)] : out_.data();
        result_ = out;
        spec.outputs = {{out, out_.size()}};
        break;
      }
      case OpKind::all_gather: {
        for (int from = 0; from < n_; ++from) offsets_.push_back(grow(out_, block(from, from)));
        in_.resize(block(me_, me_) * element_);
        char* in = c.in_place ? out_.data() + offsets_[size_t(me_)] : in_.data();
        fill(in, block(me_, me_), me_, 0);
        spec.inputs = {{in, in_.size()}};
        for (int from = 0; from < n_; ++from) {
          spec.outputs.push_back(
              {out_.data() + offsets_[size_t(from)], block(from, from) * element_});
        }
        break;
      }
      case OpKind::gather:
        in_.resize(c.count * element_);
        fill(in_.data(), c.count, me_, 0);
        spec.inputs = {{in_.data(), in_.size()}};
        if (root) {
          out_.resize(n * c.count * element_);
          for (size_t from = 0; from < n; ++from) {
            spec.outputs.push_back({out_.data() + from * in_.size(), in_.size()});
          }
        }
        break;
      case OpKind::scatter:
        out_.resize(c.count * element_);
        spec.outputs = {{out_.data(), out_.size()}};
        if (root) {
          in_.resize(n * out_.size());
          for (size_t to = 0; to < n; ++to) {
            fill(in_.data() + to * out_.size(), c.count, me_, int(to));
            spec.inputs.push_back({in_.data() + to * out_.size(), out_.size()});
          }
        }
        break;
      case OpKind::all_to_all: {
        for (int to = 0; to < n_; ++to) offsets_.push_back(grow(in_, block(me_, to)));
        for (int from = 0; from < n_; ++from) out_offsets_.push_back(grow(out_, block(from, me_)));
        for (int to = 0; to < n_; ++to) {
          fill(in_.data() + offsets_[size_t(to)], block(me_, to), me_, to);
          spec.inputs.push_back({in_.data() + offsets_[size_t(to)], block(me_, to) * element_});
          spec.outputs.push_back(
              {out_.data() + out_offsets_[size_t(to)], block(to, me_) * element_});
        }
        break;
      }
      default: break;
    }
    op_ = group.submit(std::move(spec));
  }

  void check() override {
    op_->wait();
    if (op_->error()) std::rethrow_exception(op_->error());
    switch (c_.kind) {
      case OpKind::all_reduce: return same(result_, c_.count, [&](size_t i) { return fold(0, i); });
      case OpKind::reduce:
        if (me_ == c_.root) same(result_, c_.count, [&](size_t i) { return fold(0, i); });
        return;
      case OpKind::broadcast:
        return same(out_.data(), c_.count, [&](size_t i) { return value(c_, c_.root, 0, i); });
      case OpKind::reduce_scatter:
        return same(result_, block(me_, me_), [&](size_t i) { return fold(me_, i); });
      case OpKind::all_gather:
        for (int from = 0; from < n_; ++from) {
          same(out_.data() + offsets_[size_t(from)], block(from, from),
               [&](size_t i) { return value(c_, from, 0, i); });
        }
        return;
      case OpKind::gather:
        for (int from = 0; from < n_ && me_ == c_.root; ++from) {
          same(out_.data() + size_t(from) * in_.size(), c_.count,
               [&](size_t i) { return value(c_, from, 0, i); });
        }
        return;
      case OpKind::scatter:
        return same(out_.data(), c_.count, [&](size_t i) { return value(c_, c_.root, me_, i); });
      case OpKind::all_to_all:
        for (int from = 0; from < n_; ++from) {
          same(out_.data() + out_offsets_[size_t(from)], block(from, me_),
               [&](size_t i) { return value(c_, from, me_, i); });
        }
        return;
      default: return;
    }
  }

 private:
  // Elements that `from` has for `to`.
  size_t block(int from, int to) const {
    return c_.uneven ? (c_.count * size_t(from + 2 * to + 1)) % (c_.count + 3) : c_.count;
  }

  size_t grow(Memory& memory, size_t count) {
    const size_t at = memory.size();
    memory.resize(at + count * element_);
    return at;
  }

  void whole(OpSpec& spec, bool in_place) {
    in_.resize(c_.count * element_);
    out_.resize(in_.size());
    fill(in_.data(), c_.count, me_, 0);
    spec.inputs = {{in_.data(), in_.size()}};
    result_ = in_place ? in_.data() : out_.data();
    spec.outputs = {{result_, in_.size()}};
  }

  void fill(char* data, size_t count, int from, int to) {
    for (size_t i = 0; i < count; ++i) put(c_.dtype, data, i, value(c_, from, to, i));
  }

  double fold(int to, size_t i) const {
    double v = value(c_, 0, to, i);
    for (int from = 1; from < n_; ++from) v = folded(c_.op, v, value(c_, from, to, i));
    return c_.op == ReduceOp::avg ? v / n_ : v;
  }

  template <typename F>
  void same(const char* data, size_t count, F expected) {
    for (size_t i = 0; i < count; ++i) {
      const double got = get(c_.dtype, data, i), wanted = expected(i);
      if (std::fabs(got - wanted) > 1e-5 * std::fabs(wanted)) {
        throw std::runtime_error(describe(c_) + ": element " + std::to_string(i) + " is " +
                                 std::to_string(got) + ", not " + std::to_string(wanted) + " (" +
                                 group_.describe(*op_) + ")");
      }
    }
  }

  Group& group_;
  const Case c_;
  const int n_, me_;
  const size_t element_;
  Memory in_, out_;
  std::vector<size_t> offsets_, out_offsets_;
  char* result_ = nullptr;
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
  // Mostly nobody's, else everybody's, at times only some ranks'.
  constexpr uint32_t kShared[] = {0, 0, 0, 0, 0, ~0u, ~0u, 0b0101};
  c.shared = kShared[random() % std::size(kShared)];
  return c;
}

std::unique_ptr<Running> start(Group& group, const Case& c) {
  return std::make_unique<Checked>(group, c);
}

}  // namespace comm_core::testing
