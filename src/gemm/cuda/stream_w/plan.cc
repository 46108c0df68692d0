#include "gemm/cuda/stream_w/plan.h"

#include <algorithm>

#include "core/ceil_div.h"

namespace blocksparse::gemm::stream_w {

// Offsets of x in a round count 16 bytes in 32 bits, offsets of W 64 bytes. Offsets of y have 64 bits, but a round of y
// must not need more thread blocks than a grid has. Operands in other orders are packed.
bool supports(const CudaProblem& p) {
  constexpr int64_t kMost = int64_t{1} << 36;
  const bool by_tensor_cores = size_of(p.dtype) == 2 || p.tf32;
  return by_tensor_cores && p.pass != Pass::wgrad && p.n >= 1 && p.w_aligned && p.blocks * p.block * p.block < kMost &&
         (!p.glu || (size_of(p.dtype) == 2 && p.block >= 16)) && p.inputs * round_tokens(p) < kMost / 2 &&
         p.outputs * kMostTokens < kMost / 2;
}

int64_t least_tokens(const CudaProblem&) { return 1; }

// It pays beside `generic` at every size: 4096 x 4096, 4096 tokens, b = 64, density .5, H200, 2026-11-23: 423 us,
// generic 531. NOTES.md has the table.
bool pays(const CudaProblem&, const cuda::Card&) { return true; }

// A round has as many tokens as fit into 2^23 elements of x, because x may have to be copied. With few features 512
// tokens would not fill a card.
int64_t round_tokens(const CudaProblem& p) {
  if (p.slots > 0) return kMostTokens;  // the sums of slices are f32
  constexpr int64_t kElements = 1 << 23, kMost = 1 << 14;
  const int64_t slices = kElements / std::max<int64_t>(1, p.inputs) / kTokens;
  return std::clamp(slices * kTokens, kMostTokens, kMost);
}

// Figures: H200, 12288 x 12288, bf16, from memory, 2026-11-21.
Plan plan_of(const CudaProblem& p, bool gated, const cuda::Card& card) {
  Plan plan;
  const bool f32 = p.dtype == DType::f32 && !p.tf32;
  // There are kernels for 8, 32 and 64 tokens. b <= 16 has 16 instead of 8, which takes as long, because mma has 16
  // rows. A kernel for 16 tokens of b = 32 would win nothing: density .1, 11.4 us with 32, 11.6 with its own. Gated
  // products have none below 32, which halves what there is to compile.
  const int32_t least = f32 ? 8 : gated ? 32 : p.block <= 16 ? 16 : 8;
  plan.tokens = p.n <= least ? least : p.n <= 32 ? 32 : kTokens;
  plan.slices = static_cast<int32_t>(ceil_div(p.n, plan.tokens));
  // Two warps for b = 8, so that rows of few blocks keep them busy. 8 instead of 4 if all strips of 32 outputs are
  // resident at once: 4096 x 4096, density .1, b = 32: 5.0 us -> 4.2.
  const int64_t strips = (p.output_blocks() * std::max(1, p.block / 32) + p.slots) * plan.slices;
  // f32's rings of 8 warps take up to 148 KB of shared memory. Cards of 8.6, 8.9 and 12.0 have 99 KB.
  const bool large = !f32 || card.arch == 80 || (card.arch >= 90 && card.arch < 120);
  plan.warps = p.block == 8 ? 2 : p.block >= 32 && strips <= card.multiprocessors && large ? 8 : 4;
  // 64 tokens of packed x are read in lines of 128 bytes: density .5 55.3 us -> 50.6. Packing gains nothing at .1 and
  // below, nor with 32 tokens.
  plan.pack = !f32 && (p.block < 32 || (p.block == 32 && plan.tokens == 64 && p.density() >= 0.15));
  return plan;
}

WorkspaceParts workspace_parts(const CudaProblem& p) {
  const int64_t tokens = p.n <= 32 ? 32 : round_up(p.n, kTokens);
  return {.partial_bytes = p.slots * p.n * p.block * 4,
          .packed_bytes = p.input_blocks() * p.block * tokens * size_of(p.dtype)};
}

// The workspace of one launch suffices for more tokens. f32 may be allowed tf32 when the call comes.
int64_t workspace_bytes(const CudaProblem& asked) {
  CudaProblem p = asked;
  p.tf32 = p.dtype == DType::f32;
  p.n = std::min(p.n, round_tokens(p));
  if (!supports(p)) return 0;
  const WorkspaceParts parts = workspace_parts(p);
  return parts.partial_bytes + parts.packed_bytes;
}

}  // namespace blocksparse::gemm::stream_w
