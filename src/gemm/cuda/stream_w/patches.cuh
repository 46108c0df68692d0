// The list of blocks as the warps of the kernel `stream_w` walk it.
#pragma once

#include "core/ceil_div.h"
#include "gemm/cuda/stream_w/tile.cuh"

namespace blocksparse::gemm::stream_w {
namespace {

// The patches of a piece that one warp takes, in order. Each lane knows one of the next 32.
template <class K>
class Patches {
 public:
  using Tile = typename K::Tile;

  __device__ Patches(const Args& p, const Piece& piece, int blocks, int strip)
      : p_(p), first_(piece.first), strip_(strip), warp_(static_cast<int>(threadIdx.x) / 32) {
    const int patches = blocks * Tile::kPatches;
    count_ = max(0, ceil_div(patches - warp_, p.warps));
    ref_ = fetch(lane());
    if (count_ > 32) next_ = fetch(32 + lane());
    if constexpr (Tile::kReadyOffsets) w_offset_ = w_offset(ref_, lane());
    if constexpr (K::gated) next_gate_ = gate_of(ref_);
  }

  __device__ int count() const { return count_; }

  // Each of these is called with i rising by one a call. x is never ahead of w. The gate is that of patch i when patch
  // i is multiplied.
  __device__ uint32_t next_w(int i) {
    if (i % 32 == 0 && i > 0) {
      ref_ = next_;
      if constexpr (Tile::kReadyOffsets) w_offset_ = w_offset(ref_, i + lane());
      if constexpr (K::gated) next_gate_ = gate_of(ref_);
      if (i + 32 < count_) next_ = fetch(i + 32 + lane());
    }
    if constexpr (Tile::kReadyOffsets) return from_lane(w_offset_, i);
    const int weight = K::by_in ? from_lane(ref_.weight, i) : 0;
    return w_offset({0, weight}, i);
  }
  __device__ uint32_t next_x(int i) {
    constexpr bool kLags = K::config.x_ahead < K::config.w_ahead;
    if constexpr (Tile::kReadyOffsets) {
      if (i % 32 == 0) x_ = Tile::x_offset(p_, ref_.from, patch(i + lane()) % Tile::kPatches);
      return from_lane(x_, i);
    } else {
      if (kLags && i % 32 == 0) x_ = static_cast<uint32_t>(ref_.from);
      const int from = kLags ? static_cast<int>(from_lane(x_, i)) : from_lane(ref_.from, i);
      return Tile::x_offset(p_, from, patch(i) % Tile::kPatches);
    }
  }
  __device__ float next_gate(int i) {
    if constexpr (!K::gated) return 1;
    if (i % 32 == 0) gate_ = next_gate_;
    return from_lane(gate_, i);
  }

 private:
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
  template <class V>
  __device__ static V from_lane(V value, int i) {
    return __shfl_sync(~0u, value, i % 32);
  }
  __device__ int patch(int i) const { return warp_ + p_.warps * i; }
  __device__ BlockRef fetch(int i) const {
    return i < count_ ? p_.walk.refs[first_ + patch(i) / Tile::kPatches] : BlockRef{0, 0};
  }
  __device__ float gate_of(BlockRef ref) const { return p_.gates[ref.weight]; }
  // In fprop W lies in the order of the list, so its address needs no ref.
  __device__ uint32_t w_offset(BlockRef ref, int i) const {
    const int u = patch(i);
    return Tile::w_offset(K::by_in ? ref.weight : first_ + u / Tile::kPatches, strip_, u % Tile::kPatches);
  }

  const Args& p_;
  int first_, strip_, warp_, count_;
  BlockRef ref_, next_{0, 0};
  uint32_t w_offset_ = 0, x_ = 0;
  float gate_ = 1, next_gate_ = 1;
};

}  // namespace
}  // namespace blocksparse::gemm::stream_w
