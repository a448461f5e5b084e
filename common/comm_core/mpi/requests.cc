#include "requests.h"

#include <algorithm>

#include "library.h"

namespace comm_core::mpi {

void Requests::begin(WorkPtr work) {
  const size_t before = requests_.size();
  try {
    TORCH_CHECK_WITH(DistBackendError, library_usable(),
                     "MPI was finalised by another library of this process");
    work->start(requests_);
  } catch (...) {
    work->fail(std::current_exception());
  }
  work->requests_left = static_cast<int>(requests_.size() - before);
  owners_.resize(requests_.size(), work.get());
  works_.push_back(std::move(work));
  if (requests_.size() == before) retire_ended();
}

bool Requests::poll() {
  if (requests_.empty()) return false;
  indices_.resize(requests_.size());
  statuses_.resize(requests_.size());
  int ended = 0;
  const int code = MPI_Testsome(static_cast<int>(requests_.size()), requests_.data(), &ended,
                                indices_.data(), statuses_.data());
  if (code != MPI_SUCCESS && code != MPI_ERR_IN_STATUS) {
    abandon(code);
    return true;
  }
  if (ended == 0 || ended == MPI_UNDEFINED) return false;
  for (int i = 0; i < ended; ++i) {
    const int error = code == MPI_ERR_IN_STATUS ? statuses_[i].MPI_ERROR : MPI_SUCCESS;
    owners_[indices_[i]]->settle(error, statuses_[i]);
    owners_[indices_[i]] = nullptr;
  }
  size_t kept = 0;
  for (size_t i = 0; i < requests_.size(); ++i) {
    if (owners_[i] == nullptr) continue;
    owners_[kept] = owners_[i];
    requests_[kept++] = requests_[i];
  }
  owners_.resize(kept);
  requests_.resize(kept);
  retire_ended();
  return true;
}

// MPI did not say which request it was, so none can be trusted any more.
void Requests::abandon(int code) {
  const MPI_Status none{};
  for (MpiWork* owner : owners_) owner->settle(code, none);
  owners_.clear();
  requests_.clear();
  retire_ended();
}

void Requests::retire_ended() {
  std::vector<WorkPtr> all;
  all.swap(works_);
  for (WorkPtr& work : all) {
    if (work->requests_left > 0) {
      works_.push_back(std::move(work));
    } else {
      work->retire();
      retired_(std::move(work));
    }
  }
}

void Requests::expire(MpiWork::Clock::time_point now) {
  for (const WorkPtr& work : works_) {
    if (work->deadline() <= now && !work->isCompleted()) work->fail_after_timeout();
  }
}

}  // namespace comm_core::mpi
