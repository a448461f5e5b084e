// From tensors to memory and back: checks, contiguous copies where they are needed, CUDA staging.
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

// Throws TypeError for a type that the core does not know.
DType dtype_of(const at::Tensor& tensor, const std::string& what);

// Zeroed bytes in memory that the ranks of this host can read in place. Throws as the core does.
at::Tensor shared_bytes(int64_t bytes);

// The tensors of one operation. Asked for memory tensor by tensor; then `prepare` is called once.
class Tensors {
 public:
  explicit Tensors(std::string what) : what_(std::move(what)) {}

  // Contiguous memory with the tensor's values, on the host.
  ConstSpan input(const at::Tensor& tensor);
  // Memory whose bytes become the tensor's values when the operation has ended. `keeps`: it starts
  // with them (in-place operations).
  Span output(const at::Tensor& tensor, bool keeps = false);
  // n blocks of equal size along the first dimension's memory.
  std::vector<ConstSpan> input_blocks(const at::Tensor& tensor, int n);
  std::vector<Span> output_blocks(const at::Tensor& tensor, int n);

  DType dtype() const;
  // What a profiler should show of the operation: the tensors it reads, else those it fills.
  std::vector<at::Tensor> shown() const;
  bool on_device() const { return stream_.has_value(); }

  // After the last request: `epilogue` and `keep_alive` of `spec`, and whether it must be held.
  void prepare(OpSpec& spec);
  // On a device: blocks until the inputs are on the host.
  std::function<void()> ready();
  // On a device: makes the caller's current stream wait for the results.
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
  // About a chunk of what is left; true if that was the rest.
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
