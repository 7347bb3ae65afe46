#include "ops/tensor_checks.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "base/log.h"

namespace moe_p2p::ops {

using base::Code;

namespace {

template <typename Extents>
std::string list(const Extents& extents) {
  std::string text = "[";
  for (const int64_t extent : extents) {
    if (text.size() > 1) text += ", ";
    text += extent == kAny ? "*" : std::to_string(extent);
  }
  return text + "]";
}

std::string names(std::initializer_list<ScalarType> dtypes) {
  std::string text;
  for (const ScalarType dtype : dtypes) {
    if (!text.empty()) text += " or ";
    text += dtype_name(dtype);
  }
  return text;
}

bool fits(const Tensor& tensor, std::span<const int64_t> sizes) {
  const auto have = tensor.sizes();
  return std::equal(have.begin(), have.end(), sizes.begin(), sizes.end(),
                    [](int64_t size, int64_t must) { return must == kAny || size == must; });
}

thread_local int working_device = -1;

// Torch's number of each type that was met in this thread, and of each number the type.
struct Numbers {
  std::array<std::optional<int32_t>, 64> of_type;
  std::array<std::optional<ScalarType>, 64> types;
};
thread_local Numbers numbers;

int32_t shim_dtype(ScalarType dtype) {
  auto& known = numbers.of_type.at(static_cast<size_t>(dtype));
  if (!known) known = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  return *known;
}

// Whether the current stream, `handle`, is one of torch's own, which are never destroyed. Torch
// gives its own streams odd numbers, and an external one (torch.cuda.ExternalStream) its address
// (c10/cuda/CUDAStream.cpp).
bool is_lasting(int device, void* handle) {
  thread_local void* known = nullptr;  // the last lasting stream; null: the default stream
  if (handle == nullptr || handle == known) return true;
  StreamHandle stream = nullptr;
  int64_t id = 0;
  if (aoti_torch_get_current_stream(device, &stream) != AOTI_TORCH_SUCCESS) return false;
  const bool found = aoti_torch_stream_id(stream, &id) == AOTI_TORCH_SUCCESS && id % 2 != 0;
  aoti_torch_delete_stream(stream);
  if (found) known = handle;
  return found;
}

}  // namespace

ScalarType dtype_of(const Tensor& tensor) {
  int32_t number = -1;
  const auto error = aoti_torch_get_dtype(tensor.get(), &number);
  const auto at = static_cast<size_t>(number);
  if (error != AOTI_TORCH_SUCCESS || at >= numbers.types.size()) return tensor.scalar_type();
  auto& known = numbers.types[at];
  if (!known) known = tensor.scalar_type();
  return *known;
}

OnDevice::OnDevice(int device) : before_(std::exchange(working_device, device)) {}
OnDevice::~OnDevice() { working_device = before_; }

// The CUDA half of torch is not linked: one binary serves builds without it.
platform::Stream current_stream(int device) {
  if (device < 0) return {};
  using GetStream = int32_t (*)(int32_t device, void** stream);
  static const auto get = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
    void* symbol = library ? dlsym(library, "aoti_torch_get_current_cuda_stream") : nullptr;
    MOE_P2P_CHECK(symbol, Code::kUnavailable,
                  "this torch has no CUDA (libtorch_cuda.so is not loaded)");
    return reinterpret_cast<GetStream>(symbol);
  }();
  void* stream = nullptr;
  MOE_P2P_CHECK(get(device, &stream) == AOTI_TORCH_SUCCESS, Code::kUnavailable,
                "torch gives no current stream for cuda:", device);
  return {stream, is_lasting(device, stream)};
}

const char* dtype_name(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Byte: return "torch.uint8";
    case ScalarType::Char: return "torch.int8";
    case ScalarType::Short: return "torch.int16";
    case ScalarType::Int: return "torch.int32";
    case ScalarType::Long: return "torch.int64";
    case ScalarType::UInt16: return "torch.uint16";
    case ScalarType::UInt32: return "torch.uint32";
    case ScalarType::UInt64: return "torch.uint64";
    case ScalarType::Half: return "torch.float16";
    case ScalarType::BFloat16: return "torch.bfloat16";
    case ScalarType::Float: return "torch.float32";
    case ScalarType::Double: return "torch.float64";
    case ScalarType::ComplexHalf: return "torch.complex32";
    case ScalarType::ComplexFloat: return "torch.complex64";
    case ScalarType::ComplexDouble: return "torch.complex128";
    case ScalarType::Bool: return "torch.bool";
    case ScalarType::Float8_e4m3fn: return "torch.float8_e4m3fn";
    case ScalarType::Float8_e4m3fnuz: return "torch.float8_e4m3fnuz";
    case ScalarType::Float8_e5m2: return "torch.float8_e5m2";
    case ScalarType::Float8_e5m2fnuz: return "torch.float8_e5m2fnuz";
    case ScalarType::Float8_e8m0fnu: return "torch.float8_e8m0fnu";
    default: return torch::headeronly::toString(dtype);
  }
}

std::string describe(const Tensor& tensor) {
  return std::string(dtype_name(dtype_of(tensor))) + " " + list(tensor.sizes());
}

void check_on_device(const Tensor& tensor, const char* name) {
  if (working_device < 0) {
    MOE_P2P_CHECK(tensor.is_cpu(), Code::kInvalidArgument, name,
                  " lies on an accelerator, must be on the CPU: this object works in host memory");
  } else {
    MOE_P2P_CHECK(tensor.is_cuda() && tensor.get_device() == working_device, Code::kInvalidArgument,
                  name, " must be on cuda:", working_device, ", where this object works");
  }
}

