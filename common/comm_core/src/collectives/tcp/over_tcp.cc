#include <algorithm>

#include "collectives/collectives.h"
#include "collectives/tcp/exchange_stage.h"
#include "collectives/tcp/ring_stage.h"
#include "group/group.h"
#include "reduce/kernels.h"

namespace comm_core {

namespace {

// Up to here everybody sends to everybody in one hop; beyond, trees have fewer messages.
constexpr int kDirectRanks = 8;

class Builder {
 public:
  Builder(Group& group, const OpSpec& spec, const FrameHeader& frame)
      : group_(group),
        spec_(spec),
        frame_(frame),
        n_(group.size()),
        me_(group.rank()),
        divisor_(spec.op == ReduceOp::avg ? n_ : 0),
        large_(frame.total_bytes >= group.options().tcp_small) {}

  Stages build() {
    switch (spec_.kind) {
      case OpKind::all_reduce:
        large_ ? ring_all_reduce() : n_ <= kDirectRanks ? direct_all_reduce() : doubling();
        break;
      case OpKind::reduce_scatter: large_ ? ring_reduce_scatter() : direct_reduce_scatter(); break;
      case OpKind::all_gather:
        add_local([from = spec_.inputs[0], to = spec_.outputs[size_t(me_)]] {
          if (from.data != to.data) copy(to.data, from.data, from.bytes);
        });
        large_ ? ring_all_gather(spec_.outputs) : direct_all_gather();
        break;
      case OpKind::broadcast: large_ ? chain() : tree(); break;
      case OpKind::reduce: large_ ? ring_reduce() : direct_reduce(); break;
      case OpKind::gather: gather(); break;
      case OpKind::scatter: scatter(); break;
      case OpKind::all_to_all: all_to_all(); break;
      case OpKind::barrier:
        for (int distance = 1; distance < n_; distance *= 2) {
          add_exchange({{(me_ + distance) % n_, {}}}, {{(me_ - distance + n_) % n_, {}}});
        }
        break;
      default: throw InvalidRequestError(std::string(name(spec_.kind)) + " is no collective");
    }
    return std::move(stages_);
  }

 private:
  using Sendings = std::vector<ExchangeStage::Sending>;
  using Receivings = std::vector<ExchangeStage::Receiving>;

  FrameHeader next_frame() {
    frame_.stage = uint8_t(stages_.size());
    return frame_;
  }

  void add_local(std::function<void()> work) {
    stages_.push_back(std::make_unique<LocalStage>(std::move(work)));
  }

  void add_exchange(Sendings sending, Receivings receiving) {
    stages_.push_back(std::make_unique<ExchangeStage>(group_, next_frame(), std::move(sending),
                                                      std::move(receiving)));
  }

  std::shared_ptr<Scratch> scratch(size_t bytes) {
    return std::make_shared<Scratch>(group_.scratch(), std::max<size_t>(bytes, 64));
  }

  // All ranks in order, the ring's first place being `first`.
  Ring ring(int first = 0) const {
    Ring ring;
    for (int i = 0; i < n_; ++i) ring.ranks.push_back((first + i) % n_);
    ring.place = (me_ - first + n_) % n_;
    return ring;
  }

  std::vector<Span> cuts(const Span& whole) const {
    std::vector<Span> blocks;
    for (int i = 0; i < n_; ++i) {
      const Cut c = cut(whole.bytes, size_of(spec_.dtype), n_, i);
      blocks.push_back({whole.data + c.begin, c.bytes});
    }
    return blocks;
  }

  void add_ring_reduce(std::vector<ConstSpan> inputs, Span output) {
    stages_.push_back(std::make_unique<RingReduceStage>(
        group_, ring(), next_frame(), spec_.dtype, spec_.op, std::move(inputs), output, divisor_));
  }

  // Folds what every rank sent, in rank order, so that all ranks get the same bits.
  void add_fold(std::shared_ptr<Scratch> arrived, ConstSpan own, Span output) {
    add_local([=, dtype = spec_.dtype, op = spec_.op, n = n_, me = me_, divisor = divisor_] {
      std::vector<const void*> sources;
      for (int r = 0; r < n; ++r) {
        sources.push_back(r == me ? own.data : arrived->data() + size_t(r) * own.bytes);
      }
      const size_t count = own.bytes / size_of(dtype);
      reduce(dtype, op, output.data, sources.data(), n, count);
      if (divisor > 0) divide(dtype, output.data, count, divisor);
    });
  }

  void direct_all_reduce() {
    const ConstSpan own = spec_.inputs[0];
    auto arrived = scratch(own.bytes * size_t(n_));
    Sendings sending;
    Receivings receiving;
    for (int k = 1; k < n_; ++k) {
      const int peer = (me_ + k) % n_;
      sending.push_back({peer, own});
      receiving.push_back({peer, {arrived->data() + size_t(peer) * own.bytes, own.bytes}});
    }
    add_exchange(sending, receiving);
    add_fold(arrived, own, spec_.outputs[0]);
  }

