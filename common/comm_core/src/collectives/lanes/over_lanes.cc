#include <algorithm>
#include <bit>

#include "collectives/collectives.h"
#include "collectives/regimes.h"
#include "reduce/kernels.h"

namespace comm_core {
namespace {

// Returns whether the algorithm depends on the size. All ranks see the same size then, unlike in an
// all_to_all, where each rank's total is its own.
bool goes_by_size(OpKind kind) {
  return kind == OpKind::all_reduce || kind == OpKind::reduce_scatter ||
         kind == OpKind::all_gather || kind == OpKind::broadcast || kind == OpKind::reduce;
}

// Planner for lanes between all ranks.
class OverLanes : Planner {
 public:
  OverLanes(const GroupView& group, const OpSpec& spec, const FrameHeader& frame)
      : Planner(group, spec, frame),
        n_(group.size()),
        me_(group.rank),
        root_(spec.root),
        straight_(blocks_go_straight(spec.kind, n_, frame.total_bytes, group.options)),
        large_(goes_by_size(spec.kind) && frame.total_bytes >= group.options.tcp_small &&
               !straight_) {
    frame_.way = large_ ? Way::ring : Way::few_hops;
  }

  Stages build() {
    const std::vector<ConstSpan>& in = spec_.inputs;
    const std::vector<Span>& out = spec_.outputs;
    const size_t me = size_t(me_);
    const bool is_root = me_ == root_;
    switch (spec_.kind) {
      case OpKind::all_reduce:
        straight_            ? two_hops()
        : large_             ? ring_all_reduce()
        : n_ <= kDirectRanks ? direct_fold(to_all(in[0]), out[0])
                             : doubling();
        break;
      case OpKind::reduce_scatter:
        large_ ? add_ring_reduce(ring(), in, out[0], divisor_) : direct_fold(in, out[0]);
        break;
      case OpKind::all_gather:
        add(own_copy(in[0], out[me]));
        large_ ? add_ring_gather(ring(), out) : exchange_with_all(to_all(in[0]), out);
        break;
      case OpKind::broadcast: large_ ? chain() : tree(); break;
      case OpKind::reduce:
        large_ ? ring_reduce_to_root() : is_root ? direct_fold({}, out[0]) : send_to_root(in[0]);
        break;
      case OpKind::gather:
        is_root ? exchange_with_all({}, out) : send_to_root(in[0]);
        if (is_root) add(own_copy(in[0], out[me]));
        break;
      case OpKind::scatter:
        is_root ? exchange_with_all(in, {}) : add_exchange({}, {{root_, out[0]}});
        if (is_root) add(own_copy(in[me], out[0]));
        break;
      case OpKind::all_to_all:
        exchange_with_all(in, out);
        add(own_copy(in[me], out[me]));
        break;
      case OpKind::barrier:
        for (int distance = 1; distance < n_; distance *= 2) {
          add_exchange({{(me_ + distance) % n_, {}}}, {{(me_ - distance + n_) % n_, {}}});
        }
        break;
      default: throw InvalidRequestError(std::string(name(spec_.kind)) + " is not a collective");
    }
    return std::move(stages_);
  }

 private:
  using Sendings = std::vector<Sending>;
  using Receivings = std::vector<Receiving>;

  void add_exchange(const Sendings& sending, const Receivings& receiving) {
    add(exchange(group_.lanes, next_frame(), sending, receiving));
  }

  void send_to_root(ConstSpan block) { add_exchange({{root_, block}}, {}); }

  std::vector<ConstSpan> to_all(ConstSpan block) const {
    return std::vector<ConstSpan>(size_t(n_), block);
  }

  // Exchanges blocks with all other ranks; `to` and `from` have a block per rank, or none at all.
  void exchange_with_all(const std::vector<ConstSpan>& to, const std::vector<Span>& from) {
    Sendings sending;
    Receivings receiving;
    for (int k = 1; k < n_; ++k) {
      const int next = (me_ + k) % n_, previous = (me_ - k + n_) % n_;
      if (!to.empty()) sending.push_back({next, to[size_t(next)]});
      if (!from.empty()) receiving.push_back({previous, from[size_t(previous)]});
    }
    add_exchange(sending, receiving);
  }

  // Returns the ring of all ranks in order, beginning with `first`.
  Ring ring(int first = 0) const {
    Ring ring;
    for (int i = 0; i < n_; ++i) ring.ranks.push_back((first + i) % n_);
    ring.place = (me_ - first + n_) % n_;
    return ring;
  }

  // Reduces what every rank sends, in rank order, so that all ranks get the same bits.
  void direct_fold(const std::vector<ConstSpan>& to, Span output) {
    const ConstSpan own = to.empty() ? spec_.inputs[0] : to[size_t(me_)];
    auto arrived = scratch(own.bytes * size_t(n_));
    std::vector<Span> from;
    for (size_t r = 0; r < size_t(n_); ++r) {
      from.push_back({arrived->data() + r * own.bytes, own.bytes});
    }
    exchange_with_all(to, from);
    std::vector<const void*> sources;
    for (const Span& block : from) sources.push_back(block.data);
    sources[size_t(me_)] = own.data;
    add_local([arrived, sources, bytes = own.bytes, out = output.data, frame = frame_,
               divisor = divisor_] {
      fold(frame, divisor, out, sources.data(), int(sources.size()), bytes);
    });
  }