void check_placed(const Tensor& tensor, const char* name) {
  check_on_device(tensor, name);
  MOE_P2P_CHECK(tensor.is_contiguous(), Code::kInvalidArgument, name, " is ", describe(tensor),
                " with strides ", list(tensor.strides()),
                ", must be contiguous; pass .contiguous()");
}

void check_tensor(const Tensor& tensor, const Expected& expected) {
  const auto& dtypes = expected.dtypes;
  MOE_P2P_CHECK(dtypes.size() == 0 ||
                    std::find(dtypes.begin(), dtypes.end(), dtype_of(tensor)) != dtypes.end(),
                Code::kInvalidArgument, expected.name, " is ", describe(tensor), ", must be ",
                names(dtypes));
  MOE_P2P_CHECK(fits(tensor, expected.sizes.all()), Code::kInvalidArgument, expected.name, " is ",
                describe(tensor), ", must have shape ", list(expected.sizes.all()));
  check_placed(tensor, expected.name);
}

namespace {
alignas(64) std::byte nothing[64];
}

const void* data_of(const Tensor& tensor) {
  const void* data = tensor.const_data_ptr();
  return data ? data : nothing;
}

void* mutable_data_of(const Tensor& tensor) {
  void* data = tensor.mutable_data_ptr();
  return data ? data : nothing;
}

abi::DType payload_type(ScalarType dtype, const char* name,
                        std::initializer_list<ScalarType> allowed) {
  MOE_P2P_CHECK(std::find(allowed.begin(), allowed.end(), dtype) != allowed.end(),
                Code::kInvalidArgument, name, " is ", dtype_name(dtype), ", must be ",
                names(allowed));
  switch (dtype) {
    case ScalarType::BFloat16: return abi::DType::kBFloat16;
    case ScalarType::Half: return abi::DType::kFloat16;
    case ScalarType::Float: return abi::DType::kFloat32;
    default: return abi::DType::kFloat8E4M3;
  }
}

namespace {

constexpr size_t kMostDims = 3;

struct Strides {
  int64_t of[kMostDims] = {1, 1, 1};
};

Strides contiguous(std::span<const int64_t> sizes) {
  Strides strides;
  for (size_t i = sizes.size(); i-- > 1;)
    strides.of[i - 1] = strides.of[i] * std::max<int64_t>(sizes[i], 1);
  return strides;
}

}  // namespace

Tensor make_tensor(std::span<const int64_t> sizes, ScalarType dtype) {
  return make_tensor(sizes, {contiguous(sizes).of, sizes.size()}, dtype);
}

Tensor first_rows(const Tensor& tensor, int64_t num_rows) {
  const auto have = tensor.sizes();
  int64_t sizes[kMostDims] = {};
  std::copy(have.begin(), have.end(), sizes);
  sizes[0] = num_rows;
  AtenTensorHandle made = nullptr;
  const auto error = aoti_torch__reinterpret_tensor(tensor.get(), tensor.dim(), sizes,
                                                    tensor.strides().data(), 0, &made);
  MOE_P2P_CHECK(error == AOTI_TORCH_SUCCESS, Code::kResourceExhausted, "torch could not cut ",
                describe(tensor), " to ", num_rows, " rows");
  return Tensor(made);
}

Arena::Arena(int64_t bytes) : memory_(make_tensor({bytes}, ScalarType::Byte)), bytes_(bytes) {}

Tensor Arena::make(const Sizes& sizes, ScalarType dtype) {
  const auto all = sizes.all();
  AtenTensorHandle made = nullptr;
  const auto error = aoti_torch__alloc_from_pool(memory_.get(), used_, shim_dtype(dtype),
                                                 static_cast<int64_t>(all.size()), all.data(),
                                                 contiguous(all).of, &made);
  MOE_P2P_CHECK(error == AOTI_TORCH_SUCCESS, Code::kResourceExhausted, "torch could not make a ",
                dtype_name(dtype), " tensor of shape ", list(all));
  Tensor tensor(made);
  used_ += room(tensor.numel(), static_cast<int64_t>(tensor.element_size()));
  MOE_P2P_CHECK(used_ <= bytes_, Code::kInvalidArgument, "an allocation of ", bytes_,
                " bytes has no room for ", describe(tensor));
  return tensor;
}

Tensor make_tensor(std::span<const int64_t> sizes, std::span<const int64_t> strides,
                   ScalarType dtype) {
  AtenTensorHandle made = nullptr;
  const auto error = aoti_torch_empty_strided(
      static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), shim_dtype(dtype),
      working_device < 0 ? aoti_torch_device_type_cpu() : aoti_torch_device_type_cuda(),
      std::max(working_device, 0), &made);
  MOE_P2P_CHECK(error == AOTI_TORCH_SUCCESS, Code::kResourceExhausted, "torch could not make a ",
                dtype_name(dtype), " tensor of shape ", list(sizes));
  return Tensor(made);
}

Tensor bytes_tensor(const base::Bytes& bytes) {
  Tensor tensor = make_tensor({static_cast<int64_t>(bytes.size())}, ScalarType::Byte);
  if (!bytes.empty()) std::memcpy(tensor.mutable_data_ptr(), bytes.data(), bytes.size());
  return tensor;
}

std::span<const std::byte> bytes_of(const Tensor& tensor, const char* name) {
  const auto* data = input<std::byte>(tensor, {name, {ScalarType::Byte}, {kAny}});
  return {data, static_cast<size_t>(tensor.numel())};
}

}  // namespace moe_p2p::ops
