// Runs the CUDA kernels: finds the card, chooses a family, prepares it once a device, launches.
#include <algorithm>
#include <vector>

#include "core/text.h"
#include "cuda/build_index.h"
#include "cuda/once.h"
#include "gemm/cuda/call.h"
#include "gemm/cuda/families.h"
#include "gemm/cuda/forced.h"
#include "gemm/cuda/wgrad_wgmma/plan.h"

namespace blocksparse::gemm {

namespace {

struct CompiledFamily {
  const Family* family;
  DType dtype;
  FamilyKernels kernels;
};

template <DType...>
struct DTypes {};

// One entry for each type of each row of families.inc.
const std::vector<CompiledFamily>& compiled_families() {
  static const std::vector<CompiledFamily> all = [] {
    std::vector<CompiledFamily> list;
#define BS_FAMILY(name, passes, oldest, ...)                                      \
  [&]<DType... kTypes>(DTypes<kTypes...>) {                                       \
    (list.push_back({find_family(#name), kTypes, name::kernels<kTypes>()}), ...); \
  }(DTypes<__VA_ARGS__>());
#include "gemm/cuda/families.inc"
#undef BS_FAMILY
    return list;
  }();
  return all;
}

Result<const Family*> family_for(const CudaProblem& p, const cuda::Card& card) {
  const auto forced = forced_kernels();
  if (!forced.ok()) return forced.status();
  if (!forced->any()) return &choose_family(p, card);
  for (const Family& family : families()) {
    if (forced->has(family.name) && family.takes(p, card)) return &family;
  }
  return Status(StatusCode::unsupported,
                concat("[cuda] the kernel \"", forced->text(), "\", which was asked for, does not do this problem"));
}

Status prepare_all(const cuda::Card& card) {
  BS_RETURN_IF_ERROR(cuda::prepare_build_index());
  for (const CompiledFamily& compiled : compiled_families()) {
    if (compiled.family->runs(card)) BS_RETURN_IF_ERROR(compiled.kernels.prepare());
  }
  return {};
}

// `device` must be the current device and `card` its card.
Status prepare_once(Device device, const cuda::Card& card) {
  static cuda::OncePerDevice once;
  return once(device, [&] { return prepare_all(card); });
}

// Calls launch_of(kernels, call) with the kernels of the family that does the problem.
template <class Launch>
Status run(const CudaProblem& problem, Device device, Workspace workspace, Stream stream, Launch launch_of) {
  const auto card = cuda::card_of(device);
  if (!card.ok()) return card.status();
  const auto family = family_for(problem, *card);
  if (!family.ok()) return family.status();
  const cuda::OnDevice on(device);
  BS_RETURN_IF_ERROR(on.status());
  BS_RETURN_IF_ERROR(prepare_once(device, *card));
  for (const CompiledFamily& compiled : compiled_families()) {
    if (compiled.family != *family || compiled.dtype != problem.dtype) continue;
    return launch_of(compiled.kernels, CudaCall{problem, *card, workspace, stream.handle});
  }
  return {StatusCode::unsupported,
          concat("[gemm] there is no CUDA kernel \"", (*family)->name, "\" for ", name_of(problem.dtype))};
}

// How many of a list's pairs one launch takes.
Result<size_t> pairs_of_launch(const WeightGradient& g, Math math) {
  if (g.pairs.size() < 2) return size_t{1};
  const auto forced = forced_kernels();
  if (!forced.ok()) return forced.status();
  if (forced->has("wgrad_wgmma") && g.dw_dtype == DType::f32) return size_t{wgrad_wgmma::kTermsOfLaunch};
  const auto known = cuda::card_of(g.layout.device);
  if (!known.ok()) return known.status();
  cuda::Card card = *known;
  if (forced->any()) card.sm90a = false;  // other families then take lists as on a card without wgrad_wgmma
  return static_cast<size_t>(pairs_at_once(problem_of(g, math), g.dw_dtype, card));
}

Result<std::string> name_of_choice(const CudaProblem& problem, Device device) {
  const auto card = cuda::card_of(device);
  if (!card.ok()) return card.status();
  const auto family = family_for(problem, *card);
  if (!family.ok()) return family.status();
  return std::string((*family)->name);
}

}  // namespace

Status cuda_product(const Product& p, Workspace workspace, Stream stream) {
  return run(problem_of(p, stream.math), p.layout.device, workspace, stream,
             [&](const FamilyKernels& kernels, const CudaCall& call) { return kernels.product(p, call); });
}

Status cuda_weight_gradient(const WeightGradient& g, Workspace workspace, Stream stream) {
  const auto at_once = pairs_of_launch(g, stream.math);
  if (!at_once.ok()) return at_once.status();
  WeightGradient part = g;
  // More pairs than a launch takes are summed in several launches. A dW narrower than f32 is rounded between them.
  for (size_t first = 0; first == 0 || first < g.pairs.size(); first += *at_once) {
    part.pairs = g.pairs.subspan(first, std::min(*at_once, g.pairs.size() - first));
    part.accumulate = g.accumulate || first > 0;
    BS_RETURN_IF_ERROR(
        run(problem_of(part, stream.math), g.layout.device, workspace, stream,
            [&](const FamilyKernels& kernels, const CudaCall& call) { return kernels.gradient(part, call); }));
  }
  return {};
}

size_t cuda_workspace_size(Pass pass, const LayoutView& layout, DType dtype, int64_t n) {
  const CudaProblem problem = cuda_problem(pass, layout, dtype, n);
  return kernels_are_forced() ? most_cuda_workspace_bytes(problem) : cuda_workspace_bytes(problem);
}

// f32 has no fused form: its products end in other kernels.
bool cuda_fuses_glu(const LayoutView& layout, DType dtype, int64_t) {
  return size_of(dtype) == 2 && layout.block_size >= 16;
}

size_t cuda_glu_workspace_size(const LayoutView& layout, DType dtype, int64_t n) {
  const CudaProblem problem = as_glu(cuda_problem(Pass::fprop, layout, dtype, n));
  return kernels_are_forced() ? most_cuda_workspace_bytes(problem) : cuda_workspace_bytes(problem);
}

Status prepare_cuda(Device device) {
  const auto card = cuda::card_of(device);
  if (!card.ok()) return card.status();
  const cuda::OnDevice on(device);
  BS_RETURN_IF_ERROR(on.status());
  return prepare_once(device, *card);
}

Result<std::string> cuda_choice(const Product& p, Math math) {
  return name_of_choice(problem_of(p, math), p.layout.device);
}

Result<std::string> cuda_choice(const WeightGradient& g, Math math) {
  const auto at_once = pairs_of_launch(g, math);
  if (!at_once.ok()) return at_once.status();
  WeightGradient first = g;
  first.pairs = g.pairs.first(std::min(*at_once, g.pairs.size()));
  return name_of_choice(problem_of(first, math), g.layout.device);
}

}  // namespace blocksparse::gemm
