// Drives the CUDA kernels: finds the card, chooses, prepares once, launches.
#include "gemm/cuda/driver.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <vector>

#include "blocksparse/blocksparse.h"
#include "core/text.h"
#include "cuda/build_index.h"
#include "cuda/once.h"
#include "gemm/cuda/forced.h"
#include "gemm/cuda/wgmma/plan.h"

namespace blocksparse {

namespace gemm {

namespace {

// Either kind of kernel of kernels.inc.
template <class Kernel>
std::span<const Kernel> kernels_of();

template <>
std::span<const CudaProductKernel> kernels_of() {
  static const std::vector<CudaProductKernel> kernels = {
#define LINEAR_CUDA_PRODUCT(kernel, dtype) cuda_product_##kernel##_##dtype(),
#define LINEAR_CUDA_GRADIENT(...)
#include "gemm/cuda/kernels.inc"
#undef LINEAR_CUDA_PRODUCT
#undef LINEAR_CUDA_GRADIENT
  };
  return kernels;
}

template <>
std::span<const CudaGradientKernel> kernels_of() {
  static const std::vector<CudaGradientKernel> kernels = {
#define LINEAR_CUDA_PRODUCT(...)
#define LINEAR_CUDA_GRADIENT(kernel, dtype) cuda_gradient_##kernel##_##dtype(),
#include "gemm/cuda/kernels.inc"
#undef LINEAR_CUDA_PRODUCT
#undef LINEAR_CUDA_GRADIENT
  };
  return kernels;
}

// ---- Forcing a kernel -----------------------------------------------------------------------------------------------

constexpr int32_t kNotForced = -1;
constexpr int32_t kHalo = -2;  // which convolutions alone have
constexpr std::string_view kHaloName = "halo";
std::atomic<int32_t> forced{kNotForced};

Result<int32_t> named_kernel(std::string_view name) {
  if (name.empty()) return kNotForced;
  if (name == kHaloName) return kHalo;
  if (const auto kernel = parse_cuda_kernel(name)) return static_cast<int32_t>(*kernel);
  std::string known(kHaloName);
  for (CudaKernel kernel : kAllCudaKernels) known += concat(", ", name_of(kernel));
  return invalid("[cuda] there is no kernel \"", name, "\"; there are ", known);
}

// Or kNotForced.
Result<int32_t> forced_kernel() {
  static const Result<int32_t> from_environment = [] {
    const char* name = std::getenv("BLOCKSPARSE_CUDA_KERNEL");
    return named_kernel(name == nullptr ? "" : name);
  }();
  const int32_t asked = forced.load(std::memory_order_relaxed);
  if (asked != kNotForced) return asked;
  return from_environment;
}

Result<CudaKernel> kernel_for(const CudaProblem& p, const cuda::Card& card) {
  const auto choice = forced_kernel();
  if (!choice.ok()) return choice.status();
  if (*choice == kNotForced) return choose_cuda_kernel(p, card);
  if (*choice == kHalo) return Status(StatusCode::unsupported, "[cuda] the kernel \"halo\" is of convolutions alone");
  const auto kernel = static_cast<CudaKernel>(*choice);
  if (cuda_supports(kernel, p, card)) return kernel;
  return Status(StatusCode::unsupported,
                concat("[cuda] the kernel \"", name_of(kernel), "\", which was asked for, does not do this problem"));
}

// ---- Once for each device -------------------------------------------------------------------------------------------

template <class Kernel>
Status prepare_those_of(const cuda::Card& card) {
  for (const Kernel& kernel : kernels_of<Kernel>()) {
    if (cuda_runs(kernel.kernel, card)) BS_RETURN_IF_ERROR(kernel.prepare());
  }
  return {};
}

Status prepare_all(const cuda::Card& card) {
  BS_RETURN_IF_ERROR(cuda::prepare_build_index());
  BS_RETURN_IF_ERROR(prepare_those_of<CudaProductKernel>(card));
  return prepare_those_of<CudaGradientKernel>(card);
}

// Of the current device, which is `device`, a card like that.
Status prepare_once(Device device, const cuda::Card& card) {
  static cuda::OncePerDevice once;
  return once(device, [&] { return prepare_all(card); });
}

template <class Kernel, class Task>
Status run(const Task& task, const CudaProblem& problem, Device device, Workspace workspace, Stream stream) {
  const auto card = cuda::card_of(device);
  if (!card.ok()) return card.status();
  const auto choice = kernel_for(problem, *card);
  if (!choice.ok()) return choice.status();
  const cuda::OnDevice on(device);
  BS_RETURN_IF_ERROR(on.status());
  BS_RETURN_IF_ERROR(prepare_once(device, *card));
  for (const Kernel& kernel : kernels_of<Kernel>()) {
    if (kernel.kernel != *choice || kernel.dtype != task.dtype) continue;
    return kernel.launch(task, {problem, *card, workspace, stream.handle});
  }
  return {StatusCode::unsupported,
          concat("[linear] there is no CUDA kernel \"", name_of(*choice), "\" for ", name_of(task.dtype))};
}

}  // namespace

DeviceWalk walk_on_device(const LayoutView& layout, bool by_in) {
  const int64_t b = layout.block_size;
  const IndexSections s =
      index_sections((layout.out_features + b - 1) / b, (layout.in_features + b - 1) / b, layout.blocks);
  const auto& at = by_in ? s.by_in : s.by_out;
  const int32_t* index = layout.index;
  const size_t counts = by_in ? offsetof(Header, by_in) : offsetof(Header, by_out);
  return {.counts = index + counts / sizeof(int32_t),
          .starts = index + at.starts,
          .refs = reinterpret_cast<const BlockRef*>(index + at.refs),
          .pieces = reinterpret_cast<const Piece*>(index + at.pieces),
          .splits = reinterpret_cast<const Split*>(index + at.splits),
          .order = index + at.order};
}

const int32_t* out_of_on_device(const LayoutView& layout) {
  const int64_t b = layout.block_size;
  return layout.index +
         index_sections((layout.out_features + b - 1) / b, (layout.in_features + b - 1) / b, layout.blocks).out_of;
}

Status cuda_product(const Product& p, Workspace workspace, Stream stream) {
  return run<CudaProductKernel>(p, problem_of(p, stream.math), p.layout.device, workspace, stream);
}

namespace {

// How many of a list's pairs a launch is given.
Result<size_t> pairs_of_launch(const WeightGradient& g, Math math) {
  if (g.pairs.size() < 2) return size_t{1};
  const auto forced = forced_cuda_kernel();
  if (!forced.ok()) return forced.status();
  if (*forced == CudaKernel::many && g.dw_dtype == DType::f32) return size_t{kMostManyTerms};
  const auto known = cuda::card_of(g.layout.device);
  if (!known.ok()) return known.status();
  cuda::Card card = *known;
  if (forced->has_value()) card.sm90a = false;  // another kernel gets lists as on a card without `many`
  return static_cast<size_t>(pairs_at_once(problem_of(g, math), g.dw_dtype, card));
}

}  // namespace

Status cuda_weight_gradient(const WeightGradient& g, Workspace workspace, Stream stream) {
  const auto at_once = pairs_of_launch(g, stream.math);
  if (!at_once.ok()) return at_once.status();
  WeightGradient part = g;
  // More pairs than a launch takes are summed in several: a dW narrower than f32 is rounded between.
  for (size_t first = 0; first == 0 || first < g.pairs.size(); first += *at_once) {
    part.pairs = g.pairs.subspan(first, std::min(*at_once, g.pairs.size() - first));
    part.accumulate = g.accumulate || first > 0;
    BS_RETURN_IF_ERROR(
        run<CudaGradientKernel>(part, problem_of(part, stream.math), g.layout.device, workspace, stream));
  }
  return {};
}

size_t cuda_workspace_size(Pass pass, const LayoutView& layout, DType dtype, int64_t n) {
  const CudaProblem problem = cuda_problem(pass, layout, dtype, n);
  return cuda_kernel_is_forced() ? most_cuda_workspace_bytes(problem) : cuda_workspace_bytes(problem);
}

Status prepare_cuda(Device device) {
  const auto card = cuda::card_of(device);
  if (!card.ok()) return card.status();
  const cuda::OnDevice on(device);
  BS_RETURN_IF_ERROR(on.status());
  return prepare_once(device, *card);
}

Result<std::optional<CudaKernel>> forced_cuda_kernel() {
  const auto choice = forced_kernel();
  if (!choice.ok()) return choice.status();
  if (*choice == kNotForced || *choice == kHalo) return std::optional<CudaKernel>();
  return std::optional(static_cast<CudaKernel>(*choice));
}

bool cuda_kernel_is_forced() {
  const auto choice = forced_kernel();
  return choice.ok() && *choice != kNotForced;
}

bool halo_is_forced() {
  const auto choice = forced_kernel();
  return choice.ok() && *choice == kHalo;
}

namespace {

Result<std::string> name_of_choice(const CudaProblem& problem, Device device) {
  const auto card = cuda::card_of(device);
  if (!card.ok()) return card.status();
  const auto kernel = kernel_for(problem, *card);
  if (!kernel.ok()) return kernel.status();
  return std::string(name_of(*kernel));
}

}  // namespace

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

}  // namespace gemm

std::vector<std::string> cuda_kernels() {
  std::vector<std::string> names{std::string(gemm::kHaloName)};
  for (auto kernel = gemm::kAllCudaKernels.rbegin(); kernel != gemm::kAllCudaKernels.rend(); ++kernel) {
    names.emplace_back(name_of(*kernel));
  }
  return names;
}

Status set_cuda_kernel(std::string_view name) {
  const auto kernel = gemm::named_kernel(name);
  if (!kernel.ok()) return kernel.status();
  gemm::forced = *kernel;
  return {};
}

}  // namespace blocksparse
