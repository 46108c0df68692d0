// Drives the convolution's CUDA kernels: finds the card, chooses, prepares once, launches.
#include "ops/conv/cuda.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "core/text.h"
#include "cuda/once.h"
#include "ops/linear/forced.h"

namespace blocksparse::conv {

namespace {

const std::array<CudaKernels, 8>& all_kernels() {
  static const std::array<CudaKernels, 8> kernels = {cuda_generic_f32(), cuda_generic_f64(), cuda_generic_bf16(),
                                                     cuda_generic_f16(), cuda_many_bf16(),   cuda_many_f16(),
                                                     cuda_halo_bf16(),   cuda_halo_f16()};
  return kernels;
}

bool runs(CudaWay way, const cuda::Card& card) {
  const bool copies = way == CudaWay::many || way == CudaWay::halo;
  return !copies || linear::cuda_runs(linear::CudaKernel::many, card);
}

Status prepare_all(const cuda::Card& card) {
  for (const CudaKernels& kernels : all_kernels()) {
    if (runs(kernels.way, card)) BS_RETURN_IF_ERROR(kernels.prepare());
  }
  return {};
}

// Of the current device, which is `device`, a card like that.
Status prepare_once(Device device, const cuda::Card& card) {
  static cuda::OncePerDevice once;
  return once(device, [&] { return prepare_all(card); });
}

// Pixels of an image are counted in 31 bits.
Status check_pixels(const Images& x, const Images& y) {
  constexpr int64_t kMost = (int64_t{1} << 31) - 1;
  const int64_t pixels = std::max(x.pixels(), y.pixels());
  if (pixels <= kMost) return {};
  return {StatusCode::unsupported, concat("[conv] an image of ", pixels, " pixels on a card, needs at most ", kMost)};
}

// "halo", and "generic" and "many" as of the linear op, can be asked for; a convolution of one tap in place is then
// none of it.
template <class Problem>
Result<CudaWay> way_for(const Problem& p, const cuda::Card& card) {
  const auto forced = linear::forced_cuda_kernel();
  if (!forced.ok()) return forced.status();
  std::string_view name;
  if (linear::halo_is_forced()) {
    if (cuda_supports(CudaWay::halo, p, card)) return CudaWay::halo;
    name = name_of(CudaWay::halo);
  } else {
    if (!forced->has_value()) return choose_cuda_way(p, card);
    if (**forced == linear::CudaKernel::generic) return CudaWay::generic;
    if (**forced == linear::CudaKernel::many && cuda_supports(CudaWay::many, p, card)) return CudaWay::many;
    if (cuda_supports(CudaWay::linear, p, card)) return CudaWay::linear;
    name = linear::name_of(**forced);
  }
  return Status(StatusCode::unsupported,
                concat("[cuda] the kernel \"", name, "\", which was asked for, does not do this convolution"));
}

template <class Problem>
Result<std::string> choice_of(const Problem& p) {
  const auto card = cuda::card_of(p.layout.device);
  if (!card.ok()) return card.status();
  const auto way = way_for(p, *card);
  if (!way.ok()) return way.status();
  return std::string(name_of(*way));
}

template <class Launch>
Status launch(CudaWay way, DType dtype, Device device, const cuda::Card& card, Launch launch_of) {
  const cuda::OnDevice on(device);
  BS_RETURN_IF_ERROR(on.status());
  BS_RETURN_IF_ERROR(prepare_once(device, card));
  for (const CudaKernels& kernels : all_kernels()) {
    if (kernels.way == way && kernels.dtype == dtype) return launch_of(kernels);
  }
  return {StatusCode::unsupported, concat("[conv] there is no CUDA kernel for ", name_of(dtype))};
}

}  // namespace

Status cuda_product(const Product& p, Workspace workspace, Stream stream) {
  BS_RETURN_IF_ERROR(check_pixels(p.x, p.y));
  const auto card = cuda::card_of(p.layout.device);
  if (!card.ok()) return card.status();
  const auto way = way_for(p, *card);
  if (!way.ok()) return way.status();
  if (*way == CudaWay::linear) return linear::cuda_product(as_linear(p), workspace, stream);
  return launch(*way, p.dtype, p.layout.device, *card,
                [&](const CudaKernels& kernels) { return kernels.product(p, {*card, workspace, stream.handle}); });
}

Status cuda_weight_gradient(const WeightGradient& g, Workspace workspace, Stream stream) {
  BS_RETURN_IF_ERROR(check_pixels(g.rows, g.columns));
  const auto card = cuda::card_of(g.layout.device);
  if (!card.ok()) return card.status();
  const auto way = way_for(g, *card);
  if (!way.ok()) return way.status();
  if (*way == CudaWay::linear) {
    const int64_t n = g.rows.n * g.rows.pixels();
    const auto tensor = [&](const Images& a) { return ConstTensor(a.data, g.dtype, {n, a.channels}, g.layout.device); };
    const GradPair pair{tensor(g.columns), tensor(g.rows)};
    const linear::WeightGradient plain{.dtype = g.dtype,
                                       .dw_dtype = g.dw_dtype,
                                       .layout = g.layout,
                                       .pairs = {&pair, 1},
                                       .w = g.w,
                                       .gates = g.gates,
                                       .dw = g.dw,
                                       .dgates = g.dgates,
                                       .accumulate = g.accumulate};
    return linear::cuda_weight_gradient(plain, workspace, stream);
  }
  return launch(*way, g.dtype, g.layout.device, *card,
                [&](const CudaKernels& kernels) { return kernels.gradient(g, {*card, workspace, stream.handle}); });
}

Result<std::string> cuda_choice(const Product& p) { return choice_of(p); }
Result<std::string> cuda_choice(const WeightGradient& g) { return choice_of(g); }

size_t cuda_workspace_size(const Product& p) { return cuda_workspace_bytes(p); }
size_t cuda_workspace_size(const WeightGradient& g) { return cuda_workspace_bytes(g); }

Status prepare_cuda(Device device) {
  const auto card = cuda::card_of(device);
  if (!card.ok()) return card.status();
  const cuda::OnDevice on(device);
  BS_RETURN_IF_ERROR(on.status());
  return prepare_once(device, *card);
}

}  // namespace blocksparse::conv
