// The families of CUDA kernels that families.inc lists: which one does a call, and what it needs. All functions are
// pure functions of sizes and card, so they are tested for cards that are not at hand, and in builds without CUDA.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "gemm/cuda/problem.h"

namespace blocksparse::gemm {

enum class Passes : int32_t { products, gradients, all };  // fprop and dgrad; wgrad; both
enum class OldestCard : int32_t { sm_80, sm_90a };         // sm_90a: needs code for all features of 9.0

struct Family {
  std::string_view name;  // the name of its folder
  Passes passes;
  OldestCard oldest;
  // Whether it can do the problem, on a card that runs it.
  bool (*supports)(const CudaProblem& p);
  // Calls with fewer tokens are not given to it, and no workspace is reserved for them.
  int64_t (*least_tokens)(const CudaProblem& p);
  // Whether it is faster than the families below it, for problems that it supports. The reasons stand beside each
  // function and in NOTES.md.
  bool (*pays)(const CudaProblem& p, const cuda::Card& card);
  // Workspace for p, or for fewer tokens that it supports; 0 if it supports neither.
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

// The first is enough for the families that may be chosen for p.n tokens, and for fewer tokens if no row is cut (wgrad:
// always). The second is enough for every family: one of them may be forced.
size_t cuda_workspace_bytes(const CudaProblem& p);
size_t most_cuda_workspace_bytes(const CudaProblem& p);

// How many of p.pairs (x, dy), with p.n tokens together, one launch should take. Between launches dW is rounded unless
// it is f32.
int64_t pairs_at_once(const CudaProblem& p, DType dw_dtype, const cuda::Card& card);

}  // namespace blocksparse::gemm
