// How large a workspace the CUDA kernels ask for.
#include <gtest/gtest.h>

#include "blocksparse/layout.h"
#include "gemm/cuda/families.h"
#include "gemm/cuda/generic/plan.h"
#include "gemm/cuda/stream_w/plan.h"

namespace blocksparse::gemm {
namespace {

TEST(SelectCuda, WorkspaceHoldsSlicesOfFewTokens) {
  LayoutView view{.block_size = 8, .out_features = 1600, .in_features = 1600, .blocks = 1600};
  EXPECT_EQ(cuda_workspace_bytes(cuda_problem(Pass::fprop, view, DType::f64, 64)), 0u) << "no row is cut";
  view.cut_by_out = true;
  const CudaProblem few = cuda_problem(Pass::fprop, view, DType::f64, 64);
  ASSERT_GT(few.slots, 0);
  EXPECT_EQ(cuda_workspace_bytes(few), static_cast<size_t>(few.slots * 64 * 8 * 8));
  EXPECT_EQ(cuda_workspace_bytes(cuda_problem(Pass::fprop, view, DType::f32, 64)),
            static_cast<size_t>(few.slots * 64 * 8 * 4 + 1600 * 64 * 4))
      << "and x, should it have to be copied";
  EXPECT_EQ(cuda_workspace_bytes(cuda_problem(Pass::fprop, view, DType::f64, 5000)), 0u) << "rows are walked whole";
  EXPECT_EQ(cuda_workspace_bytes(cuda_problem(Pass::wgrad, view, DType::f64, 64)), 0u) << "terms fit into a launch";
  EXPECT_EQ(cuda_workspace_bytes(cuda_problem(Pass::wgrad, view, DType::f64, 100000)),
            static_cast<size_t>(generic::kMostTerms * generic::kTermBytes));
}

TEST(SelectCuda, WorkspaceOfMoreTokensSufficesForLessInEveryPassWhereNoRowIsCut) {
  for (const int32_t block : {8, 32, 128}) {
    const LayoutView view{.block_size = block, .out_features = 3200, .in_features = 1600, .blocks = 300};
    for (const Pass pass : {Pass::fprop, Pass::dgrad, Pass::wgrad}) {
      for (DType dtype : {DType::bf16, DType::f32, DType::f64}) {
        size_t before = 0, before_forced = 0;
        for (int64_t n = 1; n <= 2100; n += n < 40 || n > 1000 ? 1 : 31) {
          const CudaProblem p = cuda_problem(pass, view, dtype, n);
          const size_t bytes = cuda_workspace_bytes(p), forced = most_cuda_workspace_bytes(p);
          ASSERT_GE(bytes, before) << "b=" << block << " n=" << n << " " << name_of(dtype);
          ASSERT_GE(forced, before_forced) << "b=" << block << " n=" << n << " " << name_of(dtype);
          ASSERT_GE(forced, bytes);
          before = bytes, before_forced = forced;
        }
      }
    }
  }
}

TEST(SelectCuda, KernelsThatAreNotChosenAskForNothing) {
  const LayoutView view{.block_size = 32, .out_features = 256, .in_features = 256, .blocks = 32};
  EXPECT_LT(cuda_workspace_bytes(cuda_problem(Pass::wgrad, view, DType::bf16, 128)), size_t{1} << 20);
  EXPECT_GT(most_cuda_workspace_bytes(cuda_problem(Pass::wgrad, view, DType::bf16, 128)), size_t{30} << 20);
}

// The generic kernel cuts rows only below 1024 tokens, so 1023 tokens may need more than 1024.
TEST(SelectCuda, WorkspaceOfMoreTokensSufficesForLess) {
  LayoutView view{.block_size = 16, .out_features = 3200, .in_features = 1600, .blocks = 8000, .cut_by_out = true};
  for (DType dtype : {DType::bf16, DType::f16, DType::f32}) {
    size_t before = 0;
    for (int64_t n = 1; n <= 1000; ++n) {
      CudaProblem p = cuda_problem(Pass::fprop, view, dtype, n);
      const size_t bytes = cuda_workspace_bytes(p);
      EXPECT_GE(bytes, before) << n;
      before = bytes;
      p.tf32 = dtype == DType::f32;
      if (n > stream_w::round_tokens(p)) continue;
      const stream_w::WorkspaceParts w = stream_w::workspace_parts(p);
      EXPECT_GE(bytes, static_cast<size_t>(w.partial_bytes + w.packed_bytes));
      for (bool gated : {false, true}) {
        const stream_w::Plan plan = stream_w::plan_of(p, gated, {.arch = 90, .multiprocessors = 132});
        const int64_t tokens = int64_t{plan.tokens} * plan.slices;
        EXPECT_GE(tokens, n);
        EXPECT_LT(tokens - plan.tokens, n) << "an empty slice";
        EXPECT_GE(w.packed_bytes, 1600 * tokens * size_of(dtype));
      }
    }
  }
}

}  // namespace
}  // namespace blocksparse::gemm
