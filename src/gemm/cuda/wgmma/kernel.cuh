// y = f(x W^T + bias + residual) for many tokens, and dgrad likewise: Hopper's tensor cores fed by copies of whole
// boxes.
//   x [n, inputs]   w [blocks, b, b]   y [n, outputs]   16-bit elements, sums in f32
// Who does what
//   tables    a small kernel before lists, for each tile of outputs, the chunks of 64 inputs in which it has blocks
//   grid      one thread block an SM, which takes tiles of outputs x tokens, longest first, until none are left
//   load      a warpgroup of feeders keeps a ring of stages full: x once for all outputs of the tile, and the blocks
//   compute   wgmma by 2 or 4 warpgroups, y in registers: see weights.cuh and tokens.cuh
//   finish    through shared memory, while the feeders are at the next tile
#pragma once

#include "core/ceil_div.h"
#include "cuda/launch.h"
#include "cuda/ptx/griddepcontrol.h"
#include "gemm/cuda/wgmma/absent.cuh"
#include "gemm/cuda/wgmma/tokens.cuh"
#include "gemm/cuda/wgmma/weights.cuh"

namespace blocksparse::gemm::wgmma {
namespace {

// Plain: y is features-last, stored in boxes, without an epilogue. Code for everything else in one kernel would take
// registers from the loop.
template <class K, bool Plain>
__global__ void __launch_bounds__(K::kThreads, 1)
    wgmma_product([[maybe_unused]] const __grid_constant__ typename K::Maps maps,
                  [[maybe_unused]] const __grid_constant__ Args p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char staged[];
  __shared__ Shared shared;
  const uint32_t stages = shared_address(staged) + K::kStagedBytes;
  const int group = static_cast<int>(threadIdx.x) / 128;
  start_ring(shared, K::kStages, K::kGroups * 4);
  ptx::griddepcontrol_wait();
  if (group == K::kGroups) {
    ptx::setmaxnreg_dec<K::kFeedRegisters>();
    const int warp = static_cast<int>(threadIdx.x) % 128 / 32;
    if (warp < kFeeders) Feeder<K>(shared, p, maps, stages, warp).run();
    else if (threadIdx.x % 32 == 0) hand_out_tiles(shared, p);
    return;
  }
  ptx::setmaxnreg_inc<K::kRegisters>();
  Consumer<K> consumer(shared, stages, group);
  consumer.begin();
  while (consumer.goes_on()) {
    typename K::Sums sums{};
    const int2 tile =
        consumer.tile([&](uint32_t stage) { K::multiply(sums, stage, consumer.mask(), consumer.before()); });
    if constexpr (K::kFills) note_not_finite(p.notes, static_cast<int>(ceil_div(p.outputs, 64)), tile, sums);
    K::template finish<Plain>(p, maps, sums, shared_address(staged), group, tile);
  }
  if (threadIdx.x % 128 == 0) ptx::bulk_wait_read<0>();
#endif
}

// Calls body.template operator()<K>() with the kernel type K.
template <class T, XOrder Order, class Body>
Status with_form(Kind kind, bool by_in, Body body) {
  switch (kind) {
    case Kind::direct:
      return by_in ? body.template operator()<WeightRows<T, Kind::direct, true, Order>>()
                   : body.template operator()<WeightRows<T, Kind::direct, false, Order>>();
    case Kind::filled: return body.template operator()<WeightRows<T, Kind::filled, false, Order>>();
    case Kind::patches32: return body.template operator()<TokenRows<T, Kind::patches32, Order>>();
    case Kind::patches16: break;
  }
  return body.template operator()<TokenRows<T, Kind::patches16, Order>>();
}

// With features-first x, results are features-first as well: there is no plain kernel for them.
template <class K>
auto kernel_of([[maybe_unused]] bool plain) {
  if constexpr (!K::x_first) {
    if (plain) return wgmma_product<K, true>;
  }
  return wgmma_product<K, false>;
}

// Tiles of tokens that are walked together. b = 128, 4096 x 4096, n = 4096, density .25: 59.8 us with 4, 55.9 with 8.
// NOTES.md has the other block sizes.
constexpr int64_t token_group(Kind kind) { return kind == Kind::direct ? 8 : 4; }

// What feeds the kernel besides the product itself.
struct Feed {
  DeviceWalk walk;
  const float* gates;
  Images images = {};
};

// Launches the repair of outputs that met zeros in place of blocks where x holds Inf or NaN.
template <class T, XOrder Order>
Status launch_repair(const Product& p, const Feed& feed, const CudaCall& call, const Args& args) {
  const auto launch_with = [&](const auto& x) {
    using X = std::remove_cvref_t<decltype(x)>;
    const Repair<X> repair{.x = x,
                           .walk = feed.walk,
                           .w = p.w,
                           .gates = feed.gates,
                           .by_in = p.by_in,
                           .block = call.problem.block,
                           .tile_tokens = form_of(plan_of(call.problem).kind).tokens,
                           .strips = static_cast<int32_t>(ceil_div(args.outputs, 64)),
                           .token_tiles = args.token_tiles,
                           .n = args.n,
                           .inputs = call.problem.inputs,
                           .outputs = args.outputs,
                           .notes = reinterpret_cast<const uint32_t*>(args.notes),
                           .finish = args.finish,
                           .scattered = feed.images.y == nullptr ? ScatteredImages{} : *feed.images.y};
    return cuda::launch(
        {.blocks = call.card.multiprocessors, .threads = 256, .stream = stream_of(call), .overlap = true},
        wgmma_repair<T, X>, repair);
  };
  if constexpr (Order == XOrder::images) return launch_with(PixelsOfX<T>{*feed.images.x});
  else return launch_with(TokensOfX<T>{matrix_of<T>(p.x)});
}

template <class T, XOrder Order>
Status launch_of(const Product& p, const Feed& feed, const CudaCall& call) {
  const Plan plan = plan_of(call.problem);
  const Tables tables = tables_in(plan, call.problem.block, call.workspace.data);
  const int64_t token_tiles = ceil_div(p.x.n, form_of(plan.kind).tokens);
  const Args args{
      .tables = tables,
      .out_tiles = static_cast<int32_t>(plan.tiles),
      .token_tiles = static_cast<int32_t>(token_tiles),
      .group = static_cast<int32_t>(std::min<int64_t>(token_group(plan.kind), token_tiles)),
      .n = static_cast<int32_t>(p.x.n),
      .outputs = p.outputs(),
      .boxes = in_boxes(p.y),
      .finish = {matrix_of<T>(p.y), matrix_of<T>(p.residual), p.bias, p.activation, p.glu ? p.y.features : 0},
      .notes = tables.notes};
  BS_RETURN_IF_ERROR((with_form<T, Order>(plan.kind, p.by_in, [&]<class K>() {
    typename K::Maps maps{};
    const void* w = copies_w(call.problem) ? tables.copy : p.w;
    BS_RETURN_IF_ERROR(K::make_maps(p, feed.images, w, maps));  // before anything is queued
    BS_RETURN_IF_ERROR(make_tables(plan, call, feed.walk, feed.gates, tables));
    BS_RETURN_IF_ERROR(pack_weights(plan, call, feed.walk, {p.w, feed.gates, p.dtype}, tables));
    return cuda::launch({.blocks = std::min<int64_t>(call.card.multiprocessors, plan.tiles * token_tiles),
                         .threads = K::kThreads,
                         .shared_bytes = K::kSharedBytes,
                         .stream = stream_of(call),
                         .overlap = true},
                        kernel_of<K>(is_plain(p)), maps, args);
  })));
  return tables.notes == nullptr ? Status() : launch_repair<T, Order>(p, feed, call, args);
}

template <class T>
Status launch(const Product& p, const CudaCall& call) {
  const Feed feed{walk_on_device(p.layout, p.by_in), static_cast<const float*>(p.gates)};
  return p.x.features_first() ? launch_of<T, XOrder::features>(p, feed, call)
                              : launch_of<T, XOrder::tokens>(p, feed, call);
}

template <class T, XOrder Order>
Status prepare_of() {
  for (auto kind : {Kind::direct, Kind::filled, Kind::patches32, Kind::patches16}) {
    for (bool by_in : {false, true}) {
      BS_RETURN_IF_ERROR((with_form<T, Order>(kind, by_in, [&]<class K>() {
        BS_RETURN_IF_ERROR(cuda::prepare(kernel_of<K>(true), K::kSharedBytes));
        return cuda::prepare(kernel_of<K>(false), K::kSharedBytes);
      })));
    }
  }
  using X = std::conditional_t<Order == XOrder::images, PixelsOfX<T>, TokensOfX<T>>;
  BS_RETURN_IF_ERROR((cuda::prepare(wgmma_repair<T, X>, 0)));
  BS_RETURN_IF_ERROR(cuda::prepare_tensor_maps());
  BS_RETURN_IF_ERROR(prepare_tables());
  return prepare_pack();
}

template <class T>
Status prepare() {
  BS_RETURN_IF_ERROR((prepare_of<T, XOrder::tokens>()));
  return prepare_of<T, XOrder::features>();
}

}  // namespace
}  // namespace blocksparse::gemm::wgmma
