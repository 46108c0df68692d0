// dW[i] = gate_i dy_out^T x_in in f32 for many tokens: see tiled.cuh.
// Who does what
//   grid      a thread block for a run of blocks of one row of W, up to 256 inputs: they share their dy
//   load      cp.async, three stages of 16 tokens ahead; a thread has the same columns in every stage
//   compute   4 warps of a quarter of the inputs each, all outputs
//   finish    sums go through shared memory, so that results are stored in the order of memory
// A small kernel lists the runs before every call: tables.cu.
#pragma once

#include "core/ceil_div.h"
#include "gemm/cuda/tiled_f32/tiled.cuh"

namespace blocksparse::gemm::tiled_f32 {
namespace {

struct GradientArgs {
  const int32_t* run_count;
  const Run* runs;
  const BlockRef* refs;
  const float *x, *dy, *gates;
  int64_t x_token, dy_token;
  int32_t n, inputs, outputs;
  bool accumulate, vectors;  // dW is stored 4 elements at a time
  float* dw;
};

template <int Block, bool Tf32_>
struct GradientKernel {
  static constexpr int block = Block;
  static constexpr bool tf32 = Tf32_;
  static constexpr int inputs = Block == 128 ? 128 : 256, warp_inputs = inputs / 4, depth = 16, stages = 4;
  static constexpr int x_bytes = depth * inputs * 4, dy_bytes = depth * Block * 4, stage_bytes = x_bytes + dy_bytes;
  static constexpr int pitch = inputs + 4;  // of the sums in shared memory, [outputs][inputs]
  static constexpr int sums_bytes = Block * pitch * 4;
  static constexpr int shared_bytes = sums_bytes > stages* stage_bytes ? sums_bytes : stages* stage_bytes;
};

// ---- Load -----------------------------------------------------------------------------------------------------------

// One thread's columns of x and dy.
template <class K>
class GradientCopy {
 public:
  static constexpr int kX = K::inputs / 4, kDy = K::block / 4;  // vectors of a row
  static constexpr int kXStep = kThreads / kX, kDyStep = kThreads / kDy;

  __device__ GradientCopy(const GradientArgs& g, const Run& run) : g_(g) {
    const int thread = static_cast<int>(threadIdx.x), column = thread % kX * 4, block = run.first + column / K::block;
    x_row_ = thread / kX;
    if (block < run.last) {
      const int input = g.refs[block].from * K::block + column % K::block;
      x_bytes_ = min(max(g.inputs - input, 0), 4) * 4;
      x_ = g.x + x_row_ * g.x_token + (x_bytes_ > 0 ? input : 0);
    }
    const int output = run.row * K::block + thread % kDy * 4;
    dy_row_ = thread / kDy;
    dy_bytes_ = min(max(g.outputs - output, 0), 4) * 4;
    dy_ = g.dy + dy_row_ * g.dy_token + (dy_bytes_ > 0 ? output : 0);
  }

  // Loads the tokens from `first` on, which rises by K::depth a call.
  __device__ void operator()(int first, uint32_t stage) {
    const int thread = static_cast<int>(threadIdx.x);
    const bool whole = first + K::depth <= g_.n;
    if (x_ != nullptr) {
      const float* from = x_;
#pragma unroll
      for (int i = 0; i < K::depth / kXStep; ++i, from += kXStep * g_.x_token) {
        const bool there = whole || first + x_row_ + i * kXStep < g_.n;
        ptx::cp_async_16_at(stage + place_in_columns<K::inputs>(x_row_, thread % kX, i * kXStep), there ? from : g_.x,
                            there ? x_bytes_ : 0);
      }
      x_ += K::depth * g_.x_token;
    }
    const float* from = dy_;
#pragma unroll
    for (int i = 0; i < ceil_div(K::depth, kDyStep); ++i, from += kDyStep * g_.dy_token) {
      if (kDyStep > K::depth && dy_row_ >= K::depth) break;
      const bool there = whole || first + dy_row_ + i * kDyStep < g_.n;
      ptx::cp_async_16_at(stage + K::x_bytes + place_in_columns<K::block>(dy_row_, thread % kDy, i * kDyStep),
                          there ? from : g_.dy, there ? dy_bytes_ : 0);
    }
    dy_ += K::depth * g_.dy_token;
  }

