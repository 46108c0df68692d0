#include "gemm/cuda/stream_w/pack.h"

#include <array>
#include <atomic>

#include "core/ceil_div.h"
#include "cuda/launch.h"
#include "cuda/ptx/griddepcontrol.h"
#include "cuda/ptx/load.h"

namespace blocksparse::gemm::stream_w {
namespace {

constexpr int kPackThreads = 128;

// Reads 16 bytes of a token's features as 4 words.
template <class Bits>
__device__ void read_vector(const Pack& p, int32_t token, int64_t feature, uint32_t* to) {
  constexpr int kElements = 16 / sizeof(Bits);
  const auto* from = static_cast<const Bits*>(p.x) + token * p.token_stride + feature * p.feature_stride;
  if (token < p.n && p.vectors && feature + kElements <= p.features) {
    ptx::ld_16(to, from);
    return;
  }
  const auto element = [&](int k) -> uint32_t {
    return token < p.n && feature + k < p.features ? from[k * p.feature_stride] : 0;
  };
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(Bits) == 2) to[i] = element(2 * i) | element(2 * i + 1) << 16;
    else to[i] = element(i);
  }
}

// The work of a thread: one of the `items` of a slice.
struct SliceItem {
  int64_t index, first_vector;  // first_vector: where the slice begins, in 16 bytes
  int32_t slice, first_token;

  __device__ SliceItem(const Pack& p, int64_t items) {
    const int64_t i = blockIdx.x * int64_t{kPackThreads} + threadIdx.x;
    slice = static_cast<int32_t>(i / items);
    index = i - slice * items;
    first_token = slice * p.tokens;
    first_vector = slice * (p.blocks * p.block * p.tokens * p.size / 16);
  }
};

// Packs blocks of 8 and 16 inputs. A thread has all inputs of a block for Tokens tokens, which serve four lanes.
template <int Block, int Tokens>
__global__ void __launch_bounds__(kPackThreads) pack_small(const __grid_constant__ Pack p) {
  // All earlier kernels are complete before any later one begins, so later ones may read everything except what is
  // written here.
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  constexpr int kWords = Block / 8, kLaneWords = Tokens * kWords;  // of a token, and of a lane
  const int32_t groups = p.tokens / (8 * Tokens);
  const SliceItem item(p, p.blocks * 8 * groups);
  const int64_t i = item.index, block = i / (8 * groups);
  const auto row = static_cast<int32_t>(i % 8), group = static_cast<int32_t>(i / 8 % groups);
  if (item.slice >= p.slices) return;
  uint32_t in[Tokens][Block / 2];
#pragma unroll
  for (int k = 0; k < Tokens; ++k) {
#pragma unroll
    for (int q = 0; q < Block / 8; ++q)
      read_vector<uint16_t>(p, item.first_token + 8 * (Tokens * group + k) + row, block * Block + 8 * q, in[k] + 4 * q);
  }
  uint32_t out[4 * kLaneWords];
#pragma unroll
  for (int lane = 0; lane < 4; ++lane) {
#pragma unroll
    for (int k = 0; k < Tokens; ++k) {
#pragma unroll
      for (int q = 0; q < kWords; ++q) out[lane * kLaneWords + k * kWords + q] = in[k][lane * kWords + q];
    }
  }
  auto* to = static_cast<uint4*>(p.to) + item.first_vector + ((block * groups + group) * 8 + row) * kLaneWords;
#pragma unroll
  for (int q = 0; q < kLaneWords; ++q) to[q] = {out[4 * q], out[4 * q + 1], out[4 * q + 2], out[4 * q + 3]};
}

// Packs blocks of 32 and more, and all blocks of f32. A thread has 16 bytes of a token. Neighbouring threads follow the
// contiguous side of x.
template <class Bits>
__global__ void __launch_bounds__(kPackThreads) pack_chunks(const __grid_constant__ Pack p) {
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  constexpr int kElements = 16 / sizeof(Bits);
  const int vectors = min(p.block / kElements, 4);  // vectors of a chunk
  const SliceItem item(p, p.blocks * p.block / kElements * p.tokens);
  const int64_t i = item.index, chunk = i / (vectors * p.tokens);
  const auto rest = static_cast<int32_t>(i % (vectors * p.tokens));
  const int32_t token = p.feature_stride == 1 ? rest / vectors : rest % p.tokens;
  const int32_t vector = p.feature_stride == 1 ? rest % vectors : rest / p.tokens;
  if (item.slice >= p.slices) return;
  uint32_t v[4];
  read_vector<Bits>(p, item.first_token + token, (chunk * vectors + vector) * kElements, v);
  static_cast<uint4*>(p.to)[item.first_vector + (chunk * p.tokens + token) * vectors + vector] = {v[0], v[1], v[2],
                                                                                                  v[3]};
}

// Calls body(kernel, elements of a thread) with the kernel for this size of elements, block and number of tokens.
template <class Body>
Status with_pack_kernel(int64_t size, int32_t block, int32_t tokens, Body body) {
  if (size == 4) return body(pack_chunks<uint32_t>, 4);
  if (block >= 32) return body(pack_chunks<uint16_t>, 8);
  if (block == 16) return tokens == 8 ? body(pack_small<16, 1>, 16) : body(pack_small<16, 2>, 32);
  switch (tokens) {
    case 8: return body(pack_small<8, 1>, 8);
    case 16: return body(pack_small<8, 2>, 16);
    default: return body(pack_small<8, 4>, 32);
  }
}

constexpr size_t kMostDevices = 64;
std::array<std::atomic<bool>, kMostDevices> overlaps{};

}  // namespace

Status pack_x(const Pack& p, bool overlap, cudaStream_t stream) {
  return with_pack_kernel(p.size, p.block, p.tokens, [&](auto kernel, int elements) {
    const int64_t threads = p.blocks * p.block * p.tokens / elements * p.slices;
    return cuda::launch(
        {.blocks = ceil_div(threads, kPackThreads), .threads = kPackThreads, .stream = stream, .overlap = overlap},
        kernel, p);
  });
}

Status prepare_pack() {
  for (int32_t block : {8, 16, 32}) {
    for (int32_t tokens : {8, 16, 32}) {
      BS_RETURN_IF_ERROR(with_pack_kernel(2, block, tokens, [](auto kernel, int) { return cuda::prepare(kernel, 0); }));
    }
  }
  BS_RETURN_IF_ERROR(cuda::prepare(pack_chunks<uint32_t>, 0));
  int device = 0;
  BS_RETURN_IF_ERROR(cuda::status_of(cudaGetDevice(&device), "cudaGetDevice"));
  if (static_cast<size_t>(device) < kMostDevices) overlaps[device] = cuda::has_griddepcontrol(pack_chunks<uint16_t>);
  return {};
}

bool kernels_overlap(int32_t device) { return static_cast<size_t>(device) < kMostDevices && overlaps[device]; }

}  // namespace blocksparse::gemm::stream_w
