// The families of CUDA kernels, which families.inc lists: which of them does a call, and what it needs. Pure functions
// of sizes and card, so they are tested for cards that are not here, and in builds without CUDA.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "gemm/cuda/problem.h"

namespace blocksparse::gemm {

enum class Passes : int32_t { products, gradients, all };  // fprop and dgrad; wgrad; both
enum class OldestCard : int32_t { sm_80, sm_90a };         // sm_90a: only code for all features of 9.0 will do

struct Family {
  std::string_view name;  // that of its folder
  Passes passes;
  OldestCard oldest;
  // What it can do, where it runs.
  bool (*supports)(const CudaProblem& p);
  // Calls of fewer tokens are not given to it, nor is workspace for it asked for.
  int64_t (*least_tokens)(const CudaProblem& p);
  // Whether it is faster than the families below it, for what it supports. Its reasons stand there, and in NOTES.md.
  bool (*pays)(const CudaProblem& p, const cuda::Card& card);
  // What it uses for p, or for fewer tokens that it supports; 0 where it supports neither.
  int64_t (*workspace_bytes)(const CudaProblem& p);

  bool does(Pass pass) const { return passes == Passes::all || (passes == Passes::gradients) == (pass == Pass::wgrad); }
  bool runs(const cuda::Card& card) const {
    return card.arch >= cuda::kOldestArch && (oldest == OldestCard::sm_80 || card.sm90a);
  }
  bool takes(const CudaProblem& p, const cuda::Card& card) const { return does(p.pass) && runs(card) && supports(p); }
};

// In the order in which they are asked.
std::span<const Family> families();
const Family* find_family(std::string_view name);

const Family& choose_family(const CudaProblem& p, const cuda::Card& card);

// Enough for the families that may be chosen for so many tokens, and for less where no row is cut (wgrad: always); for
// all of them, one of which may be forced.
size_t cuda_workspace_bytes(const CudaProblem& p);
size_t most_cuda_workspace_bytes(const CudaProblem& p);

// How many of p.pairs (x, dy), of p.n tokens together, a launch is best given. dW is rounded between launches unless it
// is f32.
int64_t pairs_at_once(const CudaProblem& p, DType dw_dtype, const cuda::Card& card);

}  // namespace blocksparse::gemm