  // Recursive doubling. Ranks beyond the largest power of two hand in before and get back after.
  // Both of a pair fold the lower rank's value first, so that all ranks get the same bits.
  void doubling() {
    const Span out = spec_.outputs[0];
    add_local([from = spec_.inputs[0], out] {
      if (from.data != out.data) copy(out.data, from.data, from.bytes);
    });
    int power = 1;
    while (power * 2 <= n_) power *= 2;
    auto other = scratch(out.bytes);
    const Span arrived{other->data(), out.bytes};
    const auto fold = [&](bool theirs_first) {
      add_local([=, dtype = spec_.dtype, op = spec_.op] {
        const void* sources[2] = {theirs_first ? other->data() : out.data,
                                  theirs_first ? out.data : other->data()};
        reduce(dtype, op, out.data, sources, 2, out.bytes / size_of(dtype));
      });
    };
    if (me_ >= power) {
      add_exchange({{me_ - power, out}}, {});
      while (stages_.size() < kLastStage) add_local([] {});
      add_exchange({}, {{me_ - power, out}});
      return;
    }
    const bool has_extra = me_ + power < n_;
    if (has_extra) {
      add_exchange({}, {{me_ + power, arrived}});
      fold(false);
    }
    for (int distance = 1; distance < power; distance *= 2) {
      const int peer = me_ ^ distance;
      // Both sides number the stage alike, with or without an extra rank.
      while (stages_.size() < size_t(8 + 2 * distance_index(distance))) add_local([] {});
      add_exchange({{peer, out}}, {{peer, arrived}});
      fold(peer < me_);
    }
    if (divisor_ > 0) {
      add_local([out, dtype = spec_.dtype, divisor = divisor_] {
        divide(dtype, out.data, out.bytes / size_of(dtype), divisor);
      });
    }
    if (has_extra) {
      while (stages_.size() < kLastStage) add_local([] {});
      add_exchange({{me_ + power, out}}, {});
    }
  }
  static constexpr size_t kLastStage = 100;
  static int distance_index(int distance) {
    int index = 0;
    while (distance > 1) {
      distance /= 2;
      ++index;
    }
    return index;
  }

  void ring_all_reduce() {
    const std::vector<Span> out = cuts(spec_.outputs[0]);
    std::vector<ConstSpan> in;
    for (int i = 0; i < n_; ++i) {
      const size_t begin = size_t(out[size_t(i)].data - spec_.outputs[0].data);
      in.push_back({spec_.inputs[0].data + begin, out[size_t(i)].bytes});
    }
    add_ring_reduce(std::move(in), out[size_t(me_)]);
    ring_all_gather(out);
  }

  void ring_all_gather(const std::vector<Span>& blocks) {
    const Ring r = ring();
    std::vector<Span> incoming;
    uint64_t outgoing = 0;
    for (int back = 0; back < n_; ++back) {
      if (back > 0) incoming.push_back(blocks[r.block(back)]);
      if (back < n_ - 1) outgoing += blocks[r.block(back)].bytes;
    }
    stages_.push_back(std::make_unique<RingForwardStage>(
        group_, r, next_frame(), std::vector<ConstSpan>{blocks[r.block(0)]}, incoming, outgoing));
  }

  void ring_reduce_scatter() { add_ring_reduce(spec_.inputs, spec_.outputs[0]); }

  void direct_reduce_scatter() {
    const ConstSpan own = spec_.inputs[size_t(me_)];
    auto arrived = scratch(own.bytes * size_t(n_));
    Sendings sending;
    Receivings receiving;
    for (int k = 1; k < n_; ++k) {
      const int peer = (me_ + k) % n_;
      sending.push_back({peer, spec_.inputs[size_t(peer)]});
      receiving.push_back({peer, {arrived->data() + size_t(peer) * own.bytes, own.bytes}});
    }
    add_exchange(sending, receiving);
    add_fold(arrived, own, spec_.outputs[0]);
  }

  void direct_all_gather() {
    Sendings sending;
    Receivings receiving;
    for (int k = 1; k < n_; ++k) {
      const int peer = (me_ + k) % n_;
      sending.push_back({peer, spec_.inputs[0]});
      receiving.push_back({peer, spec_.outputs[size_t(peer)]});
    }
    add_exchange(sending, receiving);
  }

  void chain() {
    const Ring r = ring(spec_.root);
    const Span whole = spec_.outputs[0];
    const bool first = r.place == 0, last = r.place == n_ - 1;
    stages_.push_back(std::make_unique<RingForwardStage>(
        group_, r, next_frame(), first ? std::vector<ConstSpan>{whole} : std::vector<ConstSpan>{},
        first ? std::vector<Span>{} : std::vector<Span>{whole}, last ? 0 : whole.bytes));
  }

