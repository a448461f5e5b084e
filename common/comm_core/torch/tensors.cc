#include "tensors.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstring>

#include "engine/stage.h"
#include "shm/buffers.h"

namespace comm_core {

namespace {

// Returns whether the tensor's memory holds its values in order. Conjugate and negative views do
// not: torch computes their values when it reads them.
bool plain(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

// Hides copies of tensors from autograd.
struct NoAutograd {
  at::NoGradGuard no_grad;
  at::AutoDispatchBelowADInplaceOrView below;
};

template <typename Bytes>
std::vector<Bytes> equal_parts(const Bytes& whole, size_t n) {
  std::vector<Bytes> parts;
  const size_t bytes = whole.bytes / n;
  for (size_t i = 0; i < n; ++i) parts.push_back({whole.data + i * bytes, bytes});
  return parts;
}

// Tensors up to this size are divided here; larger ones by torch, in several threads.
constexpr int64_t kFew = 1024;

template <typename Number>
void divide_all(const at::Tensor& tensor, int64_t divisor) {
  Number* const data = tensor.mutable_data_ptr<Number>();
  for (int64_t i = 0; i < tensor.numel(); ++i) data[i] /= Number(divisor);
}

}  // namespace

void divide(const at::Tensor& tensor, int64_t divisor) {
  const NoAutograd guard;
  const bool few = tensor.numel() <= kFew && tensor.is_contiguous();
  if (few && tensor.scalar_type() == at::kFloat) return divide_all<float>(tensor, divisor);
  if (few && tensor.scalar_type() == at::kDouble) return divide_all<double>(tensor, divisor);
  tensor.div_(divisor);
}

DType dtype_of(const at::Tensor& tensor, const std::string& what) {
  switch (tensor.scalar_type()) {
    case at::kFloat: return DType::f32;
    case at::kDouble: return DType::f64;
    case at::kHalf: return DType::f16;
    case at::kBFloat16: return DType::bf16;
    case at::kChar: return DType::i8;
    case at::kShort: return DType::i16;
    case at::kInt: return DType::i32;
    case at::kLong: return DType::i64;
    case at::kByte: return DType::u8;
    case at::kBool: return DType::b8;
    case at::kComplexFloat: return DType::c64;
    case at::kComplexDouble: return DType::c128;
    case at::kUInt16: return DType::u16;
    case at::kUInt32: return DType::u32;
    case at::kUInt64: return DType::u64;
    case at::kComplexHalf: return DType::c32;
    case at::kFloat8_e4m3fn: return DType::f8_e4m3fn;
    case at::kFloat8_e5m2: return DType::f8_e5m2;
    case at::kFloat8_e4m3fnuz: return DType::f8_e4m3fnuz;
    case at::kFloat8_e5m2fnuz: return DType::f8_e5m2fnuz;
    case at::kFloat8_e8m0fnu: return DType::f8_e8m0fnu;
    default:
      C10_THROW_ERROR(TypeError, what + ": comm_core does not support " +
                                     toString(tensor.scalar_type()) + " tensors");
  }
}

at::Tensor shared_bytes(int64_t bytes) {
  TORCH_CHECK_VALUE(bytes >= 0, "a tensor cannot have ", bytes, " bytes");
  char* data = SharedBuffers::instance().allocate(size_t(bytes));
  const auto release = [](void* memory) {
    SharedBuffers::instance().free(static_cast<char*>(memory));
  };
  return at::from_blob(data, {bytes}, release, at::TensorOptions().dtype(at::kByte));
}

void Tensors::check(const at::Tensor& tensor) {
  TORCH_CHECK_TYPE(tensor.layout() == at::kStrided, what_, ": comm_core needs dense tensors, not ",
                   tensor.layout());
  const c10::DeviceType kind = tensor.device().type();
  TORCH_CHECK_VALUE(kind == c10::DeviceType::CPU || kind == c10::DeviceType::CUDA, what_,
                    ": comm_core takes CPU and CUDA tensors, this one is on ", tensor.device());
  if (!type_) {
    dtype_of(tensor, what_);
    type_ = tensor.scalar_type();
    device_ = tensor.device();
    if (kind == c10::DeviceType::CUDA) {
      const c10::impl::VirtualGuardImpl guard(kind);
      stream_ = guard.getStreamFromGlobalPool(tensor.device());
      // The copies start once the stream that produces the inputs has reached this point.
      c10::Event made(kind);
      made.record(guard.getStream(tensor.device()));
      made.block(*stream_);
      kept_->stream = stream_;
    }
  }
  TORCH_CHECK_TYPE(*type_ == tensor.scalar_type(), what_, ": the tensors differ in type: ", *type_,
                   " and ", tensor.scalar_type());
  TORCH_CHECK_VALUE(*device_ == tensor.device(), what_,
                    ": the tensors are on different devices: ", *device_, " and ", tensor.device());
}

at::Tensor Tensors::host_copy(const at::Tensor& tensor, bool with_values) {
  const NoAutograd guard;
  if (!stream_) {
    if (with_values) return tensor.resolve_conj().resolve_neg().contiguous();
    return at::empty(tensor.sizes(), tensor.options());
  }
  at::Tensor host =
      at::empty(tensor.sizes(), tensor.options().device(at::kCPU).pinned_memory(true));
  if (with_values) {
    const c10::impl::VirtualGuardImpl device_guard(stream_->device_type());
    const c10::Stream before = device_guard.exchangeStream(*stream_);
    host.copy_(tensor, /*non_blocking=*/true);
    device_guard.exchangeStream(before);
    device_guard.recordDataPtrOnStream(tensor.storage().data_ptr(), *stream_);
  }
  return host;
}

ConstSpan Tensors::input(const at::Tensor& tensor) {
  check(tensor);
  const bool direct = !stream_ && plain(tensor);
  const at::Tensor memory = direct ? tensor : host_copy(tensor, true);
  kept_->tensors.push_back(memory);
  read_.push_back(memory);
  return {static_cast<const char*>(memory.const_data_ptr()), memory.nbytes()};
}

Span Tensors::output(const at::Tensor& tensor, bool keeps) {
  check(tensor);
  const bool direct = !stream_ && plain(tensor);
  TORCH_CHECK_VALUE(direct || at::has_internal_overlap(tensor) != at::MemOverlap::Yes, what_,
                    ": several elements of an output, such as an expanded tensor, share memory");
  const at::Tensor memory = direct ? tensor : host_copy(tensor, keeps);
  kept_->tensors.push_back(memory);
  if (keeps) read_.push_back(memory);
  if (!direct) kept_->copies_back.push_back({memory, tensor});
  return {static_cast<char*>(memory.mutable_data_ptr()), memory.nbytes()};
}

std::vector<ConstSpan> Tensors::input_blocks(const at::Tensor& tensor, int n) {
  return equal_parts(input(tensor), size_t(n));
}

std::vector<Span> Tensors::output_blocks(const at::Tensor& tensor, int n) {
  return equal_parts(output(tensor), size_t(n));
}

void Tensors::separate(OpSpec& spec, int rank) {
  if (stream_ || spec.inputs.empty() || spec.outputs.empty()) return;  // device tensors are copied
  const char *first = spec.outputs[0].data, *last = first;
  for (const Span& out : spec.outputs) {
    first = std::min<const char*>(first, out.data);
    last = std::max<const char*>(last, out.data + out.bytes);
  }
  const auto in_place = [&](size_t i, size_t o) {
    if (spec.inputs[i].data != spec.outputs[o].data ||
        spec.inputs[i].bytes != spec.outputs[o].bytes)
      return false;
    const bool one_of_each = spec.kind == OpKind::all_reduce || spec.kind == OpKind::reduce;
    return one_of_each || (spec.kind == OpKind::reduce_scatter && i == size_t(rank)) ||
           (spec.kind == OpKind::all_gather && o == size_t(rank));
  };
  for (size_t i = 0; i < spec.inputs.size(); ++i) {
    const ConstSpan in = spec.inputs[i];
    if (in.bytes == 0 || in.data >= last || in.data + in.bytes <= first) continue;
    for (size_t o = 0; o < spec.outputs.size(); ++o) {
      const Span& out = spec.outputs[o];
      const bool apart = in.data >= out.data + out.bytes || in.data + in.bytes <= out.data;
      if (apart || in_place(i, o)) continue;
      const at::Tensor copy = at::empty({int64_t(in.bytes)}, at::kByte);
      std::memcpy(copy.mutable_data_ptr(), in.data, in.bytes);
      kept_->tensors.push_back(copy);
      spec.inputs[i] = {static_cast<const char*>(copy.const_data_ptr()), in.bytes};
      break;
    }
  }
}

DType Tensors::dtype() const { return type_ ? dtype_of(kept_->tensors.front(), what_) : DType::u8; }

std::vector<at::Tensor> Tensors::shown() const { return read_.empty() ? kept_->tensors : read_; }

bool Tensors::copy_some(std::vector<Copy>& left) {
  while (!left.empty()) {
    const Copy one = std::move(left.back());
    left.pop_back();
    if (one.to.nbytes() <= PiecewiseStage::kChunk) {
      one.to.copy_(one.from);
      break;
    }
    int64_t dim = 0;
    while (one.to.size(dim) == 1) ++dim;
    const int64_t size = one.to.size(dim), half = size / 2;
    left.push_back(
        {one.from.narrow(dim, half, size - half), one.to.narrow(dim, half, size - half)});
    left.push_back({one.from.narrow(dim, 0, half), one.to.narrow(dim, 0, half)});
  }
  return left.empty();
}

void Tensors::prepare(OpSpec& spec) {
  spec.dtype = dtype();
  spec.keep_alive = kept_;
  spec.held = stream_.has_value();
  if (stream_) {
    kept_->staged = std::make_shared<c10::Event>(stream_->device_type());
    kept_->finished = std::make_shared<c10::Event>(stream_->device_type());
    kept_->staged->record(*stream_);
  }
  if (kept_->copies_back.empty()) return;
  Kept* kept = kept_.get();  // `keep_alive` holds it as long as the operation lives
  spec.epilogue = [kept, left = kept->stream ? std::vector<Copy>() : kept->copies_back]() mutable {
    const NoAutograd guard;
    if (!kept->stream) return copy_some(left);
    const c10::impl::VirtualGuardImpl device_guard(kept->stream->device_type());
    const c10::Device device_before = device_guard.exchangeDevice(kept->stream->device());
    const c10::Stream before = device_guard.exchangeStream(*kept->stream);
    for (Copy& c : kept->copies_back) {
      c.to.copy_(c.from, /*non_blocking=*/true);
      device_guard.recordDataPtrOnStream(c.to.storage().data_ptr(), *kept->stream);
    }
    kept->finished->record(*kept->stream);
    device_guard.exchangeStream(before);
    // Unlike exchangeDevice, this makes no context on a GPU that the process does not use.
    device_guard.uncheckedSetDevice(device_before);
    return true;
  };
}

std::function<void()> Tensors::ready() {
  return [kept = kept_] { kept->staged->synchronize(); };
}

std::function<void()> Tensors::synchronize() {
  if (!stream_) return nullptr;
  return [kept = kept_] {
    if (kept->copies_back.empty()) return;
    const c10::impl::VirtualGuardImpl guard(kept->stream->device_type());
    kept->finished->block(guard.getStream(kept->stream->device()));
  };
}

}  // namespace comm_core
