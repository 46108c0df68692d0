// The pointwise half of gated linear units on a card: y = f(gate) * up, and the gradient of both in one pass.
//   z [n, 2 * groups * 8]   y, dy [n, hidden]   dz like z
// Who does what: a thread takes eight hidden features of a token, 16 bytes of the gate and of up (f32: 32). It takes
// several such items where the grid is too small. Memory is read and written once; arithmetic is in the type of sums.
#include <algorithm>

#include "core/ceil_div.h"
#include "core/text.h"
#include "cuda/card.h"
#include "cuda/launch.h"
#include "cuda/once.h"
#include "gemm/cuda/finish.cuh"
#include "ops/glu/glu.h"

namespace blocksparse::glu {
namespace {

constexpr int kThreads = 256;
constexpr int kGroup = static_cast<int>(kInterleaved);

// f(z) and f'(z).
template <class S>
struct ValueAndSlope {
  S value, slope;
};

__device__ inline float exponential(float x) { return expf(x); }
__device__ inline double exponential(double x) { return exp(x); }
__device__ inline float tail_of(float x) { return erfcf(x); }
__device__ inline double tail_of(double x) { return erfc(x); }

template <class S>
__device__ inline ValueAndSlope<S> with_slope(Activation activation, S z) {
  switch (activation) {
    case Activation::none: break;
    case Activation::relu: return {z < 0 ? 0 : z, z <= 0 ? S(0) : S(1)};
    case Activation::gelu: {
      const S below = S(0.5) * tail_of(z * S(-0.70710678118654752440));
      return {z * below, below + z * exponential(S(-0.5) * z * z) * S(0.39894228040143267794)};
    }
    case Activation::silu: {
      const S s = 1 / (1 + exponential(-z));
      return {z * s, s + z * s * (1 - s)};
    }
    case Activation::gelu_tanh: {
      constexpr S kOnce = S(1.59576912160573071176), kCubed = S(0.07135481627260025);
      const S s = 1 / (1 + exponential(z * (-kOnce - kCubed * z * z)));
      return {z * s, s + z * s * (1 - s) * (kOnce + 3 * kCubed * z * z)};
    }
  }
  return {z, 1};
}

// Eight elements, accessed by 16 bytes where they are aligned.
template <class T>
struct Eight {
  using Vector = std::conditional_t<sizeof(T) == 8, double2, uint4>;
  static constexpr int kVectors = kGroup * static_cast<int>(sizeof(T)) / 16;
  union {
    Vector vectors[kVectors];
    T of[kGroup];
  };

  __device__ Eight() {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) of[i] = T{};
  }
  __device__ void load(const T* from, bool aligned, int count) {
    if (aligned && count >= kGroup) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) vectors[i] = reinterpret_cast<const Vector*>(from)[i];
      return;
    }
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      if (i < count) of[i] = from[i];
    }
  }
  __device__ void store(T* to, bool aligned, int count) const {
    if (aligned && count >= kGroup) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) reinterpret_cast<Vector*>(to)[i] = vectors[i];
      return;
    }
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      if (i < count) to[i] = of[i];
    }
  }
};

// The place of a thread's eight features; `count` of them exist.
struct Item {
  int64_t token, group;
  int count;

  __device__ Item(int64_t i, int64_t groups, int64_t hidden) : token(i / groups), group(i % groups) {
    count = static_cast<int>(min(hidden - group * kGroup, int64_t{kGroup}));
  }
};