 private:
  const GradientArgs& g_;
  const float *x_ = nullptr, *dy_;
  int x_row_, x_bytes_ = 0, dy_row_, dy_bytes_;
};

// ---- Compute --------------------------------------------------------------------------------------------------------

// x is mma's left operand: its rows are inputs.
template <class K>
class Tf32Grads {
 public:
  __device__ void add(uint32_t stage) {
    const uint32_t x = stage + static_cast<int>(threadIdx.x) / 32 * (K::warp_inputs * 4), dy = stage + K::x_bytes;
    uint32_t a[kTiles][2][4];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
#pragma unroll
      for (int i = 0; i < kTiles / 2; ++i) {  // 32 inputs
        float f[4];
        read_4(f, x + place_of_x(c) + i * 128);
#pragma unroll
        for (int e = 0; e < 4; ++e) a[2 * i + e / 2][c / 2][e % 2 + c % 2 * 2] = rounded_to_tf32(f[e]);
      }
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part) {  // up to 32 outputs
      uint32_t b[kPartTiles][2][2];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        float f[kPartTiles];
        if constexpr (K::block <= 16) {
          read_column<K::block>(f, dy, c);
        } else {
          read_4(f, dy + place_in_columns<K::block>(4 * t() + c, g()) + part * 128);
        }
#pragma unroll
        for (int j = 0; j < kPartTiles; ++j) b[j][c / 2][c % 2] = rounded_to_tf32(f[j]);
      }
#pragma unroll
      for (int j = 0; j < kPartTiles; ++j) {
#pragma unroll
        for (int s = 0; s < 2; ++s) {
#pragma unroll
          for (int m = 0; m < kTiles; ++m) {
            ptx::mma_m16n8k8_tf32(sum_[m][part * kPartTiles + j], a[m][s], b[j][s][0], b[j][s][1]);
          }
        }
      }
    }
  }

  // Calls body(input, output, sum).
  template <class Body>
  __device__ void for_each(Body body) const {
    const int first = static_cast<int>(threadIdx.x) / 32 * K::warp_inputs;
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int j = 0; j < K::block / 8; ++j) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const int input = first + m / 2 * 32 + 4 * g() + m % 2 * 2 + c / 2;
          body(input, j / kPartTiles * 32 + kPartTiles * (2 * t() + c % 2) + j % kPartTiles, sum_[m][j][c]);
        }
      }
    }
  }

 private:
  static constexpr int kTiles = K::warp_inputs / 16;
  static constexpr int kParts = K::block <= 32 ? 1 : K::block / 32, kPartTiles = K::block / 8 / kParts;

  __device__ static int g() { return static_cast<int>(threadIdx.x) % 32 / 4; }
  __device__ static int t() { return static_cast<int>(threadIdx.x) % 4; }
  __device__ static int place_of_x(int c) { return place_in_columns<K::inputs>(4 * t() + c, g()); }

  float sum_[kTiles][K::block / 8][4] = {};
};

// A lane has an eighth of the warp's inputs and a quarter of the outputs.
template <class K>
class F32Grads {
 public:
  __device__ F32Grads() {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    input_ = (lane >> 1 & 1) + (lane >> 2 & 6);
    output_ = (lane & 1) + (lane >> 1 & 2);
  }

  __device__ void add(uint32_t stage) {
    const uint32_t x = stage + static_cast<int>(threadIdx.x) / 32 * (K::warp_inputs * 4), dy = stage + K::x_bytes;
#pragma unroll 4
    for (int k = 0; k < K::depth; ++k) {
      float a[kInputs], b[kOutputs];
#pragma unroll
      for (int i = 0; i < kInputs / 4; ++i) {
        float f[4];
        read_4(f, x + place_in_columns<K::inputs>(k, input_) + i * 128);
#pragma unroll
        for (int e = 0; e < 4; ++e) a[4 * i + e] = f[e];
      }
      if constexpr (K::block == 8) {
        read(b, dy + place_in_columns<8>(k, output_ / 2) + output_ % 2 * 8);
      } else {
#pragma unroll
        for (int j = 0; j < kOutputs / 4; ++j) {
          float f[4];
          read_4(f, dy + place_in_columns<K::block>(k, output_ + 4 * j));
#pragma unroll
          for (int e = 0; e < 4; ++e) b[4 * j + e] = f[e];
        }
      }
#pragma unroll
      for (int i = 0; i < kInputs; ++i) {
#pragma unroll
        for (int j = 0; j < kOutputs; ++j) sum_[i][j] = fmaf(a[i], b[j], sum_[i][j]);
      }
    }
  }

  template <class Body>
  __device__ void for_each(Body body) const {
    const int first = static_cast<int>(threadIdx.x) / 32 * K::warp_inputs;
#pragma unroll
    for (int i = 0; i < kInputs; ++i) {
#pragma unroll
      for (int j = 0; j < kOutputs; ++j) {
        const int output = K::block == 8 ? 2 * output_ + j : j / 4 * 16 + 4 * output_ + j % 4;
        body(first + i / 4 * 32 + 4 * input_ + i % 4, output, sum_[i][j]);
      }
    }
  }

 private:
  static constexpr int kInputs = K::warp_inputs / 8, kOutputs = K::block / 4;

  int input_, output_;
  float sum_[kInputs][kOutputs] = {};
};

// ---- Finish ---------------------------------------------------------------------------------------------------------

