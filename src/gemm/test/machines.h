// For tests: CPUs that are not at hand, and how their plans see a problem given by a line.
#pragma once

#include <string>
#include <string_view>

#include "core/index.h"
#include "cpu/isa.h"
#include "gemm/cpu/plan.h"
#include "ops/linear/problem.h"

namespace blocksparse::gemm {

inline constexpr Cpu kZen3{.avx2 = true};
inline constexpr Cpu kZen5{.avx2 = true, .avx512 = true, .avx512_bf16 = true, .fast_bf16 = true};
inline constexpr Cpu kXeon{.avx2 = true, .avx512 = true, .intel = true};
inline constexpr Cpu kXeonAmx{.avx2 = true, .avx512 = true, .avx512_bf16 = true, .amx = true, .intel = true};
inline constexpr Cpu kArm{.neon = true};
inline constexpr Cpu kArmBf16{.neon = true, .neon_bf16 = true};

// The instruction set whose kernels do a type. Some instruction sets have kernels of bf16 alone.
inline Isa isa_for(DType dtype, Isa isa) {
  const auto bf16_alone = [](Isa i) { return i == Isa::amx || i == Isa::avx512_bf16 || i == Isa::neon_bf16; };
  while (bf16_alone(isa) && dtype != DType::bf16) isa = next_below(isa);
  return isa;
}

// The properties of an instruction set's kernel, whether or not this build has it.
inline ProductTraits usual_traits(DType dtype, Isa isa) {
  const int sum_bytes = static_cast<int>(size_of(sum_dtype(dtype)));
  switch (isa_for(dtype, isa)) {
    case Isa::amx: return {.lanes = 16, .by_token = true};
    case Isa::avx512_bf16: return {.lanes = 16, .stages = true, .along_outputs = 32};
    case Isa::avx512: return {.lanes = 64 / sum_bytes, .stages = true, .along_outputs = dtype == DType::f32 ? 16 : 0};
    case Isa::avx2:
      return {
          .lanes = 32 / sum_bytes, .side_by_side = true, .stages = true, .along_outputs = dtype == DType::f32 ? 16 : 0};
    case Isa::neon:
    case Isa::neon_bf16:
    case Isa::scalar: return {.lanes = 16 / sum_bytes, .stages = true};
    case Isa::reference: break;
  }
  return {};
}

// A line of fprop or dgrad, on a CPU's best instruction set.
inline CpuProblem product_on(const Cpu& cpu, std::string_view line) {
  const linear::LinearCase c = *linear::parse_linear_case(line);
  const Layout layout = *linear::layout_of(c);
  const LayoutView view = layout.view();
  const bool by_in = view.transposed != (c.pass == Pass::dgrad);
  const auto matrix = [&c](Order order, int64_t features) {
    const bool first = order == Order::features_first;
    return Activations{nullptr, c.n, features, first ? 1 : features + c.pad, first ? c.n + c.pad : 1};
  };
  const Product p{.dtype = c.dtype,
                  .layout = view,
                  .by_in = by_in,
                  .x = matrix(c.x_order, by_in ? view.out_features : view.in_features),
                  .y = matrix(c.y_order, by_in ? view.in_features : view.out_features),
                  .residual = {},
                  .gates = c.gates ? &layout : nullptr};
  return problem_of(p, usual_traits(c.dtype, isas_of(cpu).front()), walk_of(view, by_in).slots,
                    static_cast<int32_t>(c.threads));
}

// A line of wgrad, on a CPU's best instruction set.
inline CpuGradientProblem gradient_on(const Cpu& cpu, std::string_view line) {
  const linear::LinearCase c = *linear::parse_linear_case(line);
  const Layout layout = *linear::layout_of(c);
  const bool dy_first = c.y_order == Order::features_first;
  return {.dtype = c.dtype,
          .dw_dtype = c.dw_dtype.value_or(c.dtype),
          .block = static_cast<int32_t>(c.block),
          .n = c.n * c.pairs,
          .inputs = layout.in_features(),
          .outputs = layout.out_features(),
          .blocks = layout.blocks(),
          .pairs = c.pairs,
          .x_feature = c.x_order == Order::features_first ? c.n : 1,
          .dy_feature = dy_first ? c.n : 1,
          .dy_token = dy_first ? 1 : layout.out_features(),
          .threads = static_cast<int32_t>(c.threads),
          .lanes = usual_traits(c.dtype, isas_of(cpu).front()).lanes};
}

inline std::string plan_on(const Cpu& cpu, std::string_view line) {
  if (linear::parse_linear_case(line)->pass == Pass::wgrad) {
    return to_string(plan_gradient(gradient_on(cpu, line), cpu));
  }
  return to_string(plan_product(product_on(cpu, line), cpu));
}

}  // namespace blocksparse::gemm