  // Every rank reduces its own block, which all others send to it, and sends the result to all.
  void two_hops() {
    const std::vector<Span> out = cuts(spec_.outputs[0], spec_.dtype, n_);
    direct_fold(cuts(spec_.inputs[0], spec_.dtype, n_), out[size_t(me_)]);
    exchange_with_all(to_all(out[size_t(me_)]), out);
  }

  // Recursive doubling. Ranks beyond the largest power of two send their data to a partner before
  // it and receive the result after it. Both ranks of a pair put the value of the lower one first,
  // so that all ranks get the same bits.
  void doubling() {
    const Span out = spec_.outputs[0];
    add(own_copy(spec_.inputs[0], out));
    const auto add_divide = [&] {
      add_local([out, dtype = spec_.dtype, divisor = divisor_] {
        divide(dtype, out.data, out.bytes / size_of(dtype), divisor);
      });
    };
    if (divides_first_) add_divide();
    const int power = int(std::bit_floor(unsigned(n_)));
    auto other = scratch(out.bytes);
    const Span arrived{other->data(), out.bytes};
    const auto add_fold = [&](bool theirs_first) {
      add_local([=, frame = frame_] {
        const void* sources[2] = {theirs_first ? other->data() : out.data,
                                  theirs_first ? out.data : other->data()};
        fold(frame, 0, out.data, sources, 2, out.bytes);
      });
    };
    // Both ranks of a pair must use the same stage number, even if only one has an extra partner.
    const auto skip_to = [&](size_t stage) {
      while (stages_.size() < stage) add_local([] {});
    };
    constexpr size_t kFirstStage = 4, kLastStage = 100;
    if (me_ >= power) {
      skip_to(kFirstStage);
      add_exchange({{me_ - power, out}}, {});
      skip_to(kLastStage);
      return add_exchange({}, {{me_ - power, out}});
    }
    const bool has_extra = me_ + power < n_;
    if (has_extra) {
      skip_to(kFirstStage);
      add_exchange({}, {{me_ + power, arrived}});
      add_fold(false);
    }
    for (int bit = 0; 1 << bit < power; ++bit) {
      const int peer = me_ ^ 1 << bit;
      skip_to(size_t(8 + 2 * bit));
      add_exchange({{peer, out}}, {{peer, arrived}});
      add_fold(peer < me_);
    }
    if (divisor_ > 0 && !divides_first_) add_divide();
    if (has_extra) {
      skip_to(kLastStage);
      add_exchange({{me_ + power, out}}, {});
    }
  }

  void ring_all_reduce() {
    const std::vector<Span> out = cuts(spec_.outputs[0], spec_.dtype, n_);
    add_ring_reduce(ring(), cuts(spec_.inputs[0], spec_.dtype, n_), out[size_t(me_)], divisor_);
    add_ring_gather(ring(), out);
  }

  void chain() {
    const Ring r = ring(root_);
    const Span whole = spec_.outputs[0];
    std::vector<ConstSpan> own;
    std::vector<Span> incoming;
    r.place == 0 ? own.push_back(whole) : incoming.push_back(whole);
    add(ring_forward(group_.lanes, r, next_frame(), own, incoming,
                     r.place == n_ - 1 ? 0 : whole.bytes));
  }

  // Binomial tree: the rank at position p receives from position p without its lowest set bit. All
  // its messages use the frame of stage 0, because ranks send in different stages.
  void tree() {
    const int place = (me_ - root_ + n_) % n_;
    const auto rank_at = [&](int p) { return (p + root_) % n_; };
    int lowest = 1;
    while (lowest < n_ && (place & lowest) == 0) lowest *= 2;
    Sendings sending;
    for (int bit = lowest / 2; bit > 0; bit /= 2) {
      if (place + bit < n_) sending.push_back({rank_at(place + bit), spec_.outputs[0]});
    }
    if (place > 0) {
      add(exchange(group_.lanes, frame_, {}, {{rank_at(place - lowest), spec_.outputs[0]}}));
    }
    add(exchange(group_.lanes, frame_, sending, {}));
  }

  void ring_reduce_to_root() {
    std::vector<ConstSpan> in = cuts(spec_.inputs[0], spec_.dtype, n_);
    if (me_ == root_) {
      const std::vector<Span> out = cuts(spec_.outputs[0], spec_.dtype, n_);
      add_ring_reduce(ring(), std::move(in), out[size_t(me_)], divisor_);
      return exchange_with_all({}, out);
    }
    const size_t bytes = in[size_t(me_)].bytes;
    auto block = scratch(bytes);
    add_ring_reduce(ring(), std::move(in), {block->data(), bytes}, divisor_);
    send_to_root({block->data(), bytes});
    add_local([block] {});  // keeps the memory until it is sent
  }

  const int n_, me_, root_;
  const bool straight_, large_;
};

}  // namespace

Stages over_lanes(const GroupView& group, const OpSpec& spec, const FrameHeader& frame) {
  return OverLanes(group, spec, frame).build();
}

}  // namespace comm_core