template <class T>
__global__ void __launch_bounds__(kThreads)
    glu_forward_groups(const __grid_constant__ Forward f, int64_t groups, bool z_aligned, bool y_aligned) {
  const int64_t items = f.n * groups, step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < items; i += step) {
    const Item item(i, groups, f.hidden);
    const T* z = static_cast<const T*>(f.z) + item.token * f.z_token + item.group * 2 * kGroup;
    Eight<T> gate, up, y;
    gate.load(z, z_aligned, kGroup);
    up.load(z + kGroup, z_aligned, kGroup);
#pragma unroll
    for (int k = 0; k < kGroup; ++k) {
      y.of[k] = narrow<T>(gemm::activated(f.activation, widen(gate.of[k])) * widen(up.of[k]));
    }
    y.store(static_cast<T*>(f.y) + item.token * f.y_token + item.group * kGroup, y_aligned, item.count);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    glu_backward_groups(const __grid_constant__ Backward b, int64_t groups, bool z_aligned, bool dy_aligned) {
  const int64_t items = b.n * groups, step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < items; i += step) {
    const Item item(i, groups, b.hidden);
    const T* z = static_cast<const T*>(b.z) + item.token * b.z_token + item.group * 2 * kGroup;
    T* dz = static_cast<T*>(b.dz) + item.token * b.dz_token + item.group * 2 * kGroup;
    Eight<T> gate, up, dy, dgate, dup;
    gate.load(z, z_aligned, kGroup);
    up.load(z + kGroup, z_aligned, kGroup);
    dy.load(static_cast<const T*>(b.dy) + item.token * b.dy_token + item.group * kGroup, dy_aligned, item.count);
#pragma unroll
    for (int k = 0; k < kGroup; ++k) {
      const ValueAndSlope<SumOf<T>> of = with_slope(b.activation, widen(gate.of[k]));
      const SumOf<T> d = widen(dy.of[k]);
      if (k >= item.count) continue;  // these stay 0, whatever z holds there
      dgate.of[k] = narrow<T>(d * widen(up.of[k]) * of.slope);
      dup.of[k] = narrow<T>(d * of.value);
    }
    dgate.store(dz, z_aligned, kGroup);
    dup.store(dz + kGroup, z_aligned, kGroup);
  }
}

bool in_vectors(const void* data, int64_t token, DType dtype) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && token * size_of(dtype) % 16 == 0;
}

// Calls body.template operator()<T>() with the element type.
template <class Body>
Status with_type(DType dtype, Body body) {
  switch (dtype) {
    case DType::f32: return body.template operator()<float>();
    case DType::f64: return body.template operator()<double>();
    case DType::bf16: return body.template operator()<Bf16>();
    case DType::f16: return body.template operator()<F16>();
  }
  return invalid("[glu] dtype is ", static_cast<int>(dtype));
}

// Enough thread blocks to fill the card several times over.
Result<int64_t> blocks_for(int64_t items, Device device) {
  const auto card = cuda::card_of(device);
  if (!card.ok()) return card.status();
  return std::min<int64_t>(ceil_div(items, int64_t{kThreads}), int64_t{card->multiprocessors} * 32);
}

Status prepare() {
  for (const DType dtype : {DType::f32, DType::f64, DType::bf16, DType::f16}) {
    BS_RETURN_IF_ERROR(with_type(dtype, [&]<class T>() {
      BS_RETURN_IF_ERROR(cuda::prepare(glu_forward_groups<T>, 0));
      return cuda::prepare(glu_backward_groups<T>, 0);
    }));
  }
  return {};
}

// Prepares `device`, which is the current device.
Status prepare_once(Device device) {
  static cuda::OncePerDevice once;
  return once(device, prepare);
}

}  // namespace

Status cuda_forward(const Forward& f, Device device, Stream stream) {
  const cuda::OnDevice on(device);
  BS_RETURN_IF_ERROR(on.status());
  BS_RETURN_IF_ERROR(prepare_once(device));
  const auto blocks = blocks_for(f.n * f.groups(), device);
  if (!blocks.ok()) return blocks.status();
  const cuda::Launch launch{.blocks = *blocks, .threads = kThreads, .stream = static_cast<cudaStream_t>(stream.handle)};
  return with_type(f.dtype, [&]<class T>() {
    return cuda::launch(launch, glu_forward_groups<T>, f, f.groups(), in_vectors(f.z, f.z_token, f.dtype),
                        in_vectors(f.y, f.y_token, f.dtype));
  });
}

Status cuda_backward(const Backward& b, Device device, Stream stream) {
  const cuda::OnDevice on(device);
  BS_RETURN_IF_ERROR(on.status());
  BS_RETURN_IF_ERROR(prepare_once(device));
  const auto blocks = blocks_for(b.n * b.groups(), device);
  if (!blocks.ok()) return blocks.status();
  const cuda::Launch launch{.blocks = *blocks, .threads = kThreads, .stream = static_cast<cudaStream_t>(stream.handle)};
  const bool z_aligned = in_vectors(b.z, b.z_token, b.dtype) && in_vectors(b.dz, b.dz_token, b.dtype);
  return with_type(b.dtype, [&]<class T>() {
    return cuda::launch(launch, glu_backward_groups<T>, b, b.groups(), z_aligned,
                        in_vectors(b.dy, b.dy_token, b.dtype));
  });
}

Status prepare_cuda(Device device) {
  const cuda::OnDevice on(device);
  BS_RETURN_IF_ERROR(on.status());
  return prepare_once(device);
}

}  // namespace blocksparse::glu