template <class K>
__device__ inline void finish_gradient(const GradientArgs& g, const Run& run, const float* staged) {
  constexpr int kVectors = K::inputs / 4;
#pragma unroll 2
  for (int i = static_cast<int>(threadIdx.x); i < K::block * kVectors; i += kThreads) {
    const int row = i / kVectors, column = i % kVectors * 4, block = run.first + column / K::block;
    if (block >= run.last) continue;
    const float gate = g.gates == nullptr ? 1 : g.gates[block];
    const int input = g.refs[block].from * K::block + column % K::block;
    const int inside = run.row * K::block + row < g.outputs ? g.inputs - input : 0;  // inputs inside the matrix
    const float4 sum = *reinterpret_cast<const float4*>(staged + row * K::pitch + column);
    float value[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
    for (int k = 0; k < 4; ++k) value[k] = k < inside && gate != 0 ? gate * value[k] : 0;
    float* to = g.dw + (int64_t{block} * K::block + row) * K::block + column % K::block;
    if (g.vectors && !(g.accumulate && inside < 4)) {
      auto* vector = reinterpret_cast<float4*>(to);
      const float4 before = g.accumulate ? *vector : float4{0, 0, 0, 0};
      *vector = {before.x + value[0], before.y + value[1], before.z + value[2], before.w + value[3]};
    } else {
      for (int k = 0; k < 4; ++k) {
        if (!g.accumulate) to[k] = value[k];
        else if (k < inside) to[k] += value[k];
      }
    }
  }
}

template <class K>
__global__ void __launch_bounds__(kThreads, 2) tiled_f32_gradient(const __grid_constant__ GradientArgs g) {
  extern __shared__ float4 shared[];
  if (static_cast<int>(blockIdx.x) >= *g.run_count) return;
  const Run run = g.runs[blockIdx.x];
  const uint32_t stages = ptx::shared_address(shared);
  GradientCopy<K> copy(g, run);
  std::conditional_t<K::tf32, Tf32Grads<K>, F32Grads<K>> sums;
  const int steps = ceil_div(g.n, K::depth);
  const bool mine = static_cast<int>(threadIdx.x) / 32 * K::warp_inputs < (run.last - run.first) * K::block;
#pragma unroll 1
  for (int i = 1 - K::stages; i < steps; ++i) {
    if (i >= 0) wait_for_stage<K::stages - 2>();
    const int ahead = i + K::stages - 1;
    if (ahead < steps) copy(ahead * K::depth, stages + ahead % K::stages * K::stage_bytes);
    ptx::cp_async_commit();
    if (i >= 0 && mine) sums.add(stages + i % K::stages * K::stage_bytes);
  }
  wait_for_stage<0>();
  auto* staged = reinterpret_cast<float*>(shared);
  sums.for_each([&](int input, int output, float sum) { staged[output * K::pitch + input] = sum; });
  __syncthreads();
  finish_gradient<K>(g, run, staged);
}

// ---- Launch ---------------------------------------------------------------------------------------------------------

template <bool Tf32, class Body>
Status with_gradient_kernel(int32_t block, Body body) {
  switch (block) {
    case 8: return body.template operator()<GradientKernel<8, Tf32>>();
    case 16: return body.template operator()<GradientKernel<16, Tf32>>();
    case 32: return body.template operator()<GradientKernel<32, Tf32>>();
    case 64: return body.template operator()<GradientKernel<64, Tf32>>();
    default: return body.template operator()<GradientKernel<128, Tf32>>();
  }
}

template <bool Tf32>
Status launch_gradient(const WeightGradient& g, const CudaCall& call) {
  const GradTerm term = g.term(0);
  const GradientArgs args{.run_count = run_count(call.workspace.data),
                          .runs = run_list(call.workspace.data),
                          .refs = walk_on_device(g.layout, false).refs,
                          .x = static_cast<const float*>(term.x.data),
                          .dy = static_cast<const float*>(term.dy.data),
                          .gates = static_cast<const float*>(g.gates),
                          .x_token = term.x.token_stride,
                          .dy_token = term.dy.token_stride,
                          .n = static_cast<int32_t>(term.x.n),
                          .inputs = static_cast<int32_t>(g.layout.in_features),
                          .outputs = static_cast<int32_t>(g.layout.out_features),
                          .accumulate = g.accumulate,
                          .vectors = reinterpret_cast<uintptr_t>(g.dw) % 16 == 0,
                          .dw = static_cast<float*>(g.dw)};
  BS_RETURN_IF_ERROR(make_runs(g, call));
  return with_gradient_kernel<Tf32>(g.layout.block_size, [&]<class K>() {
    return cuda::launch({.blocks = most_runs(call.problem),
                         .threads = kThreads,
                         .shared_bytes = K::shared_bytes,
                         .stream = stream_of(call)},
                        tiled_f32_gradient<K>, args);
  });
}

template <bool Tf32>
Status prepare_gradient() {
  for (int32_t block : {8, 16, 32, 64, 128}) {
    BS_RETURN_IF_ERROR(with_gradient_kernel<Tf32>(
        block, [&]<class K>() { return cuda::prepare_for_many(tiled_f32_gradient<K>, K::shared_bytes); }));
  }
  return {};
}

}  // namespace
}  // namespace blocksparse::gemm::tiled_f32
