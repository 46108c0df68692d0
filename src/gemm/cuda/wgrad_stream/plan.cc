#include "gemm/cuda/wgrad_stream/plan.h"

#include <algorithm>

#include "core/ceil_div.h"
#include "gemm/cuda/wgrad_in_registers/plan.h"

namespace blocksparse::gemm::wgrad_stream {

// Offsets count 16 and 64 bytes in 32 bits. Any order of memory will do, because pack.cu copies x and dy.
bool supports(const CudaProblem& p) {
  constexpr int64_t kMost = int64_t{1} << 36;
  return p.pass == Pass::wgrad && (size_of(p.dtype) == 2 || p.tf32) && p.n >= 1 && p.n <= most_tokens(p) &&
         p.blocks * p.block * p.block < kMost / 4 && std::max(p.inputs, p.outputs) < kMost / 64;
}

int64_t least_tokens(const CudaProblem&) { return 1; }
bool pays(const CudaProblem&, const cuda::Card&) { return true; }

namespace {

// The density below which it is faster than wgrad_in_registers and wgrad_wgmma. NOTES.md has the measurements.
double best_below(const CudaProblem& p, bool beside_registers) {
  constexpr double kAny = 2;
  if (p.n < 512) return kAny;
  if (p.n < 1024) {
    switch (p.block) {
      case 8: return beside_registers ? 0.03 : kAny;
      case 16: return beside_registers ? 0.1 : kAny;
      case 128: return 0.05;
      default: return kAny;
    }
  }
  if (p.n >= 2048) return 0;
  switch (p.block) {
    case 8: return beside_registers ? 0.01 : 0.09;
    case 16: return beside_registers ? 0.01 : 0.2;
    case 32: return beside_registers ? 0.2 : 0.3;
    default: return 0;
  }
}

}  // namespace

bool is_best(const CudaProblem& p, const cuda::Card& card) {
  namespace registers = wgrad_in_registers;
  if (!supports(p)) return false;
  const bool beside_registers =
      registers::supports(p) && p.n >= registers::least_tokens(p) && registers::pays_beside_wgmma(p, card);
  return p.density() < best_below(p, beside_registers);
}

Plan plan_of(const CudaProblem& p) {
  Plan plan;
  plan.patch = std::min(p.block, 32);
  const int64_t side = p.block / plan.patch;
  plan.patches = p.blocks * side * side;
  plan.input_patches = p.input_blocks() * side;
  plan.output_patches = p.output_blocks() * side;
  // A launch packs 64 pairs, in whole chunks of 64 bytes a feature.
  const int64_t tokens = 64 / size_of(p.dtype);
  const int64_t chunks = ceil_div(p.n, tokens) + (std::max<int64_t>(p.n, 1) - 1) / 64;
  plan.packed_bytes = (plan.input_patches + plan.output_patches) * chunks * plan.patch * 64;
  plan.workspace_bytes = plan.packed_bytes + plan.patches * 4;
  return plan;
}

int32_t warps_of_tile(int64_t tiles, int64_t chunks, const cuda::Card& card) {
  const int64_t resident = int64_t{card.multiprocessors} * 12;
  return tiles >= resident || chunks < 2 ? 1 : 2 * tiles >= resident || chunks < 4 ? 2 : 4;
}

// The workspace for as many tokens as the kernel takes. f32 is counted as tf32, which a call may allow later.
int64_t workspace_bytes(const CudaProblem& asked) {
  CudaProblem p = asked;
  p.tf32 = p.dtype == DType::f32;
  p.n = std::min(p.n, most_tokens(p));
  return supports(p) ? plan_of(p).workspace_bytes : 0;
}

}  // namespace blocksparse::gemm::wgrad_stream