  // A binomial tree: the rank at place p receives from p without its lowest set bit.
  void tree() {
    const int place = (me_ - spec_.root + n_) % n_;
    const auto rank_at = [&](int p) { return (p + spec_.root) % n_; };
    int lowest = 1;
    while (lowest < n_ && (place & lowest) == 0) lowest *= 2;
    FrameHeader frame = frame_;
    Sendings sending;
    for (int bit = lowest / 2; bit > 0; bit /= 2) {
      if (place + bit < n_) sending.push_back({rank_at(place + bit), spec_.outputs[0]});
    }
    if (place > 0) {
      stages_.push_back(std::make_unique<ExchangeStage>(
          group_, frame, Sendings{}, Receivings{{rank_at(place - lowest), spec_.outputs[0]}}));
    }
    stages_.push_back(
        std::make_unique<ExchangeStage>(group_, frame, std::move(sending), Receivings{}));
  }

  void direct_reduce() {
    const ConstSpan own = spec_.inputs[0];
    if (me_ != spec_.root) {
      add_exchange({{spec_.root, own}}, {});
      return;
    }
    auto arrived = scratch(own.bytes * size_t(n_));
    Receivings receiving;
    for (int peer = 0; peer < n_; ++peer) {
      if (peer == me_) continue;
      receiving.push_back({peer, {arrived->data() + size_t(peer) * own.bytes, own.bytes}});
    }
    add_exchange({}, receiving);
    add_fold(arrived, own, spec_.outputs[0]);
  }

  void ring_reduce() {
    const bool is_root = me_ == spec_.root;
    std::vector<ConstSpan> in;
    for (int i = 0; i < n_; ++i) {
      const Cut c = cut(spec_.inputs[0].bytes, size_of(spec_.dtype), n_, i);
      in.push_back({spec_.inputs[0].data + c.begin, c.bytes});
    }
    if (is_root) {
      const std::vector<Span> out = cuts(spec_.outputs[0]);
      add_ring_reduce(std::move(in), out[size_t(me_)]);
      Receivings receiving;
      for (int peer = 0; peer < n_; ++peer) {
        if (peer != me_) receiving.push_back({peer, out[size_t(peer)]});
      }
      add_exchange({}, receiving);
      return;
    }
    const size_t bytes = in[size_t(me_)].bytes;
    auto block = scratch(bytes);
    add_ring_reduce(std::move(in), {block->data(), bytes});
    add_exchange({{spec_.root, {block->data(), bytes}}}, {});
    add_local([block] {});  // keeps it until here
  }

  void gather() {
    if (me_ != spec_.root) {
      add_exchange({{spec_.root, spec_.inputs[0]}}, {});
      return;
    }
    Receivings receiving;
    for (int peer = 0; peer < n_; ++peer) {
      if (peer != me_) receiving.push_back({peer, spec_.outputs[size_t(peer)]});
    }
    add_exchange({}, receiving);
    add_local([from = spec_.inputs[0], to = spec_.outputs[size_t(me_)]] {
      if (from.data != to.data) copy(to.data, from.data, from.bytes);
    });
  }

  void scatter() {
    if (me_ != spec_.root) {
      add_exchange({}, {{spec_.root, spec_.outputs[0]}});
      return;
    }
    Sendings sending;
    for (int k = 1; k < n_; ++k) {
      const int peer = (me_ + k) % n_;
      sending.push_back({peer, spec_.inputs[size_t(peer)]});
    }
    add_exchange(sending, {});
    add_local([from = spec_.inputs[size_t(me_)], to = spec_.outputs[0]] {
      if (from.data != to.data) copy(to.data, from.data, from.bytes);
    });
  }

  void all_to_all() {
    Sendings sending;
    Receivings receiving;
    for (int k = 1; k < n_; ++k) {
      const int to = (me_ + k) % n_, from = (me_ - k + n_) % n_;
      sending.push_back({to, spec_.inputs[size_t(to)]});
      receiving.push_back({from, spec_.outputs[size_t(from)]});
    }
    add_exchange(sending, receiving);
    add_local([from = spec_.inputs[size_t(me_)], to = spec_.outputs[size_t(me_)]] {
      copy(to.data, from.data, from.bytes);
    });
  }

  Group& group_;
  const OpSpec& spec_;
  FrameHeader frame_;
  const int n_, me_;
  const int64_t divisor_;
  const bool large_;
  Stages stages_;
};

}  // namespace

Stages over_tcp(Group& group, const OpSpec& spec, const FrameHeader& frame) {
  return Builder(group, spec, frame).build();
}

}  // namespace comm_core
