#include "group.h"

#include <c10/util/Exception.h>

#include <vector>

#include "engine.h"
#include "library.h"

namespace comm_core::mpi {
namespace {

// std::hash may differ between the members' builds; this (FNV-1a) does not.
uint64_t hash_of(const std::string& text) {
  uint64_t hash = 14695981039346656037ULL;
  for (const char c : text) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ULL;
  }
  return hash;
}

int64_t largest_tag_of(MPI_Comm comm) {
  int* value = nullptr;
  int found = 0;
  MPI_Comm_get_attr(comm, MPI_TAG_UB, &value, &found);
  return found != 0 ? *value : 32767;
}

}  // namespace

Group::Group(const c10d::DistributedBackendOptions& options)
    : name_(options.group_id),
      rank_(options.group_rank),
      size_(options.group_size),
      timeout_(std::chrono::duration_cast<std::chrono::milliseconds>(options.timeout)) {}

std::shared_ptr<Group> Group::open(const c10d::DistributedBackendOptions& options) {
  Engine& engine = Engine::get();
  engine.open();
  std::shared_ptr<Group> group(new Group(options));
  group->check_ranks(options.global_ranks_in_group);
  // MPI has no timeout while it makes a communicator, and would hold up all other groups.
  group->meet(*options.store);
  engine.call([&] { group->make_communicator(options.global_ranks_in_group); });
  return group;
}

void Group::check_ranks(const std::vector<int64_t>& global_ranks) const {
  const Engine& engine = Engine::get();
  const bool world = global_ranks.empty();
  const bool same = world ? rank_ == engine.world_rank() && size_ == engine.world_size()
                          : static_cast<size_t>(size_) == global_ranks.size() && rank_ >= 0 &&
                                rank_ < size_ && global_ranks[rank_] == engine.world_rank();
  TORCH_CHECK_WITH(DistBackendError, same, "group '", name_, "': torch.distributed says rank ",
                   world ? rank_ : global_ranks.at(rank_), world ? c10::str(" of ", size_) : "",
                   ", MPI says rank ", engine.world_rank(), " of ", engine.world_size(),
                   "; started without mpirun?");
}

void Group::meet(c10d::Store& store) const {
  std::vector<std::string> keys;
  for (int rank = 0; rank < size_; ++rank) keys.push_back("mpi-member-" + std::to_string(rank));
  try {
    store.set(keys[rank_], std::vector<uint8_t>{1});
    store.wait(keys, timeout());
  } catch (const std::exception& error) {
    TORCH_CHECK_WITH(DistBackendError, false, "group '", name_, "': not all of its ", size_,
                     " members came within ", timeout().count() / 1000.0, " s: ", error.what());
  }
}

void Group::make_communicator(const std::vector<int64_t>& global_ranks) {
  if (global_ranks.empty()) {
    check(MPI_Comm_dup(MPI_COMM_WORLD, &comm_), "MPI_Comm_dup");
  } else {
    const std::vector<int> ranks(global_ranks.begin(), global_ranks.end());
    const auto tags = static_cast<uint64_t>(largest_tag_of(MPI_COMM_WORLD)) + 1;
    MPI_Group all = MPI_GROUP_NULL;
    MPI_Group members = MPI_GROUP_NULL;
    check(MPI_Comm_group(MPI_COMM_WORLD, &all), "MPI_Comm_group");
    check(MPI_Group_incl(all, size_, ranks.data(), &members), "MPI_Group_incl");
    const int code = MPI_Comm_create_group(MPI_COMM_WORLD, members,
                                           static_cast<int>(hash_of(name_) % tags), &comm_);
    MPI_Group_free(&members);
    MPI_Group_free(&all);
    check(code, "MPI_Comm_create_group");
  }
  check(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  largest_tag_ = largest_tag_of(comm_);
}

void Group::close() {
  const std::lock_guard lock(mutex_);
  if (closed_) return;
  closed_ = true;
  // A failed group's operations may be under way for ever, and use the communicator.
  if (comm_ == MPI_COMM_NULL || !failure_.empty()) return;
  Engine::get().post([comm = comm_]() mutable {
    if (library_usable()) MPI_Comm_free(&comm);
  });
}

void Group::check_usable(const char* operation) const {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK_WITH(DistBackendError, !closed_, operation, ": the MPI group '", name_,
                   "' was destroyed");
  TORCH_CHECK_WITH(DistBackendError, failure_.empty(), operation, ": the MPI group '", name_,
                   "' is unusable since ", failure_);
}

void Group::fail(const std::string& reason) {
  const std::lock_guard lock(mutex_);
  if (failure_.empty()) failure_ = reason;
}

}  // namespace comm_core::mpi
