#include "buffer.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <climits>
#include <cstring>
#include <functional>

#include "datatypes.h"

namespace comm_core::mpi {
namespace {

void check_count(const char* operation, int64_t elements) {
  TORCH_CHECK_WITH(ValueError, elements <= INT_MAX, operation, ": ", elements,
                   " elements are beyond MPI's limit of ", INT_MAX,
                   " elements per call; split the tensor");
}

bool is_plain(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

const char* begin_of(const at::Tensor& tensor) {
  return static_cast<const char*>(tensor.const_data_ptr());
}

bool overlap(const at::Tensor& a, const at::Tensor& b) {
  if (a.numel() == 0 || b.numel() == 0) return false;
  const std::less<const char*> before;
  return before(begin_of(a), begin_of(b) + b.nbytes()) &&
         before(begin_of(b), begin_of(a) + a.nbytes());
}

// Autograd neither records the copy nor objects to one into a leaf: like any other backend's, it
// happens behind its back.
void copy(const at::Tensor& to, const at::Tensor& from) {
  if (is_plain(to) && is_plain(from)) {
    if (to.nbytes() > 0) std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), to.nbytes());
    return;
  }
  const at::AutoDispatchBelowADInplaceOrView guard;
  to.copy_(from);
}

}  // namespace

Buffer::Buffer(const char* operation, std::vector<at::Tensor> parts) : parts_(std::move(parts)) {
  TORCH_CHECK_WITH(ValueError, !parts_.empty(), operation, ": no tensor was given");
  const at::ScalarType scalar = parts_.front().scalar_type();
  for (const at::Tensor& part : parts_) {
    TORCH_CHECK_WITH(ValueError, part.device().is_cpu(), operation, ": the tensor is on ",
                     part.device(), ", but the MPI backend takes CPU tensors");
    TORCH_CHECK_WITH(TypeError, part.layout() == at::kStrided, operation, ": the tensor is ",
                     part.layout(), ", but the MPI backend takes dense ones");
    TORCH_CHECK_WITH(TypeError, part.scalar_type() == scalar, operation, ": tensors of ", scalar,
                     " and ", part.scalar_type(), " in one operation");
    elements_ += part.numel();
  }
  type_ = mpi_type(scalar);
  check_count(operation, elements_);
  // An empty tensor has no address, and MPI takes a null one for MPI_BOTTOM.
  direct_ = elements_ > 0;
  const char* end = nullptr;
  for (const at::Tensor& part : parts_) {
    if (part.numel() == 0) continue;
    direct_ = direct_ && is_plain(part) && (end == nullptr || begin_of(part) == end);
    if (!direct_) break;
    if (end == nullptr) memory_ = part;
    end = begin_of(part) + part.nbytes();
  }
  if (!direct_) make_copy();
}

void Buffer::make_copy() {
  direct_ = false;
  memory_ = at::empty({std::max<int64_t>(elements_, 1)},
                      at::TensorOptions().dtype(scalar_type()).device(at::kCPU));
}

void Buffer::fill() const {
  if (direct_) return;
  int64_t start = 0;
  for (const at::Tensor& part : parts_) {
    copy(memory_.narrow(0, start, part.numel()).view(part.sizes()), part);
    start += part.numel();
  }
}

void Buffer::spill() const {
  if (direct_) return;
  int64_t start = 0;
  for (const at::Tensor& part : parts_) {
    copy(part, memory_.narrow(0, start, part.numel()).view(part.sizes()));
    start += part.numel();
  }
}

void Buffer::separate_from(const Buffer& other) {
  if (!direct_) return;
  for (const at::Tensor& mine : parts_) {
    for (const at::Tensor& theirs : other.parts_) {
      if (overlap(mine, theirs)) return make_copy();
    }
  }
}

bool Buffer::is_part_of(const Buffer& whole, int64_t elements) const {
  return direct_ && whole.direct_ &&
         static_cast<const char*>(data()) ==
             static_cast<const char*>(whole.data()) + elements * memory_.itemsize();
}

int64_t Buffer::bytes() const { return elements_ * static_cast<int64_t>(memory_.itemsize()); }

Blocks::Blocks(const char* operation, const std::vector<int64_t>& sizes) {
  int64_t start = 0;
  for (const int64_t size : sizes) {
    check_count(operation, start + size);
    counts.push_back(static_cast<int>(size));
    starts.push_back(static_cast<int>(start));
    start += size;
  }
}

Blocks::Blocks(const char* operation, const std::vector<at::Tensor>& parts)
    : Blocks(operation, [&] {
        std::vector<int64_t> sizes;
        for (const at::Tensor& part : parts) sizes.push_back(part.numel());
        return sizes;
      }()) {}

bool Blocks::equal() const {
  return std::all_of(counts.begin(), counts.end(), [&](int n) { return n == counts.front(); });
}

}  // namespace comm_core::mpi
