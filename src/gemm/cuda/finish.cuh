// Activations in device code, and the epilogue of a sum.
#pragma once

#include "cuda/number.h"
#include "gemm/cuda/approximate.cuh"
#include "gemm/cuda/call.h"

namespace blocksparse::gemm {
namespace {

struct DeviceMatrix {
  const void* data;
  int64_t token_stride, feature_stride;
  bool aligned;  // rows begin at multiples of 16 bytes

  __device__ bool features_contiguous() const { return feature_stride == 1; }

  template <class T>
  __device__ T* at(int64_t token, int64_t feature) const {
    return static_cast<T*>(const_cast<void*>(data)) + token * token_stride + feature * feature_stride;
  }
};

template <class T>
DeviceMatrix matrix_of(const Activations& a) {
  const int64_t rows = a.features_first() ? a.feature_stride : a.token_stride;
  const bool aligned = reinterpret_cast<uintptr_t>(a.data) % 16 == 0 && rows * sizeof(T) % 16 == 0;
  return {a.data, a.token_stride, a.feature_stride, aligned};
}

// Whether 16-bit outputs can be stored two at a time.
template <class T>
inline bool in_pairs(const Activations& y) {
  return !y.features_first() && y.features % 2 == 0 && reinterpret_cast<uintptr_t>(y.data) % (2 * sizeof(T)) == 0 &&
         (y.n == 1 || y.token_stride % 2 == 0);
}

// Whether sums are stored without an epilogue.
inline bool without_epilogue(const Product& p) {
  return p.bias == nullptr && p.residual.data == nullptr && p.activation == Activation::none && !p.glu;
}

inline cudaStream_t stream_of(const CudaCall& call) { return static_cast<cudaStream_t>(call.stream); }

__device__ inline float activated(Activation activation, float z) {
  switch (activation) {
    case Activation::none: break;
    case Activation::relu: return z < 0 ? 0 : z;
    case Activation::gelu: return 0.5f * z * erfcf(z * -0.707106781f);
    case Activation::silu: return z / (1 + expf(-z));
    case Activation::gelu_tanh: return z / (1 + expf(z * (-1.59576912f - 0.0713548163f * z * z)));
  }
  return z;
}

__device__ inline double activated(Activation activation, double z) {
  switch (activation) {
    case Activation::none: break;
    case Activation::relu: return z < 0 ? 0 : z;
    case Activation::gelu: return 0.5 * z * erfc(z * -0.70710678118654752440);
    case Activation::silu: return z / (1 + exp(-z));
    case Activation::gelu_tanh: return z / (1 + exp(z * (-1.59576912160573071176 - 0.07135481627260025 * z * z)));
  }
  return z;
}

// As exactly as a T can hold.
template <class T>
__device__ inline SumOf<T> activated_for(Activation activation, SumOf<T> z) {
  if constexpr (sizeof(T) == 2) return approximately_activated(activation, z);
  else return activated(activation, z);
}

// Whether an output belongs to the gate, and the feature of y that it contributes to.
__device__ inline bool is_gate(int64_t output) { return output % (2 * kInterleaved) < kInterleaved; }
__device__ inline int64_t feature_of(int64_t output) {
  return output / (2 * kInterleaved) * kInterleaved + output % kInterleaved;
}
// The inverse, within a tile: the column of a feature's gate.
__device__ inline int gate_column(int feature) {
  constexpr int kGroup = static_cast<int>(kInterleaved);
  return feature / kGroup * 2 * kGroup + feature % kGroup;
}

struct Finish {
  DeviceMatrix y, residual;
  const void* bias;
  Activation activation;
  int64_t hidden = 0;  // features of y, if the sums are gate and up of a gated linear unit; otherwise 0

  template <class T>
  __device__ T value(int64_t token, int64_t output, SumOf<T> sum) const {
    return narrow<T>(activated_for<T>(activation, before_activation<T>(token, output, sum)));
  }

  template <class T>
  __device__ SumOf<T> before_activation(int64_t token, int64_t output, SumOf<T> sum) const {
    if (bias != nullptr) sum += widen(static_cast<const T*>(bias)[output]);
    if (residual.data != nullptr) {
      sum += widen(*residual.at<T>(token, output));
    }
    return sum;
  }

  template <class T>
  __device__ T* at(int64_t token, int64_t output) const {
    return y.at<T>(token, output);
  }

  template <class T>
  __device__ void store(int64_t token, int64_t output, SumOf<T> sum) const {
    *at<T>(token, output) = value<T>(token, output, sum);
  }

  // f(gate) * up for the sums of two outputs; `output` is that of the gate.
  template <class T>
  __device__ SumOf<T> glu(int64_t output, SumOf<T> gate, SumOf<T> up) const {
    if (bias != nullptr) {
      gate += widen(static_cast<const T*>(bias)[output]);
      up += widen(static_cast<const T*>(bias)[output + kInterleaved]);
    }
    return activated_for<T>(activation, gate) * up;
  }

  template <class T>
  __device__ void store_glu(int64_t token, int64_t output, SumOf<T> gate, SumOf<T> up) const {
    const int64_t feature = feature_of(output);
    if (feature < hidden) *at<T>(token, feature) = narrow<T>(glu<T>(output, gate, up));
  }
};

}  // namespace
}  // namespace blocksparse::gemm
