#include "group/callback_order.h"

#include <algorithm>

#include "base/clock.h"

namespace comm_core {

bool CallbackOrder::keep(uint64_t number, uint64_t context, const OpPtr& op, double deadline_s) {
  const auto place = contexts_.find(context);
  if (ended_ || place == contexts_.end() || place->second.open == 0) return false;
  place->second.kept.push_back({number, op, deadline_s});
  return true;
}

void CallbackOrder::begin(uint64_t number, uint64_t context) {
  ++contexts_[context].open;
  contexts_[number] = {context, true};
}

void CallbackOrder::open(uint64_t number, uint64_t context) {
  for (Kept& kept : contexts_[context].kept) {
    if (kept.number != number) continue;
    kept.opens = true;
    return;
  }
  begin(number, context);
}

std::vector<OpPtr> CallbackOrder::close(uint64_t number) {
  std::vector<OpPtr> ready;
  auto place = contexts_.find(number);
  if (place == contexts_.end()) return ready;
  place->second.running = false;
  for (;;) {
    Context& context = place->second;
    while (context.open == 0 && !context.kept.empty()) {
      const Kept next = std::move(context.kept.front());
      context.kept.pop_front();
      ready.push_back(next.op);
      if (next.opens) begin(next.number, place->first);
    }
    if (place->first == kProgram || context.running || context.open > 0) return ready;
    const uint64_t parent = context.parent;
    contexts_.erase(place);
    place = contexts_.find(parent);
    --place->second.open;
  }
}

std::vector<OpPtr> CallbackOrder::end() {
  ended_ = true;
  std::vector<OpPtr> waiting;
  for (auto& [number, context] : contexts_) {
    for (Kept& kept : context.kept) waiting.push_back(std::move(kept.op));
    context.kept.clear();
  }
  return waiting;
}

double CallbackOrder::deadline_s() const {
  double first = kNever;
  for (const auto& [number, context] : contexts_) {
    for (const Kept& kept : context.kept) first = std::min(first, kept.deadline_s);
  }
  return first;
}

}  // namespace comm_core
