#include "gemm/cuda/wgrad_stream/plan.h"

#include <algorithm>

#include "core/places.h"
#include "gemm/cuda/wgrad_in_registers/plan.h"

namespace blocksparse::gemm::wgrad_stream {

// Offsets count 16 and 64 bytes in 32 bits. What lies otherwise than the kernel reads it is packed.
bool supports(const CudaProblem& p) {
  constexpr int64_t kMost = int64_t{1} << 36;
  return p.pass == Pass::wgrad && (size_of(p.dtype) == 2 || p.tf32) && p.n >= 1 && p.n <= most_tokens(p) &&
         p.blocks * p.block * p.block < kMost / 4 && std::max(p.inputs, p.outputs) < kMost / 64;
}

int64_t least_tokens(const CudaProblem&) { return 1; }
bool pays(const CudaProblem&, const cuda::Card&) { return true; }

// us of 1024 tokens, 4096 x 4096, bf16, H200, 2026-11-22 and 24, of wgrad_stream, wgrad_in_registers and wgrad_wgmma:
//
//   b = 8      of density .25 161, 87, 87; .10 82, 45, 84; .05 60, -, 57
//   b = 16     .25 94, 56, 81; .10 51, 32, 78
//   b = 32     .25 49, 48, 56; .10 28, 34, 33
//   b = 64     .25 53, -, 44; .10 31, -, 31
//   b = 128    .25 53, -, 27; .10 31, -, 28
//
// Of 512 tokens b = 64 takes 27 and 17 (wgrad_wgmma 36 and 27). wgrad_in_registers takes about 25 at the least.
bool is_best(const CudaProblem& p, const cuda::Card& card) {
  if (!supports(p)) return false;
  if (p.n < 1024) return true;
  if (p.block > 32 || p.n >= 2048) return false;
  namespace registers = wgrad_in_registers;
  const bool beside_registers =
      registers::supports(p) && p.n >= registers::least_tokens(p) && registers::pays_beside_wgmma(p, card);
  const double most = p.block == 8    ? (beside_registers ? 0.02 : 0.09)
                      : p.block == 16 ? (beside_registers ? 0.04 : 0.2)
                                      : (beside_registers ? 0.2 : 0.3);
  return p.density() < most;
}

Plan plan_of(const CudaProblem& p) {
  Plan plan;
  plan.patch = std::min(p.block, 32);
  const int64_t side = p.block / plan.patch;
  plan.patches = p.blocks * side * side;
  plan.input_patches = p.input_blocks() * side;
  plan.output_patches = p.output_blocks() * side;
  // Pairs are packed 64 at a time, in whole chunks of 64 bytes a feature.
  const int64_t tokens = 64 / size_of(p.dtype);
  const int64_t chunks = divide_up(p.n, tokens) + (std::max<int64_t>(p.n, 1) - 1) / 64;
  plan.packed_bytes = (plan.input_patches + plan.output_patches) * chunks * plan.patch * 64;
  plan.workspace_bytes = plan.packed_bytes + plan.patches * 4;
  return plan;
}

int32_t warps_of_tile(int64_t tiles, int64_t chunks, const cuda::Card& card) {
  const int64_t resident = int64_t{card.multiprocessors} * 12;
  return tiles >= resident || chunks < 2 ? 1 : 2 * tiles >= resident || chunks < 4 ? 2 : 4;
}

// Of as many tokens as it takes. f32 may be allowed tf32 when it comes to it.
int64_t workspace_bytes(const CudaProblem& asked) {
  CudaProblem p = asked;
  p.tf32 = p.dtype == DType::f32;
  p.n = std::min(p.n, most_tokens(p));
  return supports(p) ? plan_of(p).workspace_bytes : 0;
}

}  // namespace blocksparse::gemm::wgrad_stream
