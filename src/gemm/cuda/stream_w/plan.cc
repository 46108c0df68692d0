#include "gemm/cuda/stream_w/plan.h"

#include <algorithm>

#include "core/ceil_div.h"

namespace blocksparse::gemm::stream_w {

// Offsets of x in a round and of W count 16 and 64 bytes in 32 bits. y has 64 bits, but a round of it no more thread
// blocks than a grid has. What lies otherwise than the kernel reads it is packed.
bool supports(const CudaProblem& p) {
  constexpr int64_t kMost = int64_t{1} << 36;
  const bool by_tensor_cores = size_of(p.dtype) == 2 || p.tf32;
  return by_tensor_cores && p.pass != Pass::wgrad && p.n >= 1 && p.w_aligned && p.blocks * p.block * p.block < kMost &&
         (!p.glu || (size_of(p.dtype) == 2 && p.block >= 16)) && p.inputs * round_tokens(p) < kMost / 2 &&
         p.outputs * kMostTokens < kMost / 2;
}

int64_t least_tokens(const CudaProblem&) { return 1; }

// Beside `generic`. us, fprop, 4096 x 4096, 4096 tokens, bf16, H200, 2026-11-23, stream_w (generic): b = 8, .25 547
// (2085); b = 32, .25 243 (425), .1 143 (229); b = 64, .5 423 (531); b = 128, .25 251 (317). 256 x 256, 20000 tokens, b
// = 32 38 (43).
bool pays(const CudaProblem&, const cuda::Card&) { return true; }

// 2^23 elements of x, should they have to be copied: of few features a launch of 512 tokens would not fill a card.
int64_t round_tokens(const CudaProblem& p) {
  if (p.slots > 0) return kMostTokens;  // the sums of slices are f32
  constexpr int64_t kElements = 1 << 23, kMost = 1 << 14;
  const int64_t slices = kElements / std::max<int64_t>(1, p.inputs) / kTokens;
  return std::clamp(slices * kTokens, kMostTokens, kMost);
}

// Figures: H200, 12288 x 12288, bf16, cold, us, of densities .5, .1 and .02; 2026-11-21.
Plan plan_of(const CudaProblem& p, bool gated, const cuda::Card& card) {
  Plan plan;
  const bool f32 = p.dtype == DType::f32 && !p.tf32;
  // Kernels for 8, 32 and 64 tokens; b <= 16 has 16 in place of 8: n = 8, b = 8 takes 51.1, 15.4, 8.0 with either, for
  // mma has 16 rows. b = 32, n = 16 has none: 41.0, 11.4, 4.6 with 32 and 41.7, 11.6, 4.8 with one of its own. With
  // gates there is none below 32, which halves what there is to compile.
  const int32_t least = f32 ? 8 : gated ? 32 : p.block <= 16 ? 16 : 8;
  plan.tokens = p.n <= least ? least : p.n <= 32 ? 32 : kTokens;
  plan.slices = static_cast<int32_t>(ceil_div(p.n, plan.tokens));
  // Two warps for b = 8, so that rows of few blocks keep them busy. Where all strips of 32 outputs are resident at
  // once, 8 instead of 4: 4096 x 4096, density .1, b = 32: 4.2 (5.0).
  const int64_t strips = (p.output_blocks() * std::max(1, p.block / 32) + p.slots) * plan.slices;
  // f32's rings of 8 warps take up to 148 KB of shared memory, of which 8.6, 8.9 and 12.0 have 99.
  const bool large = !f32 || card.arch == 80 || (card.arch >= 90 && card.arch < 120);
  plan.warps = p.block == 8 ? 2 : p.block >= 32 && strips <= card.multiprocessors && large ? 8 : 4;
  // Packed, 64 tokens of x are read in lines of 128 bytes: 50.6 (55.3) at .5, 29.4 (31.3) at .25, the same at .1, more
  // below; with 32 tokens never less.
  plan.pack = !f32 && (p.block < 32 || (p.block == 32 && plan.tokens == 64 && p.density() >= 0.15));
  return plan;
}

WorkspaceParts workspace_parts(const CudaProblem& p) {
  const int64_t tokens = p.n <= 32 ? 32 : round_up(p.n, kTokens);
  return {.partial_bytes = p.slots * p.n * p.block * 4,
          .packed_bytes = p.input_blocks() * p.block * tokens * size_of(p.dtype)};
}

// That of as many tokens as a launch takes suffices for more. f32 may be allowed tf32 when it comes to it.
int64_t workspace_bytes(const CudaProblem& asked) {
  CudaProblem p = asked;
  p.tf32 = p.dtype == DType::f32;
  p.n = std::min(p.n, round_tokens(p));
  if (!supports(p)) return 0;
  const WorkspaceParts parts = workspace_parts(p);
  return parts.partial_bytes + parts.packed_bytes;
}

}  // namespace blocksparse::gemm::stream_w
