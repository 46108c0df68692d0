// Drives the convolution's CUDA kernels: finds the card, chooses a way, prepares once, launches.
#include "ops/conv/cuda/driver.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "core/text.h"
#include "cuda/once.h"
#include "gemm/cuda/families.h"
#include "gemm/cuda/forced.h"
#include "ops/conv/cuda/order/copy.h"

namespace blocksparse::conv {

namespace {

const std::array<CudaKernels, 10>& all_kernels() {
  static const std::array<CudaKernels, 10> kernels = {
      cuda_generic_f32(), cuda_generic_f64(), cuda_generic_bf16(), cuda_generic_f16(),     cuda_gather_bf16(),
      cuda_gather_f16(),  cuda_halo_bf16(),   cuda_halo_f16(),     cuda_halo_block_bf16(), cuda_halo_block_f16()};
  return kernels;
}

bool runs(CudaWay way, const cuda::Card& card) {
  const bool copies = way == CudaWay::gather || way == CudaWay::halo || way == CudaWay::halo_block;
  return !copies || copies_boxes(card);
}

Status prepare_all(const cuda::Card& card) {
  for (const CudaKernels& kernels : all_kernels()) {
    if (runs(kernels.way, card)) BS_RETURN_IF_ERROR(kernels.prepare());
  }
  return prepare_order();
}

// Prepares `device`, which is the current device; `card` describes it.
Status prepare_once(Device device, const cuda::Card& card) {
  static cuda::OncePerDevice once;
  return once(device, [&] { return prepare_all(card); });
}

// Kernels count the pixels of an image in 31 bits.
Status check_pixels(const Images& x, const Images& y) {
  constexpr int64_t kMost = (int64_t{1} << 31) - 1;
  const int64_t pixels = std::max(x.pixels(), y.pixels());
  if (pixels <= kMost) return {};
  return {StatusCode::unsupported, concat("[conv] an image of ", pixels, " pixels on a card, needs at most ", kMost)};
}

// The way for a problem. If kernels were asked for by name, it must be one of them; a family of the engine means a
// pointwise convolution.
template <class Problem>
Result<CudaWay> way_for(const Problem& p, const cuda::Card& card) {
  const auto forced = gemm::forced_kernels();
  if (!forced.ok()) return forced.status();
  if (!forced->any()) return choose_cuda_way(p, card);
  for (CudaWay way : {CudaWay::generic, CudaWay::halo_block, CudaWay::halo, CudaWay::gather}) {
    if (forced->has(name_of(way)) && cuda_supports(way, p, card)) return way;
  }
  for (const gemm::Family& family : gemm::families()) {
    if (forced->has(family.name) && cuda_supports(CudaWay::pointwise, p, card)) return CudaWay::pointwise;
  }
  return Status(StatusCode::unsupported, concat("[cuda] the kernel \"", forced->text(),
                                                "\", which was asked for, does not do this convolution"));
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

Status run(CudaWay way, const Product& p, const CudaCall& call, Stream stream) {
  if (way == CudaWay::pointwise) return gemm::cuda_product(as_product(p), call.workspace, stream);
  return launch(way, p.dtype, p.layout.device, call.card,
                [&](const CudaKernels& kernels) { return kernels.product(p, call); });
}

Status run(CudaWay way, const WeightGradient& g, const CudaCall& call, Stream stream) {
  if (way == CudaWay::pointwise) {
    const int64_t n = g.rows.n * g.rows.pixels();
    const auto tensor = [&](const Images& a) { return ConstTensor(a.data, g.dtype, {n, a.channels}, g.layout.device); };
    const GradPair pair{tensor(g.columns), tensor(g.rows)};
    const gemm::WeightGradient plain{.dtype = g.dtype,
                                     .dw_dtype = g.dw_dtype,
                                     .layout = g.layout,
                                     .pairs = {&pair, 1},
                                     .w = g.w,
                                     .gates = g.gates,
                                     .dw = g.dw,
                                     .dgates = g.dgates,
                                     .accumulate = g.accumulate};
    return gemm::cuda_weight_gradient(plain, call.workspace, stream);
  }
  return launch(way, g.dtype, g.layout.device, call.card,
                [&](const CudaKernels& kernels) { return kernels.gradient(g, call); });
}

// The workspace that lies behind a slice's copy, for the way's own kernels.
CudaCall behind_copy(const CudaCall& call, const OrderPlan& plan) {
  return {call.card,
          {static_cast<char*>(call.workspace.data) + plan.rest, call.workspace.bytes - static_cast<size_t>(plan.rest)},
          call.stream};
}

// x is copied in front of its slice. If y has the order, the slice writes a copy, which is brought to y behind it.
Status run_ordered(CudaWay way, const Product& p, const CudaCall& call, Stream stream) {
  const OrderPlan plan = plan_order(p);
  const bool reads = p.x_channels != nullptr;
  const OrderedImages ordered = ordered_images(p);
  for (int64_t i = 0; i < plan.slices; ++i) {
    const Product slice = ordered_slice(p, plan, i, call.workspace.data);
    const Images theirs = slice_of(ordered.images, p.dtype, plan, i);
    if (reads) BS_RETURN_IF_ERROR(copy_channels({theirs, slice.x, ordered.order, false}, call));
    BS_RETURN_IF_ERROR(run(way, slice, behind_copy(call, plan), stream));
    if (!reads) BS_RETURN_IF_ERROR(copy_channels({slice.y, theirs, ordered.order, true}, call));
  }
  return {};
}

Status run_ordered(CudaWay way, const WeightGradient& g, const CudaCall& call, Stream stream) {
  const OrderPlan plan = plan_order(g);
  const OrderedImages ordered = ordered_images(g);
  const bool by_rows = g.row_channels != nullptr, sums = sums_in_workspace(g, plan);
  const int64_t block = g.layout.block_size, count = g.layout.blocks * g.gather.taps() * block * block;
  auto* summed = reinterpret_cast<float*>(static_cast<char*>(call.workspace.data) + plan.sums);
  if (sums && g.accumulate) BS_RETURN_IF_ERROR(widen_sums(g.dw, g.dw_dtype, count, summed, call));
  for (int64_t i = 0; i < plan.slices; ++i) {
    const WeightGradient slice = ordered_slice(g, plan, i, call.workspace.data);
    const Images theirs = slice_of(ordered.images, g.dtype, plan, i);
    BS_RETURN_IF_ERROR(copy_channels({theirs, by_rows ? slice.rows : slice.columns, ordered.order, false}, call));
    BS_RETURN_IF_ERROR(run(way, slice, behind_copy(call, plan), stream));
  }
  return sums ? narrow_sums(summed, count, g.dw, g.dw_dtype, call) : Status();
}

template <class Problem>
Status run_on_card(const Problem& p, Workspace workspace, Stream stream) {
  const auto card = cuda::card_of(p.layout.device);
  if (!card.ok()) return card.status();
  const auto way = way_for(p, *card);
  if (!way.ok()) return way.status();
  const CudaCall call{*card, workspace, stream.handle};
  if (!has_order(p) || *way == CudaWay::generic) return run(*way, p, call, stream);
  const cuda::OnDevice on(p.layout.device);
  BS_RETURN_IF_ERROR(on.status());
  BS_RETURN_IF_ERROR(prepare_once(p.layout.device, *card));
  return run_ordered(*way, p, call, stream);
}

}  // namespace

Status cuda_product(const Product& p, Workspace workspace, Stream stream) {
  BS_RETURN_IF_ERROR(check_pixels(p.x, p.y));
  return run_on_card(p, workspace, stream);
}

Status cuda_weight_gradient(const WeightGradient& g, Workspace workspace, Stream stream) {
  BS_RETURN_IF_ERROR(check_pixels(g.rows, g.columns));
  return run_on_card(g, workspace, stream);
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
