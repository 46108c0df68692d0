#include "ops/conv/cuda/select.h"

#include <algorithm>
#include <vector>

#include "core/ceil_div.h"
#include "core/places.h"
#include "gemm/cuda/wgmma/plan.h"
#include "gemm/cuda/wgrad_wgmma/plan.h"
#include "ops/conv/cuda/gather/phases.h"
#include "ops/conv/cuda/halo/plan.h"
#include "ops/conv/cuda/halo_block/plan.h"
#include "ops/conv/cuda/order/plan.h"

namespace blocksparse::conv {

namespace {

constexpr int64_t kMost = int64_t{1} << 31;
constexpr int64_t kMostFilled = int64_t{48} << 20;  // bytes of a W that may be filled up, as if it were dense
constexpr int64_t kMostPhases = 64;

bool is_16_bits(DType dtype) { return dtype == DType::bf16 || dtype == DType::f16; }
bool aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

// Whether the hardware can copy boxes of x, which is gathered, and y, which is not.
bool fits_boxes(DType dtype, int32_t block, const Images& x, const Images& y, const Gather& gather) {
  if (!is_16_bits(dtype) || !x.channels_last || x.channels % block != 0 || y.channels % 8 != 0) return false;
  if (x.channels == 0 || y.channels == 0 || x.pixels() == 0 || y.n * y.pixels() >= kMost) return false;
  if (!aligned(x.data) || !aligned(y.data)) return false;
  for (int64_t i = 0; i < phase_count(gather); ++i) {
    if (!can_walk(phase_of(gather, x, y, block, i))) return false;
  }
  return true;
}

gemm::CudaProblem problem_of(Pass pass, DType dtype, const LayoutView& layout, int64_t taps) {
  gemm::CudaProblem p;
  p.pass = pass;
  p.dtype = dtype;
  p.block = layout.block_size;
  p.blocks = layout.blocks * taps;
  return p;
}

}  // namespace

bool copies_boxes(const cuda::Card& card) { return gemm::find_family("wgmma")->runs(card); }

std::string_view name_of(CudaWay way) {
  switch (way) {
    case CudaWay::generic: return "generic";
    case CudaWay::gather: return "gather";
    case CudaWay::halo: return "halo";
    case CudaWay::halo_block: return "halo_block";
    case CudaWay::pointwise: break;
  }
  return "pointwise";
}

int64_t inputs_of_tap(int64_t channels, int32_t block) {
  return round_up(channels, std::max(gemm::wgmma::kChunk, block));
}

gemm::CudaProblem gathered_problem(const Product& p) {
  auto problem = problem_of(p.by_in ? Pass::dgrad : Pass::fprop, p.dtype, p.layout, p.gather.taps());
  problem.n = p.y.n * p.y.pixels();
  problem.inputs = p.gather.taps() * inputs_of_tap(p.x.channels, p.layout.block_size);
  problem.outputs = p.y.channels;
  // It counts all taps, so that phases, which have some of the taps, choose as the workspace was made for.
  problem.may_fill = problem.inputs * problem.outputs * 2 < kMostFilled;
  problem.by_in = p.by_in;
  problem.w_aligned = aligned(p.w);
  problem.gated = p.gates != nullptr;
  return problem;
}

gemm::CudaProblem gathered_problem(const WeightGradient& g) {
  auto problem = problem_of(Pass::wgrad, g.dtype, g.layout, g.gather.taps());
  problem.n = g.rows.n * g.rows.pixels();
  problem.inputs = g.gather.taps() * inputs_of_tap(g.columns.channels, g.layout.block_size);
  problem.outputs = g.rows.channels;
  problem.w_aligned = reinterpret_cast<uintptr_t>(g.dw) % static_cast<size_t>(2 * size_of(g.dw_dtype)) == 0;
  problem.gated = g.dgates != nullptr;
  return problem;
}

int32_t generic_slices(const WeightGradient& g) {
  constexpr int64_t kThreadBlocks = 1024, kLeastPixels = 512, kMostBytes = int64_t{32} << 20;
  const int64_t block = g.layout.block_size, taps = g.gather.taps(), pixels = g.plain().n * g.plain().pixels();
  const int64_t run = std::max<int64_t>(1, kGenericRows / block), quarters = block > kGenericRows ? 4 : 1;
  const int64_t there = std::max<int64_t>(1, ceil_div(g.layout.blocks, run) * taps * quarters);
  const int64_t bytes = std::max<int64_t>(1, g.layout.blocks * taps * block * block * (g.dtype == DType::f64 ? 8 : 4));
  const int64_t slices = std::min({kThreadBlocks / there, pixels / kLeastPixels, kMostBytes / bytes});
  return g.dgates == nullptr ? static_cast<int32_t>(std::max<int64_t>(1, slices)) : 1;
}

int64_t generic_workspace(const WeightGradient& g) {
  const int64_t slices = generic_slices(g), block = g.layout.block_size;
  if (slices == 1) return 0;
  return slices * g.layout.blocks * g.gather.taps() * block * block * (g.dtype == DType::f64 ? 8 : 4);
}

TapPlaces tap_places(int64_t rows, int64_t blocks, int64_t taps) {
  TapPlaces at{};
  Places places;
  at.starts = places.next((rows + 1) * 4);
  at.refs = places.next(blocks * taps * 8);
  at.gates = places.next(blocks * taps * 4);
  at.end = places.end;
  return at;
}

gemm::Activations as_tokens(const Images& a) {
  if (a.data == nullptr && a.n == 0) return {};
  return {a.data, a.n * a.pixels(), a.channels, a.channels, 1};
}

gemm::Product as_product(const Product& p) {
  return {.dtype = p.dtype,
          .layout = p.layout,
          .by_in = p.by_in,
          .x = as_tokens(p.x),
          .y = as_tokens(p.y),
          .residual = as_tokens(p.residual),
          .w = p.w,
          .gates = p.gates,
          .bias = p.bias,
          .activation = p.activation};
}

namespace {

bool is_pointwise(const Product& p) { return is_in_place(p.gather, p.x, p.y) && p.x.channels_last && !has_order(p); }

bool is_pointwise(const WeightGradient& g) {
  return is_in_place(g.gather, g.rows, g.columns) && g.rows.channels_last && !has_order(g);
}

int64_t gather_workspace(const Product& p) {
  const auto problem = gathered_problem(p);
  const int64_t rows = problem.output_blocks();
  return tap_places(rows, p.layout.blocks, p.gather.taps()).end +
         gemm::wgmma::workspace_places(gemm::wgmma::plan_of(problem), problem.block).end;
}

int64_t gather_workspace(const WeightGradient& g) {
  const auto problem = gathered_problem(g);
  const int64_t rows = problem.output_blocks();
  return tap_places(rows, g.layout.blocks, g.gather.taps()).end +
         gemm::wgrad_wgmma::workspace_places(problem, gemm::wgrad_wgmma::form_of(problem)).end;
}

// A residual is read at the pixels of y in turn, but an inverse gather of stride 2 writes only every other pixel.
bool could_be_gather(const Product& p) {
  return (phase_count(p.gather) == 1 || p.residual.data == nullptr) && phase_count(p.gather) <= kMostPhases &&
         !has_order(p) && fits_boxes(p.dtype, p.layout.block_size, p.x, p.y, p.gather) &&
         gemm::wgmma::supports(gathered_problem(p)) && gather_workspace(p) < kMostConvWorkspace;
}

// If rows are gathered, x and dy would have to change roles: the generic kernel does that.
bool could_be_gather(const WeightGradient& g) {
  return !has_order(g) && !g.gathers_rows && fits_boxes(g.dtype, g.layout.block_size, g.columns, g.rows, g.gather) &&
         gemm::wgrad_wgmma::supports(gathered_problem(g)) && gather_workspace(g) < kMostConvWorkspace;
}

bool could_be_halo(const Product& p) {
  return !has_order(p) && p.y.n * p.y.pixels() >= gemm::wgmma::kLeastTokens &&
         fits_boxes(p.dtype, p.layout.block_size, p.x, p.y, p.gather) && plan_halo_product(p);
}

bool could_be_halo(const WeightGradient& g) {
  return !has_order(g) && !g.gathers_rows && g.rows.n * g.rows.pixels() >= gemm::wgmma::kLeastTokens &&
         fits_boxes(g.dtype, g.layout.block_size, g.columns, g.rows, g.gather) && plan_halo_gradient(g);
}

bool could_be_halo_block(const Product&, const cuda::Card&) { return false; }

bool could_be_halo_block(const WeightGradient& g, const cuda::Card& card) {
  return !has_order(g) && !g.gathers_rows && g.rows.n * g.rows.pixels() >= gemm::wgmma::kLeastTokens &&
         fits_boxes(g.dtype, g.layout.block_size, g.columns, g.rows, g.gather) &&
         plan_halo_block(g, card.multiprocessors);
}

template <class Problem>
bool supports(CudaWay way, const Problem& p, const cuda::Card& card) {
  switch (way) {
    case CudaWay::generic: return true;
    case CudaWay::gather: return copies_boxes(card) && could_be_gather(p);
    case CudaWay::halo: return copies_boxes(card) && could_be_halo(p);
    case CudaWay::halo_block: return copies_boxes(card) && could_be_halo_block(p, card);
    case CudaWay::pointwise: break;
  }
  return is_pointwise(p);
}

// What a way other than `generic` does: the problem itself; or with an order of channels its slices without one, the
// first and the last, which have the two sizes. Empty if the images cannot be copied.
template <class Problem>
std::vector<Problem> parts_of(const Problem& p) {
  if (!has_order(p)) return {p};
  const OrderPlan plan = plan_order(p);
  if (plan.slices == 0 || !aligned(ordered_images(p).images.data)) return {};
  std::vector<Problem> parts = {ordered_slice(p, plan, 0, nullptr)};
  if (plan.slices > 1) parts.push_back(ordered_slice(p, plan, plan.slices - 1, nullptr));
  return parts;
}

template <class Problem>
bool supports_all(CudaWay way, const std::vector<Problem>& parts, const cuda::Card& card) {
  return !parts.empty() &&
         std::all_of(parts.begin(), parts.end(), [&](const Problem& part) { return supports(way, part, card); });
}

// wgrad of 3 x 3 taps by `halo` takes half of the time of `gather`, at any density (256 channels, 28 x 28).
bool pays(CudaWay way, const Product& p, const cuda::Card&) {
  return way != CudaWay::halo || (!is_pointwise(p) && halo_pays(p));
}
bool pays(CudaWay way, const WeightGradient& g, const cuda::Card& card) {
  if (way == CudaWay::halo_block) return halo_block_pays(g, card.multiprocessors);
  return way != CudaWay::halo || halo_pays(g);
}

template <class Problem>
CudaWay choose(const Problem& p, const cuda::Card& card) {
  const std::vector<Problem> parts = parts_of(p);
  for (CudaWay way : {CudaWay::halo_block, CudaWay::halo, CudaWay::pointwise, CudaWay::gather}) {
    if (supports_all(way, parts, card) && pays(way, parts.front(), card)) return way;
  }
  return CudaWay::generic;
}

}  // namespace

bool cuda_supports(CudaWay way, const Product& p, const cuda::Card& card) {
  return way == CudaWay::generic || supports_all(way, parts_of(p), card);
}
bool cuda_supports(CudaWay way, const WeightGradient& g, const cuda::Card& card) {
  return way == CudaWay::generic || supports_all(way, parts_of(g), card);
}
CudaWay choose_cuda_way(const Product& p, const cuda::Card& card) { return choose(p, card); }
CudaWay choose_cuda_way(const WeightGradient& g, const cuda::Card& card) { return choose(g, card); }
bool has_fast_way(const Product& p) { return is_pointwise(p) || could_be_halo(p) || could_be_gather(p); }
bool has_fast_way(const WeightGradient& g) { return is_pointwise(g) || could_be_halo(g) || could_be_gather(g); }

size_t cuda_workspace_bytes(const Product& p) {
  if (has_order(p)) return static_cast<size_t>(plan_order(p).end);
  int64_t bytes = could_be_gather(p) ? gather_workspace(p) : 0;
  if (is_pointwise(p)) {
    LayoutView plain = p.layout;
    plain.transposed = false;
    const auto problem = gemm::cuda_problem(p.by_in ? Pass::dgrad : Pass::fprop, plain, p.dtype, p.y.n * p.y.pixels());
    bytes = std::max(bytes, static_cast<int64_t>(gemm::most_cuda_workspace_bytes(problem)));
  }
  return static_cast<size_t>(bytes);
}

size_t cuda_workspace_bytes(const WeightGradient& g) {
  if (has_order(g)) return static_cast<size_t>(std::max(generic_workspace(g), plan_order(g).end));
  int64_t bytes = std::max(generic_workspace(g), could_be_gather(g) ? gather_workspace(g) : 0);
  if (could_be_halo(g)) bytes = std::max(bytes, halo_gradient_places(g.gather.taps()).end);
  if (is_pointwise(g)) {
    const auto problem = gemm::cuda_problem(Pass::wgrad, g.layout, g.dtype, g.rows.n * g.rows.pixels());
    bytes = std::max(bytes, static_cast<int64_t>(gemm::most_cuda_workspace_bytes(problem)));
  }
  return static_cast<size_t>(bytes);
}

}  // namespace blocksparse::conv
