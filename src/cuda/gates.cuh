// The LSTM cell's arithmetic for one unit in device code; loads and stores of neighbouring units.
#pragma once

#include "core/gates.h"
#include "cuda/number.h"
#include "cuda/ptx/approximate.h"

namespace blocksparse::lstm {
namespace {

// Accurate to 2^-22 for 16-bit types, otherwise to a few ulp.
template <class T>
__device__ inline SumOf<T> logistic(SumOf<T> z) {
  constexpr float kLog2E = 1.44269504f;
  if constexpr (sizeof(T) == 2) return ptx::rcp(1.0f + ptx::ex2(-kLog2E * z));
  else if constexpr (sizeof(T) == 4) return 1.0f / (1.0f + expf(-z));
  else return 1.0 / (1.0 + exp(-z));
}

template <class T>
__device__ inline SumOf<T> hyperbolic_tangent(SumOf<T> z) {
  constexpr float kLog2E = 1.44269504f;
  if constexpr (sizeof(T) == 2) return 1.0f - 2.0f * ptx::rcp(1.0f + ptx::ex2(2 * kLog2E * z));
  else if constexpr (sizeof(T) == 4) return tanhf(z);
  else return tanh(z);
}

// Turns z into the gates and c into the new cell; returns h.
template <class T>
__device__ inline SumOf<T> forward_unit(SumOf<T> (&z)[kGates], SumOf<T>& c) {
  z[0] = logistic<T>(z[0]), z[1] = logistic<T>(z[1]), z[2] = hyperbolic_tangent<T>(z[2]), z[3] = logistic<T>(z[3]);
  c = z[1] * c + z[0] * z[2];
  return z[3] * hyperbolic_tangent<T>(c);
}

// Turns the gates into dz; returns the gradient of the cell before.
template <class T>
__device__ inline SumOf<T> backward_unit(SumOf<T> (&gates)[kGates], SumOf<T> c, SumOf<T> before, SumOf<T> dh,
                                         SumOf<T> dc) {
  const SumOf<T> i = gates[0], f = gates[1], g = gates[2], o = gates[3], squashed = hyperbolic_tangent<T>(c);
  dc += dh * o * (1 - squashed * squashed);
  gates[0] = dc * g * i * (1 - i);
  gates[1] = dc * before * f * (1 - f);
  gates[2] = dc * i * (1 - g * g);
  gates[3] = dh * squashed * o * (1 - o);
  return dc * f;
}

// V neighbouring elements in one access.
template <class T, int V>
struct Units {
  struct alignas(sizeof(T) * V) Packed {
    T v[V];
  };
  __device__ static void load(const T* from, SumOf<T> (&to)[V]) {
    const Packed p = *reinterpret_cast<const Packed*>(from);
#pragma unroll
    for (int i = 0; i < V; ++i) to[i] = widen(p.v[i]);
  }
  __device__ static void store(T* to, const SumOf<T> (&from)[V]) {
    Packed p;
#pragma unroll
    for (int i = 0; i < V; ++i) p.v[i] = narrow<T>(from[i]);
    *reinterpret_cast<Packed*>(to) = p;
  }
  __device__ static void zero(T* to) { *reinterpret_cast<Packed*>(to) = Packed{}; }
};

}  // namespace
}  // namespace blocksparse::lstm
