#include <c10/util/Exception.h>

#include "backend.h"
#include "base/clock.h"

namespace comm_core {

// Every rank reports to rank 0 and waits for its answer. Rank 0 names the missing ranks. The
// messages use the wording that torch documents, so that a search in logs finds them.
void CoreBackend::monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all) {
  constexpr uint64_t kTag = uint64_t(1) << 40;  // outside the range of torch's tags
  // A negative time-out is unset. With 0, only ranks that have already arrived count.
  const double timeout_s = options.timeout.count() >= 0
                               ? std::chrono::duration<double>(options.timeout).count()
                               : group_->timeout_s();
  const double deadline = now_s() + timeout_s;
  const auto message = [&](OpKind kind, int peer) {
    OpSpec spec;
    spec.kind = kind;
    spec.peer = peer;
    spec.tag = kTag;
    // The wait below enforces the time-out; that of the operation must not pass first.
    spec.timeout_s = timeout_s + 60;
    auto kept = std::make_shared<char>(char(0));
    if (kind == OpKind::send) spec.inputs = {{kept.get(), 1}};
    if (kind == OpKind::recv) spec.outputs = {{kept.get(), 1}};
    spec.keep_alive = kept;
    return group_->submit(std::move(spec));
  };
  const auto finish = [&](const OpPtr& op) {
    const bool done = op->wait(std::max(1e-3, deadline - now_s()));
    if (done && op->error()) std::rethrow_exception(op->error());
    return done;
  };
  const std::string seconds = std::to_string(timeout_s).substr(0, 6) + " s";
  if (rank_ != 0) {
    const std::string errors = "Rank " + std::to_string(rank_) +
                               " successfully reached monitoredBarrier, but received errors "
                               "while waiting for send/recv from rank 0: ";
    try {
      finish(message(OpKind::send, 0));
      if (finish(message(OpKind::recv, 0))) return;
    } catch (const CommError& e) {
      C10_THROW_ERROR(DistBackendError, errors + e.what());
    }
    // No abort: rank 0 may have started later and still be waiting; it names the missing rank.
    C10_THROW_ERROR(DistBackendError, errors + "no answer within " + seconds +
                                          "; the log of rank 0 names the faulty rank");
  }
  try {
    std::vector<OpPtr> reports;
    for (int peer = 1; peer < size_; ++peer) reports.push_back(message(OpKind::recv, peer));
    std::string missing;
    for (int peer = 1; peer < size_; ++peer) {
      if (finish(reports[size_t(peer - 1)])) continue;
      missing += (missing.empty() ? "" : ", ") + std::to_string(peer);
      if (!wait_all) break;
    }
    if (!missing.empty()) {
      const std::string text =
          "Rank 0 timed out in monitoredBarrier after " + seconds + ": " +
          (wait_all ? "Ranks " + missing + " failed to pass monitoredBarrier"
                    : "Rank " + missing +
                          " failed to pass monitoredBarrier (the first; wait_all_ranks names all)");
      group_->abort(text);
      C10_THROW_ERROR(DistBackendError, text);
    }
    for (int peer = 1; peer < size_; ++peer) finish(message(OpKind::send, peer));
  } catch (const CommError&) {
    throw_as_torch(std::current_exception());
  }
}

}  // namespace comm_core
