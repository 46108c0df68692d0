#include "gemm/cuda/families.h"

#include <algorithm>

#include "gemm/cuda/generic/plan.h"
#include "gemm/cuda/wgrad_wgmma/plan.h"

namespace blocksparse::gemm {

// What each folder defines in its plan.cc.
#define BS_FAMILY(name, ...)                               \
  namespace name {                                         \
  bool supports(const CudaProblem& p);                     \
  int64_t least_tokens(const CudaProblem& p);              \
  bool pays(const CudaProblem& p, const cuda::Card& card); \
  int64_t workspace_bytes(const CudaProblem& p);           \
  }
#include "gemm/cuda/families.inc"
#undef BS_FAMILY

std::span<const Family> families() {
  static constexpr Family kFamilies[] = {
#define BS_FAMILY(name, passes, oldest, ...) \
  {#name, passes, oldest, name::supports, name::least_tokens, name::pays, name::workspace_bytes},
#include "gemm/cuda/families.inc"
#undef BS_FAMILY
  };
  return kFamilies;
}

const Family* find_family(std::string_view name) {
  const auto all = families();
  const auto found = std::find_if(all.begin(), all.end(), [&](const Family& family) { return family.name == name; });
  return found == all.end() ? nullptr : &*found;
}

const Family& choose_family(const CudaProblem& p, const cuda::Card& card) {
  for (const Family& family : families()) {
    if (p.n >= family.least_tokens(p) && family.takes(p, card) && family.pays(p, card)) return family;
  }
  return *find_family("generic");
}

namespace {

template <class Counts>
size_t workspace_of(const CudaProblem& p, Counts counts) {
  int64_t bytes = 0;
  for (const Family& family : families()) {
    if (family.does(p.pass) && counts(family)) bytes = std::max(bytes, family.workspace_bytes(p));
  }
  return static_cast<size_t>(bytes);
}

}  // namespace

size_t cuda_workspace_bytes(const CudaProblem& p) {
  return workspace_of(p, [&](const Family& family) { return p.n >= family.least_tokens(p); });
}

size_t most_cuda_workspace_bytes(const CudaProblem& p) {
  return workspace_of(p, [](const Family&) { return true; });
}

// Whether a list of pairs is summed one by one, in one launch of wgrad_wgmma, or by generic. One launch pays for short
// pairs and for large blocks: 8 pairs of 256 tokens, b = 64, 10 % 68 us -> 36. Long pairs of small blocks are faster
// one by one: b = 16, 10 % 427 us instead of 735. NOTES.md beside this file has the table.
int64_t pairs_at_once(const CudaProblem& p, DType dw_dtype, const cuda::Card& card) {
  if (size_of(p.dtype) != 2 || p.pairs < 2) return generic::kMostTerms;
  constexpr int64_t kLong = 1024;
  CudaProblem one = p, some = p;
  one.n = p.n / p.pairs, one.pairs = 1;
  some.pairs = std::min<int64_t>(p.pairs, wgrad_wgmma::kTermsOfLaunch), some.n = one.n * some.pairs;
  const std::string_view alone = choose_family(one, card).name;
  const bool in_parts = dw_dtype == DType::f32;
  const bool one_by_one = in_parts && one.n >= kLong && alone != "generic";
  if (one_by_one && alone == "wgrad_in_registers" && p.block <= 16) return 1;
  if (find_family("wgrad_wgmma")->takes(some, card) && one.n >= (p.block >= 32 ? 128 : kLong) &&
      (in_parts || p.pairs == some.pairs)) {
    return wgrad_wgmma::kTermsOfLaunch;
  }
  return one_by_one ? 1 : generic::kMostTerms;
}

}  // namespace blocksparse::gemm
