// Memory that MPI can use in place of tensors that may be scattered or strided.
#pragma once

#include <ATen/core/Tensor.h>
#include <mpi.h>

#include <vector>

namespace comm_core::mpi {

// The elements of one or more tensors, one after the other. Where the tensors already lie like that
// it is their own memory; else it is a copy, which `fill` writes and `spill` reads back. Keeps the
// tensors alive. All must be dense-layout CPU tensors of one type that MPI carries; otherwise the
// constructor throws c10::ValueError (device, empty list) or c10::TypeError (type, layout) that
// begins with `operation`; so does a row longer than MPI's counts reach (ValueError).
class Buffer {
 public:
  Buffer(const char* operation, std::vector<at::Tensor> parts);

  // Tensors -> memory.
  void fill() const;

  // Memory -> tensors; of an empty or directly used row: nothing.
  void spill() const;

  // Makes this buffer a copy if any tensor of `other` shares memory with it: MPI allows no two
  // arguments to overlap.
  void separate_from(const Buffer& other);

  // True if this buffer is the memory that begins `elements` after the start of `whole`.
  bool is_part_of(const Buffer& whole, int64_t elements) const;

  void* data() const { return memory_.mutable_data_ptr(); }
  int64_t elements() const { return elements_; }
  int count() const { return static_cast<int>(elements_); }
  int64_t bytes() const;
  at::ScalarType scalar_type() const { return parts_.front().scalar_type(); }
  MPI_Datatype type() const { return type_; }
  const std::vector<at::Tensor>& parts() const { return parts_; }

 private:
  void make_copy();

  std::vector<at::Tensor> parts_;
  at::Tensor memory_;
  int64_t elements_ = 0;
  MPI_Datatype type_ = MPI_DATATYPE_NULL;
  bool direct_ = false;
};

// Counts and first elements of consecutive blocks, as MPI's "v" operations take them.
struct Blocks {
  std::vector<int> counts;
  std::vector<int> starts;

  // Throws c10::ValueError, beginning with `operation`, if their sum is beyond MPI's counts.
  Blocks(const char* operation, const std::vector<int64_t>& sizes);

  // The block of each of `parts`.
  Blocks(const char* operation, const std::vector<at::Tensor>& parts);

  bool equal() const;
};

}  // namespace comm_core::mpi
