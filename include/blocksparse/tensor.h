// A view of somebody's memory: pointer, type, device, shape and strides. Owns nothing, copies nothing.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "blocksparse/dtype.h"

namespace blocksparse {

enum class DeviceType : int32_t { cpu = 0, cuda = 1 };

struct Device {
  DeviceType type = DeviceType::cpu;
  int32_t index = 0;
  friend bool operator==(const Device&, const Device&) = default;
};

inline constexpr int kMaxRank = 5;

// `Pointer` is void* (Tensor) or const void* (ConstTensor). A null pointer with rank 0 means "not given".
template <class Pointer>
struct BasicTensor {
  Pointer data = nullptr;
  DType dtype = DType::f32;
  Device device = {};
  int32_t rank = 0;
  std::array<int64_t, kMaxRank> shape = {};
  std::array<int64_t, kMaxRank> stride = {};  // in elements

  BasicTensor() = default;

  // Row-major and contiguous.
  BasicTensor(Pointer data, DType dtype, std::initializer_list<int64_t> dims, Device device = {})
      : data(data), dtype(dtype), device(device), rank(static_cast<int32_t>(dims.size())) {
    if (rank > kMaxRank) return;  // every op refuses it
    size_t i = 0;
    for (int64_t dim : dims) shape[i++] = dim;
    int64_t step = 1;
    while (i-- > 0) {
      stride[i] = step;
      step *= shape[i];
    }
  }

  // A Tensor is also a ConstTensor.
  template <class Other>
    requires(std::is_const_v<std::remove_pointer_t<Pointer>> && !std::is_same_v<Other, Pointer>)
  BasicTensor(const BasicTensor<Other>& other)  // NOLINT(google-explicit-constructor)
      : data(other.data),
        dtype(other.dtype),
        device(other.device),
        rank(other.rank),
        shape(other.shape),
        stride(other.stride) {}

  bool given() const { return data != nullptr || rank != 0; }
};

using Tensor = BasicTensor<void*>;
using ConstTensor = BasicTensor<const void*>;

// Activations of `n` tokens, seen as [n, features]. Features-last is [n, features] in memory; features-first is
// [features, n] in memory, seen through its strides.
enum class Order : int32_t { features_last = 0, features_first = 1 };

template <class Pointer>
BasicTensor<Pointer> activations(Pointer data, DType dtype, int64_t n, int64_t features, Order order,
                                 Device device = {}) {
  BasicTensor<Pointer> tensor(data, dtype, {n, features}, device);
  if (order == Order::features_first) tensor.stride = {1, n};
  return tensor;
}

}  // namespace blocksparse
