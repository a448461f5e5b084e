// Memory of tensors for the core: checks, contiguous copies where needed, and CUDA staging.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Event.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/op.h"

namespace comm_core {

// Throws TypeError if the core does not support the dtype.
DType dtype_of(const at::Tensor& tensor, const std::string& what);

// Zeroed bytes in memory that all ranks of this host can read in place. Throws CommError, or
// ValueError for a negative size.
at::Tensor shared_bytes(int64_t bytes);

// Divides a floating-point CPU tensor by `divisor`, in place, with the same bits as `div_`, which
// takes microseconds for a few elements.
void divide(const at::Tensor& tensor, int64_t divisor);

// The tensors of one operation. Call `input` and `output` for each tensor, then `prepare` once.
class Tensors {
 public:
  explicit Tensors(std::string what) : what_(std::move(what)) {}

  // Contiguous host memory with the tensor's values.
  ConstSpan input(const at::Tensor& tensor);
  // Memory whose bytes become the tensor's values when the operation has ended. `keeps`: it also
  // starts with these values (in-place operations).
  Span output(const at::Tensor& tensor, bool keeps = false);
  // The tensor's memory in n contiguous blocks of equal size.
  std::vector<ConstSpan> input_blocks(const at::Tensor& tensor, int n);
  std::vector<Span> output_blocks(const at::Tensor& tensor, int n);

  // Lets the operation read a copy of each input that an output overlaps, other than in place: it
  // writes outputs in any order.
  void separate(OpSpec& spec, int rank);

  DType dtype() const;
  // The tensors for the profiler: those that the operation reads; if none, those that it writes.
  std::vector<at::Tensor> shown() const;
  bool on_device() const { return stream_.has_value(); }

  // Sets `dtype`, `keep_alive`, `held` and `epilogue` of `spec`.
  void prepare(OpSpec& spec);
  // For device tensors: returns a function that blocks until the inputs are on the host.
  std::function<void()> ready();
  // For device tensors: returns one that makes the caller's current stream wait for the results.
  std::function<void()> synchronize();

 private:
  struct Copy {
    at::Tensor from, to;
  };
  struct Kept {
    std::vector<at::Tensor> tensors;
    std::vector<Copy> copies_back;
    std::optional<c10::Stream> stream;
    std::shared_ptr<c10::Event> staged, finished;
  };
  // Copies about one chunk of `left` and removes it; true if nothing remains.
  static bool copy_some(std::vector<Copy>& left);
  at::Tensor host_copy(const at::Tensor& tensor, bool with_values);
  void check(const at::Tensor& tensor);

  std::string what_;
  std::shared_ptr<Kept> kept_ = std::make_shared<Kept>();
  std::vector<at::Tensor> read_;
  std::optional<at::ScalarType> type_;
  std::optional<at::Device> device_;
  std::optional<c10::Stream> stream_;
};

}  // namespace comm_core
