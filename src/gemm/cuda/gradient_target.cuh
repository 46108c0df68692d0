// Stores the sums of a weight gradient.
#pragma once

#include "gemm/cuda/finish.cuh"

namespace blocksparse::gemm {
namespace {

struct GradientTarget {
  const float* gates;
  void* dw;
  bool dw_is_wide, accumulate;

  __device__ bool is_aligned() const { return reinterpret_cast<uintptr_t>(dw) % 16 == 0; }

  // Stores two neighbouring sums of block `id`, from element `at` on. The first `inside` of them are in the matrix.
  // Elements outside count as 0 and are not added.
  template <class T>
  __device__ void store_pair(int32_t id, int64_t at, int inside, float2 sum) const {
    const float gate = gates == nullptr ? 1 : gates[id];
    float2 value{inside > 0 && gate != 0 ? gate * sum.x : 0, inside > 1 && gate != 0 ? gate * sum.y : 0};
    if (dw_is_wide) {
      auto* to = reinterpret_cast<float2*>(static_cast<float*>(dw) + at);
      if (accumulate) {
        const float2 before = *to;
        value = {inside > 0 ? before.x + value.x : before.x, inside > 1 ? before.y + value.y : before.y};
      }
      *to = value;
    } else {
      auto* to = reinterpret_cast<uint32_t*>(static_cast<T*>(dw) + at);
      if (!accumulate) {
        *to = narrow_pair(value.x, value.y, T{});
        return;
      }
      const uint32_t before = *to;
      const auto low = static_cast<uint16_t>(before), high = static_cast<uint16_t>(before >> 16);
      const uint16_t new_low = inside > 0 ? narrow<T>(widen(T{low}) + value.x).bits : low;
      const uint16_t new_high = inside > 1 ? narrow<T>(widen(T{high}) + value.y).bits : high;
      *to = new_low | static_cast<uint32_t>(new_high) << 16;
    }
  }

  // Stores eight neighbouring sums. `at` is a multiple of eight, and dW is aligned.
  template <class T>
  __device__ void store_eight(int32_t id, int64_t at, int inside, float (&values)[8]) const {
    const float gate = gates == nullptr ? 1 : gates[id];
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = i < inside && gate != 0 ? gate * values[i] : 0;
    if (dw_is_wide) store_wide(static_cast<float*>(dw) + at, values);
    else store_narrow(static_cast<T*>(dw) + at, values);
  }

  // Stores eight neighbouring sums, of which the first `inside` are in the matrix, into any dW.
  template <class T>
  __device__ void store_any_eight(int32_t id, int64_t at, int inside, float (&values)[8]) const {
    if (is_aligned() && (inside == 8 || !accumulate)) {  // else edges of dW would not be left alone
      store_eight<T>(id, at, inside, values);
      return;
    }
#pragma unroll
    for (int k = 0; k < 8; k += 2) {
      store_pair<T>(id, at + k, min(max(inside - k, 0), 2), {values[k], values[k + 1]});
    }
  }

 private:
  __device__ void store_wide(float* to, float (&values)[8]) const {
    auto* vectors = reinterpret_cast<float4*>(to);
    if (accumulate) {
      const float4 low = vectors[0], high = vectors[1];
      values[0] += low.x, values[1] += low.y, values[2] += low.z, values[3] += low.w;
      values[4] += high.x, values[5] += high.y, values[6] += high.z, values[7] += high.w;
    }
    vectors[0] = {values[0], values[1], values[2], values[3]};
    vectors[1] = {values[4], values[5], values[6], values[7]};
  }

  template <class T>
  __device__ void store_narrow(T* to, float (&values)[8]) const {
    auto* vector = reinterpret_cast<uint4*>(to);
    if (accumulate) {
      const uint4 before = *vector;
      const uint32_t words[4] = {before.x, before.y, before.z, before.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        values[2 * i] += widen(T{static_cast<uint16_t>(words[i])});
        values[2 * i + 1] += widen(T{static_cast<uint16_t>(words[i] >> 16)});
      }
    }
    *vector = {narrow_pair(values[0], values[1], T{}), narrow_pair(values[2], values[3], T{}),
               narrow_pair(values[4], values[5], T{}), narrow_pair(values[6], values[7], T{})};
  }
};

inline GradientTarget target_of(const WeightGradient& g) {
  return {static_cast<const float*>(g.gates), g.dw, g.dw_dtype == DType::f32, g.accumulate};
}

// What two neighbouring sums add to <sums, W>.
template <class T>
__device__ inline float gate_product(const void* w, int64_t at, int inside, float2 sum) {
  const T* of = static_cast<const T*>(w) + at;
  float product = inside > 0 ? sum.x * widen(of[0]) : 0;
  if (inside > 1) product += sum.y * widen(of[1]);
  return product;
}

template <class T>
__device__ inline float gate_product_of_eight(const void* w, int64_t at, int inside, const float (&sums)[8]) {
  float product = 0;
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    product += gate_product<T>(w, at + i, min(max(inside - i, 0), 2), {sums[i], sums[i + 1]});
  }
  return product;
}

__device__ inline float sum_of_warp(float value) {
  for (int step = 16; step > 0; step /= 2) value += __shfl_down_sync(~0u, value, step);
  return value;
}

}  // namespace
}  // namespace blocksparse::gemm
