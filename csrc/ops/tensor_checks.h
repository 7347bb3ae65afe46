// Tensors as the ops see them: checked and turned into pointers, or made. Every error names the
// argument, what was given and what it must be.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>

#include "base/wire.h"
#include "kernels/abi/params.h"
#include "kernels/abi/shape.h"
#include "platform/stream_order.h"

namespace moe_p2p::ops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline constexpr int64_t kAny = -1;  // any extent of a dimension

// What scalar_type() returns, in a fifth of its time: torch compares one type after the other.
ScalarType dtype_of(const Tensor& tensor);

// CUDA ordinal; -1: host memory.
inline int device_of(const Tensor& tensor) { return tensor.is_cpu() ? -1 : tensor.get_device(); }

// The extents of a tensor, at most three.
class Sizes {
 public:
  // NOLINTNEXTLINE(google-explicit-constructor): written as a list where a shape is expected
  Sizes(std::initializer_list<int64_t> sizes) : dims_(sizes.size()) {
    std::copy(sizes.begin(), sizes.end(), sizes_.begin());
  }
  std::span<const int64_t> all() const noexcept { return {sizes_.data(), dims_}; }

 private:
  std::array<int64_t, 3> sizes_{};
  size_t dims_;
};

// What an argument must be. No `dtypes` means any type.
struct Expected {
  const char* name;
  std::initializer_list<ScalarType> dtypes;
  Sizes sizes;
};

// Where the tensors of the running call must lie and are made: host memory, or a GPU while an
// object of this class for one lives in this thread.
class OnDevice {
 public:
  explicit OnDevice(int device);  // CUDA ordinal; -1: host memory
  ~OnDevice();
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  const int before_;
};
// Returns the caller's current stream on a GPU; none for host memory.
platform::Stream current_stream(int device);

// Throws Error{kInvalidArgument} unless `tensor` lies where it must, is contiguous and fits.
void check_tensor(const Tensor& tensor, const Expected& expected);
// The checks that do not depend on the shape.
void check_placed(const Tensor& tensor, const char* name);
// The checks that tensors of any strides must pass.
void check_on_device(const Tensor& tensor, const char* name);

// Where the data lies. Never null: below the ops a null pointer means "not given", and a tensor
// without elements is given.
const void* data_of(const Tensor& tensor);
void* mutable_data_of(const Tensor& tensor);

// As kernels take it.
template <typename T>
abi::DevicePtr<T> pointer(const void* address) {
  return {reinterpret_cast<uint64_t>(address)};
}

template <typename T>
const T* input(const Tensor& tensor, const Expected& expected) {
  check_tensor(tensor, expected);
  return static_cast<const T*>(data_of(tensor));
}
template <typename T>
T* output(const Tensor& tensor, const Expected& expected) {
  check_tensor(tensor, expected);
  return static_cast<T*>(mutable_data_of(tensor));
}

// "torch.bfloat16 [3, 4]", for errors.
std::string describe(const Tensor& tensor);
const char* dtype_name(ScalarType dtype);  // as torch prints it
// The types that tokens can have, for Expected::dtypes.
inline constexpr std::initializer_list<ScalarType> kPayloadTypes = {
    ScalarType::BFloat16, ScalarType::Half, ScalarType::Float, ScalarType::Float8_e4m3fn};
inline constexpr std::initializer_list<ScalarType> kCombineTypes = {
    ScalarType::BFloat16, ScalarType::Half, ScalarType::Float};
// Throws Error{kInvalidArgument} for a type that is not in `allowed`, a part of kPayloadTypes.
abi::DType payload_type(ScalarType dtype, const char* name,
                        std::initializer_list<ScalarType> allowed = kPayloadTypes);

// Makes a tensor where the running call works, not initialised: with these strides, or contiguous.
Tensor make_tensor(std::span<const int64_t> sizes, std::span<const int64_t> strides,
                   ScalarType dtype);
Tensor make_tensor(std::span<const int64_t> sizes, ScalarType dtype);
inline Tensor make_tensor(const Sizes& sizes, ScalarType dtype) {
  return make_tensor(sizes.all(), dtype);
}
// The first num_rows of a contiguous tensor, in its memory.
Tensor first_rows(const Tensor& tensor, int64_t num_rows);

// One allocation, cut into tensors that keep it alive together. For results that neither autograd
// nor a compiler sees: both take two results of an op for two allocations.
class Arena {
 public:
  explicit Arena(int64_t bytes);
  // Throws Error{kInvalidArgument} when no room is left.
  Tensor make(const Sizes& sizes, ScalarType dtype);
  int64_t bytes_left() const { return bytes_ - used_; }
  // The bytes that a tensor of `num` elements takes of it.
  static constexpr int64_t room(int64_t num, int64_t bytes) {
    return (num * bytes + kAlignment - 1) / kAlignment * kAlignment;
  }

 private:
  static constexpr int64_t kAlignment = 256;
  const Tensor memory_;
  const int64_t bytes_;
  int64_t used_ = 0;
};
// Opaque bytes, which the bootstrap carries as uint8 tensors.
Tensor bytes_tensor(const base::Bytes& bytes);
std::span<const std::byte> bytes_of(const Tensor& tensor, const char* name);

}  // namespace moe_p2p::ops
