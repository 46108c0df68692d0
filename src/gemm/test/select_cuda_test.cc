// The choice of CUDA kernels, and what is said of layouts without looking at their tables.
#include <gtest/gtest.h>

#include <tuple>
#include <utility>

#include "blocksparse/layout.h"
#include "core/index.h"
#include "gemm/cuda/select.h"
#include "gemm/cuda/wgmma/plan.h"
#include "gemm/cuda/w_in_smem/plan.h"
#include "gemm/cuda/tiled_f32/plan.h"

namespace blocksparse::gemm {
namespace {

TEST(SelectCuda, NamesAreReadAndWritten) {
  for (CudaKernel kernel : kAllCudaKernels) EXPECT_EQ(parse_cuda_kernel(name_of(kernel)), kernel);
  EXPECT_FALSE(parse_cuda_kernel("fastest"));
}

TEST(SelectCuda, TheGenericKernelAlwaysAnswers) {
  for (int32_t arch : {80, 86, 89, 90, 100, 120}) {
    for (int32_t block : {8, 16, 32, 64, 128}) {
      const CudaProblem p{.dtype = DType::f64, .block = block, .n = 1, .inputs = 1, .outputs = 1, .blocks = 1};
      EXPECT_TRUE(cuda_supports(CudaKernel::generic, p, {.arch = arch, .multiprocessors = 1}));
    }
  }
  EXPECT_FALSE(cuda_supports(CudaKernel::generic, {}, {.arch = 75, .multiprocessors = 1}));
}

TEST(SelectCuda, TransposedAndBackwardExchangeTheSides) {
  LayoutView view{.block_size = 32, .out_features = 100, .in_features = 320, .blocks = 7};
  EXPECT_EQ(cuda_problem(Pass::fprop, view, DType::f32, 5).outputs, 100);
  EXPECT_EQ(cuda_problem(Pass::dgrad, view, DType::f32, 5).outputs, 320);
  EXPECT_EQ(cuda_problem(Pass::fprop, view.t(), DType::f32, 5).outputs, 320);
  EXPECT_EQ(cuda_problem(Pass::dgrad, view.t(), DType::f32, 5).outputs, 100);
  EXPECT_TRUE(cuda_problem(Pass::dgrad, view, DType::f32, 5).by_in);
  EXPECT_EQ(cuda_problem(Pass::fprop, view, DType::f32, 5).output_blocks(), 4);
}

TEST(SelectCuda, ManyTokensOfF32HaveAKernelOfTheirOwn) {
  const CudaProblem p{.dtype = DType::f32, .block = 32, .n = 4096, .inputs = 4096, .outputs = 4096, .blocks = 1600};
  const cuda::Card a100{.arch = 80, .multiprocessors = 108};
  EXPECT_EQ(choose_cuda_kernel(p, a100), CudaKernel::tiled);
  const auto but = [&](auto change) {
    CudaProblem other = p;
    change(other);
    return choose_cuda_kernel(other, a100);
  };
  EXPECT_EQ(but([](CudaProblem& o) { o.tf32 = true; }), CudaKernel::tiled);
  EXPECT_EQ(but([](CudaProblem& o) { o.pass = Pass::wgrad; }), CudaKernel::tiled);
  EXPECT_EQ(but([](CudaProblem& o) { o.n = 64; }), CudaKernel::few);
  EXPECT_EQ(but([](CudaProblem& o) { o.n = 128; }), CudaKernel::generic) << "32 tiles for 108 multiprocessors";
  EXPECT_EQ(but([](CudaProblem& o) { o.tf32 = true, o.n = 512; }), CudaKernel::few);
  EXPECT_EQ(but([](CudaProblem& o) { o.tf32 = true, o.n = 513; }), CudaKernel::tiled);
  EXPECT_EQ(but([](CudaProblem& o) { o.tf32 = true, o.block = 16; }), CudaKernel::few);
  EXPECT_EQ(but([](CudaProblem& o) { o.tf32 = true, o.gated = true; }), CudaKernel::few);
  EXPECT_EQ(but([](CudaProblem& o) { o.tf32 = true, o.n = 256, o.pass = Pass::wgrad; }), CudaKernel::few);
  EXPECT_EQ(but([](CudaProblem& o) { o.tf32 = true, o.n = 512, o.pass = Pass::wgrad; }), CudaKernel::tiled);
  EXPECT_EQ(but([](CudaProblem& o) { o.tf32 = true, o.n = 512, o.pass = Pass::wgrad, o.block = 8; }), CudaKernel::few);
  EXPECT_EQ(but([](CudaProblem& o) { o.n = 32, o.pass = Pass::wgrad; }), CudaKernel::tiled) << "needs every bit";
  EXPECT_EQ(but([](CudaProblem& o) { o.dtype = DType::bf16; }), CudaKernel::few);
  EXPECT_EQ(but([](CudaProblem& o) { o.x_in_rows = false; }), CudaKernel::generic);
  EXPECT_EQ(but([](CudaProblem& o) { o.w_aligned = false; }), CudaKernel::generic);
  EXPECT_EQ(but([](CudaProblem& o) { o.gated = true; }), CudaKernel::generic);
  EXPECT_EQ(but([](CudaProblem& o) { o.pass = Pass::wgrad, o.pairs = 2; }), CudaKernel::generic);
  EXPECT_EQ(but([](CudaProblem& o) { o.block = 8, o.inputs = o.outputs = 200000, o.blocks = 100000; }),
            CudaKernel::generic)
      << "lists that are much larger than W";
  EXPECT_EQ(tiled_groups(p), 32);
  EXPECT_EQ(tiled_places(p).end - tiled_places(p).weights, 32 * 128 * 4 * 4);
  EXPECT_GE(tiled_runs(p), 1600 / 8);
}

TEST(SelectCuda, RoundsOfFewTokensFillTheCard) {
  const auto round = [](int64_t inputs, DType dtype, bool tf32 = false, int64_t slots = 0) {
    return few_round({.dtype = dtype, .inputs = inputs, .outputs = 4096, .slots = slots, .tf32 = tf32});
  };
  EXPECT_EQ(round(4096, DType::bf16), 2048);
  EXPECT_EQ(round(4096, DType::f32, true), 2048);
  EXPECT_EQ(round(4096, DType::f32), kFewTokens) << "and no second one";
  EXPECT_EQ(round(256, DType::f16), 16384);
  EXPECT_EQ(round(0, DType::f16), 16384);
  EXPECT_EQ(round(100000, DType::bf16), kMostFewTokens);
  EXPECT_EQ(round(256, DType::bf16, false, 9), kMostFewTokens);
  EXPECT_EQ(round(5000, DType::bf16) % kFewTokens, 0);
}

constexpr cuda::Card kH200 = {.arch = 90, .multiprocessors = 132, .sm90a = true};

TEST(SelectCuda, FewTokensHaveAKernelOfTheirOwn) {
  const CudaProblem p{.dtype = DType::bf16, .block = 32, .n = 32, .inputs = 4096, .outputs = 4096, .blocks = 1600};
  EXPECT_EQ(choose_cuda_kernel(p, kH200), CudaKernel::few);
  EXPECT_EQ(choose_cuda_kernel(p, {.arch = 80, .multiprocessors = 108}), CudaKernel::few);
  const auto but = [&p](auto change) {
    CudaProblem other = p;
    change(other);
    return choose_cuda_kernel(other, kH200);
  };
  EXPECT_EQ(but([](CudaProblem& o) { o.n = 1; }), CudaKernel::few);
  EXPECT_EQ(but([](CudaProblem& o) { o.n = 64; }), CudaKernel::few);
  EXPECT_EQ(but([](CudaProblem& o) { o.n = 65, o.block = 16; }), CudaKernel::few);
  EXPECT_EQ(but([](CudaProblem& o) { o.n = 65, o.dtype = DType::f32; }), CudaKernel::generic);
  EXPECT_EQ(but([](CudaProblem& o) { o.dtype = DType::f16; }), CudaKernel::few);
  EXPECT_EQ(but([](CudaProblem& o) { o.dtype = DType::f32; }), CudaKernel::few);
  EXPECT_EQ(but([](CudaProblem& o) { o.dtype = DType::f64; }), CudaKernel::generic);
  EXPECT_EQ(but([](CudaProblem& o) { o.pass = Pass::dgrad; }), CudaKernel::few);
  EXPECT_EQ(but([](CudaProblem& o) { o.inputs = o.outputs = 4093; }), CudaKernel::few) << "ragged";
  EXPECT_EQ(but([](CudaProblem& o) { o.w_aligned = false; }), CudaKernel::generic);
  EXPECT_EQ(but([](CudaProblem& o) { o.blocks = int64_t{1} << 27; }), CudaKernel::generic) << "offsets of 32 bits";
}

TEST(SelectCuda, FewTokensOfManyOutputsHaveItToo) {
  CudaProblem p{.dtype = DType::bf16, .block = 32, .n = 1, .inputs = 256, .outputs = int64_t{4} << 20, .blocks = 9000};
  EXPECT_EQ(choose_cuda_kernel(p, kH200), CudaKernel::few)
      << "for few inputs a round is long, of which y knows nothing";
  p.outputs = int64_t{1} << 26;
  EXPECT_NE(choose_cuda_kernel(p, kH200), CudaKernel::few);
  std::swap(p.inputs, p.outputs);
  EXPECT_NE(choose_cuda_kernel(p, kH200), CudaKernel::few);
}

TEST(SelectCuda, SomeHundredTokensHaveOneOnHopper) {
  const CudaProblem p{.dtype = DType::bf16, .block = 32, .n = 256, .inputs = 5600, .outputs = 5600, .blocks = 1225};
  EXPECT_EQ(choose_cuda_kernel(p, {.arch = 80, .multiprocessors = 108}), CudaKernel::few);
  const auto but = [&p](auto change) {
    CudaProblem other = p;
    change(other);
    return choose_cuda_kernel(other, kH200);
  };
  EXPECT_EQ(but([](CudaProblem&) {}), CudaKernel::rows);
  EXPECT_EQ(but([](CudaProblem& o) { o.pass = Pass::dgrad; }), CudaKernel::rows);
  EXPECT_EQ(but([](CudaProblem& o) { o.n = 65; }), CudaKernel::rows);
  EXPECT_EQ(but([](CudaProblem& o) { o.n = 64; }), CudaKernel::few);
  EXPECT_EQ(but([](CudaProblem& o) { o.blocks = 3000; }), CudaKernel::rows);
  EXPECT_EQ(but([](CudaProblem& o) { o.blocks = 3000, o.n = 128; }), CudaKernel::few);
  EXPECT_EQ(but([](CudaProblem& o) { o.blocks = 5000; }), CudaKernel::few);
  EXPECT_EQ(but([](CudaProblem& o) { o.slots = 20; }), CudaKernel::rows);
  EXPECT_EQ(but([](CudaProblem& o) { o.slots = 20, o.inputs *= 4, o.blocks *= 4; }), CudaKernel::rows) << "8 slices";
  EXPECT_EQ(but([](CudaProblem& o) { o.slots = 20, o.inputs *= 4; }), CudaKernel::few) << "a long hub";
  EXPECT_EQ(but([](CudaProblem& o) { o.slots = 20, o.outputs *= 4, o.blocks *= 4; }), CudaKernel::rows);
  EXPECT_EQ(but([](CudaProblem& o) { o.slots = 20, o.inputs *= 2, o.outputs *= 8, o.blocks *= 8; }), CudaKernel::few)
      << "fours of rows are walked whole";
  EXPECT_EQ(but([](CudaProblem& o) { o.outputs = 5599; }), CudaKernel::rows);
  EXPECT_EQ(but([](CudaProblem& o) { o.inputs = 5599; }), CudaKernel::few) << "W may hold anything there";
  EXPECT_EQ(but([](CudaProblem& o) { o.x_in_rows = false; }), CudaKernel::few);
  EXPECT_EQ(but([](CudaProblem& o) { o.x_first = true; }), CudaKernel::few);
  EXPECT_EQ(but([](CudaProblem& o) { o.gated = true; }), CudaKernel::few);
  EXPECT_NE(but([](CudaProblem& o) { o.dtype = DType::f32; }), CudaKernel::rows);
  EXPECT_FALSE(rows_in_fours(p));
  CudaProblem gates = p;
  gates.outputs = 4 * p.inputs;
  EXPECT_TRUE(rows_in_fours(gates));
  gates.n = 65, gates.blocks = 9000;
  EXPECT_EQ(choose_cuda_kernel(gates, kH200), CudaKernel::rows) << "x is shared";
  gates.blocks = 40000;
  EXPECT_NE(choose_cuda_kernel(gates, kH200), CudaKernel::rows) << "a third of the blocks: not measured";
  gates.by_in = true;
  EXPECT_FALSE(rows_in_fours(gates)) << "W does not lie in the order of the lists";
}

TEST(SelectCuda, ManyTokensHaveAKernelOnHopper) {
  const CudaProblem p{.dtype = DType::bf16, .block = 64, .n = 4096, .inputs = 4096, .outputs = 4096, .blocks = 400};
  EXPECT_EQ(choose_cuda_kernel(p, kH200), CudaKernel::many);
  for (const cuda::Card& card :
       {cuda::Card{.arch = 80, .multiprocessors = 108}, cuda::Card{.arch = 100, .multiprocessors = 148},
        cuda::Card{.arch = 90, .multiprocessors = 132}}) {
    EXPECT_EQ(choose_cuda_kernel(p, card), CudaKernel::few) << card.arch << " without code for 9.0a";
  }
  const auto but = [&p](auto change) {
    CudaProblem other = p;
    change(other);
    return choose_cuda_kernel(other, kH200);
  };
  EXPECT_EQ(but([](CudaProblem& o) { o.n = 256; }), CudaKernel::many);
  EXPECT_EQ(but([](CudaProblem& o) { o.n = 255; }), CudaKernel::few);
  EXPECT_EQ(but([](CudaProblem& o) { o.gated = true; }), CudaKernel::many);
  EXPECT_EQ(but([](CudaProblem& o) { o.x_first = true; }), CudaKernel::many);
  EXPECT_EQ(but([](CudaProblem& o) { o.x_in_rows = false; }), CudaKernel::few);
  EXPECT_EQ(but([](CudaProblem& o) { o.w_aligned = false; }), CudaKernel::many) << "W is copied";
  EXPECT_EQ(but([](CudaProblem& o) { o.dtype = DType::f32; }), CudaKernel::tiled);
  EXPECT_EQ(but([](CudaProblem& o) { o.outputs -= 3; }), CudaKernel::many);
  EXPECT_EQ(but([](CudaProblem& o) { o.inputs -= 3; }), CudaKernel::many) << "W is copied, and cleared";
  EXPECT_EQ(but([](CudaProblem& o) { o.inputs -= 3, o.block = 32; }), CudaKernel::many);
  EXPECT_EQ(but([](CudaProblem& o) { o.n = kMostFewTokens, o.block = 32; }), CudaKernel::rows);
  EXPECT_EQ(but([](CudaProblem& o) { o.n = kMostFewTokens + 1, o.block = 32; }), CudaKernel::many);
  EXPECT_EQ(but([](CudaProblem& o) { o.inputs = 64 * (kMostChunks + 1); }), CudaKernel::few);
}

TEST(SelectCuda, ManyTokensOfSmallBlocksAreSwept) {
  const CudaProblem p{.dtype = DType::bf16, .block = 16, .n = 4096, .inputs = 4096, .outputs = 4096, .blocks = 6554};
  const auto but = [&p](auto change) {
    CudaProblem other = p;
    change(other);
    return choose_cuda_kernel(other, kH200);
  };
  EXPECT_EQ(but([](CudaProblem&) {}), CudaKernel::sweep);
  EXPECT_EQ(but([](CudaProblem& o) { o.pass = Pass::dgrad, o.by_in = true; }), CudaKernel::sweep);
  EXPECT_EQ(but([](CudaProblem& o) { o.outputs -= 3; }), CudaKernel::sweep);
  EXPECT_EQ(but([](CudaProblem& o) { o.blocks = 28000; }), CudaKernel::sweep);
  EXPECT_EQ(but([](CudaProblem& o) { o.blocks = 30000; }), CudaKernel::many) << "nearly as fast as a dense product";
  EXPECT_EQ(but([](CudaProblem& o) { o.blocks = 900; }), CudaKernel::many) << "x is swept for little";
  EXPECT_EQ(but([](CudaProblem& o) { o.block = 8, o.blocks = 50000; }), CudaKernel::sweep);
  EXPECT_EQ(but([](CudaProblem& o) { o.block = 8, o.blocks = 54000; }), CudaKernel::many);
  EXPECT_EQ(but([](CudaProblem& o) { o.block = 32, o.blocks = 4000; }), CudaKernel::sweep);
  EXPECT_EQ(but([](CudaProblem& o) { o.block = 32, o.blocks = 1600; }), CudaKernel::many);
  EXPECT_EQ(but([](CudaProblem& o) { o.block = 32, o.blocks = 4000, o.n = 8192; }), CudaKernel::many);
  EXPECT_EQ(but([](CudaProblem& o) { o.n = kMostFewTokens; }), CudaKernel::sweep);
  EXPECT_EQ(but([](CudaProblem& o) { o.n = kMostFewTokens - 1; }), CudaKernel::few);
  EXPECT_EQ(but([](CudaProblem& o) { o.outputs = 256; }), CudaKernel::many) << "32 tiles for 132 processors";
  EXPECT_EQ(but([](CudaProblem& o) { o.slots = 100; }), CudaKernel::sweep);
  EXPECT_EQ(but([](CudaProblem& o) { o.slots = 100, o.blocks = 2000; }), CudaKernel::many) << "hubs of 256 blocks";
  // What it cannot do.
  EXPECT_EQ(but([](CudaProblem& o) { o.inputs -= 3; }), CudaKernel::many) << "W may hold anything there";
  EXPECT_EQ(but([](CudaProblem& o) { o.gated = true; }), CudaKernel::many);
  EXPECT_EQ(but([](CudaProblem& o) { o.w_aligned = false; }), CudaKernel::many);
  EXPECT_EQ(but([](CudaProblem& o) { o.x_first = true; }), CudaKernel::many);
  EXPECT_EQ(but([](CudaProblem& o) { o.x_in_rows = false; }), CudaKernel::few);
  EXPECT_EQ(choose_cuda_kernel(p, {.arch = 90, .multiprocessors = 132}), CudaKernel::few) << "without code for 9.0a";
}

TEST(SelectCuda, FewFeaturesAreKeptInSharedMemory) {
  const CudaProblem p{.dtype = DType::bf16, .block = 16, .n = 50176, .inputs = 256, .outputs = 256, .blocks = 64};
  const auto but = [&p](auto change) {
    CudaProblem other = p;
    change(other);
    return choose_cuda_kernel(other, kH200);
  };
  EXPECT_EQ(but([](CudaProblem&) {}), CudaKernel::resident);
  EXPECT_EQ(but([](CudaProblem& o) { o.block = 32, o.blocks = 16, o.pass = Pass::dgrad; }), CudaKernel::resident);
  EXPECT_EQ(but([](CudaProblem& o) { o.block = 64, o.blocks = 4; }), CudaKernel::many) << "boxes of W";
  EXPECT_EQ(but([](CudaProblem& o) { o.n = kMostFewTokens; }), CudaKernel::few);
  EXPECT_EQ(but([](CudaProblem& o) { o.n = 16384, o.block = 8, o.blocks = 256; }), CudaKernel::resident);
  EXPECT_EQ(but([](CudaProblem& o) { o.block = 8, o.blocks = 256; }), CudaKernel::many);
  EXPECT_EQ(but([](CudaProblem& o) { o.inputs -= 3, o.outputs -= 3; }), CudaKernel::resident)
      << "cleared as it is copied";
  EXPECT_EQ(but([](CudaProblem& o) { o.outputs = 513; }), CudaKernel::many);
  EXPECT_EQ(but([](CudaProblem& o) { o.inputs = 1025; }), CudaKernel::many);
  EXPECT_EQ(but([](CudaProblem& o) { o.blocks = 128; }), CudaKernel::many) << "bound by its products";
  EXPECT_EQ(plan_resident({.block = 32, .n = 4096, .inputs = 512, .outputs = 512, .blocks = 140}), std::nullopt)
      << "no room for two tiles of x";
  EXPECT_EQ(but([](CudaProblem& o) { o.gated = true; }), CudaKernel::many);
  EXPECT_EQ(but([](CudaProblem& o) { o.w_aligned = false; }), CudaKernel::many);
  EXPECT_EQ(but([](CudaProblem& o) { o.x_first = true; }), CudaKernel::many);
  EXPECT_EQ(choose_cuda_kernel(p, {.arch = 80, .multiprocessors = 108}), CudaKernel::few);
  const auto plan = plan_resident(p);
  ASSERT_TRUE(plan);
  EXPECT_EQ(plan->tokens, 64);
  EXPECT_EQ(plan->units(), kResidentWarps) << "one each";
  EXPECT_EQ(plan->tiles, 784);
  EXPECT_EQ(plan->stages, 5);
  EXPECT_LE(plan->shared_bytes(), kResidentBytes);
  CudaProblem wide = p;
  wide.outputs = 512;
  EXPECT_EQ(plan_resident(wide)->tokens, 32);
  EXPECT_EQ(plan_resident(wide)->units(), kResidentWarps);
}

TEST(SelectCuda, CardsWithoutThemDoNotLoadHoppersKernels) {
  constexpr cuda::Card kAmpere = {.arch = 80, .multiprocessors = 108};
  EXPECT_FALSE(cuda_runs(CudaKernel::rows, kAmpere));
  EXPECT_FALSE(cuda_runs(CudaKernel::many, kAmpere)) << "they ask for more shared memory than there is";
  EXPECT_TRUE(cuda_runs(CudaKernel::few, kAmpere));
  EXPECT_TRUE(cuda_runs(CudaKernel::many, kH200));
}

TEST(SelectCuda, ManyTokensArePlannedByBlockAndDensity) {
  CudaProblem p{.dtype = DType::bf16, .block = 8, .n = 4096, .inputs = 4096, .outputs = 1000, .blocks = 512 * 125 / 4};
  EXPECT_EQ(plan_many(p).kind, ManyKind::filled);
  EXPECT_EQ(plan_many(p).tiles, 8);
  EXPECT_EQ(plan_many(p).cells, 8 * 64 * 2) << "W as if it were dense";
  p.blocks /= 10;
  EXPECT_EQ(plan_many(p).kind, ManyKind::cells16);
  EXPECT_EQ(plan_many(p).cells, p.blocks);
  for (const int32_t block : {16, 32}) {
    const int64_t grid = (4096 / block) * ((1000 + block - 1) / block);
    p.block = block;
    p.blocks = grid * 6 / 10;
    EXPECT_EQ(plan_many(p).kind, ManyKind::filled) << block;
    p.blocks = grid / 4;
    EXPECT_EQ(plan_many(p).kind, block == 16 ? ManyKind::cells16 : ManyKind::cells32);
  }
  p.block = 128;
  EXPECT_EQ(plan_many(p).kind, ManyKind::direct);
  EXPECT_EQ(plan_many(p).records, 2 * p.blocks);
  const ManyPlaces direct = many_places(plan_many(p), p.block);
  EXPECT_EQ(direct.copy, direct.cells) << "there are no cells";
  EXPECT_GE(direct.end - direct.copy, p.blocks * 128 * 128 * 2) << "room for a copy";
  p.block = 32;
  const ManyPlaces at = many_places(plan_many(p), p.block);
  EXPECT_EQ(at.copy - at.cells, p.blocks * 32 * 32 * 2);
  EXPECT_EQ(at.end, at.copy);
}

TEST(SelectCuda, FewTokensArePlannedBySizesAndCard) {
  CudaProblem p{.dtype = DType::bf16, .inputs = 12288, .outputs = 12288, .blocks = 14745};  // 384 x 384, density .1
  const auto tokens = [&p](int32_t block, int64_t n, bool gated = false) {
    p.block = block;
    p.n = n;
    return plan_few(p, gated, kH200).tokens;
  };
  EXPECT_EQ(tokens(32, 1), 8);
  EXPECT_EQ(tokens(32, 9), 32);
  EXPECT_EQ(tokens(128, 33), 64);
  EXPECT_EQ(tokens(8, 1), 16);
  EXPECT_EQ(tokens(16, 17), 32);
  EXPECT_EQ(tokens(32, 1, true), 32);
  EXPECT_EQ(tokens(8, 64, true), 64);

  p.block = 32;
  EXPECT_EQ(plan_few(p, false, kH200).warps, 4) << "384 strips";
  EXPECT_EQ(plan_few(p, false, {.arch = 100, .multiprocessors = 400}).warps, 8);
  p.outputs = 4096;
  EXPECT_EQ(plan_few(p, false, kH200).warps, 8) << "128 strips";
  EXPECT_EQ(plan_few(p, false, {.arch = 80, .multiprocessors = 108}).warps, 4);
  p.slots = 5;
  EXPECT_EQ(plan_few(p, false, kH200).warps, 4);
  p.slots = 0;
  p.dtype = DType::f32;
  EXPECT_EQ(plan_few(p, false, kH200).warps, 8);
  EXPECT_EQ(plan_few(p, false, {.arch = 89, .multiprocessors = 142}).warps, 4) << "less shared memory";
  p.n = 1;
  EXPECT_EQ(plan_few(p, true, kH200).tokens, 8);
  EXPECT_FALSE(plan_few(p, true, kH200).pack);

  p = {.dtype = DType::bf16, .block = 32, .n = 64, .inputs = 12288, .outputs = 12288, .blocks = 14745};
  EXPECT_FALSE(plan_few(p, false, kH200).pack) << "density .1";
  p.blocks *= 2;
  EXPECT_TRUE(plan_few(p, false, kH200).pack);
  p.n = 32;
  EXPECT_FALSE(plan_few(p, false, kH200).pack);
  p.block = 16;
  EXPECT_TRUE(plan_few(p, false, kH200).pack);
}

// The bound has to hold for every layout.
TEST(SelectCuda, NoLayoutHasMoreSlotsThanItsSizesAllow) {
  for (const char* graph : {"ba(200,4)", "ba(384,8)", "dense(2,300)", "dense(300,2)", "dense(40,40)", "random(64,0.3)",
                            "random(16,400,0.4)", "random(400,16,0.4)", "diagonal(50)", "dense(1,33)", "dense(1,32)"}) {
    const Layout layout = *Layout::from_graph(graph, {.block_size = 8}, 3);
    const Header& h = header_of(layout);
    EXPECT_LE(h.by_out.slots, most_slots(h.out_blocks, h.in_blocks, h.blocks)) << graph;
    EXPECT_LE(h.by_in.slots, most_slots(h.in_blocks, h.out_blocks, h.blocks)) << graph;
  }
  EXPECT_EQ(most_slots(128, 128, 4096), 2 * 64) << "rows of more than 64 blocks are cut";
  EXPECT_EQ(most_slots(64, 64, 4096), 0) << "no row is long enough";
  EXPECT_EQ(most_slots(0, 0, 0), 0);
}

TEST(LayoutView, OfTablesOnADevice) {
  const Layout layout = *Layout::from_graph("random(9,7,0.4)", {.block_size = 16, .out_features = 140}, 1);
  const LayoutView::Sizes sizes{16, 140, 112, layout.blocks()};
  const auto view = LayoutView::on_device(layout.index(), sizes, {DeviceType::cuda, 1});
  ASSERT_TRUE(view.ok()) << view.status().message();
  EXPECT_EQ(view->device, (Device{DeviceType::cuda, 1}));
  EXPECT_EQ(view->blocks, layout.blocks());
  EXPECT_FALSE(view->cut_by_out || view->cut_by_in);
  auto wrong = sizes;
  wrong.blocks += 20;
  EXPECT_FALSE(LayoutView::on_device(layout.index(), wrong, {}).ok());
  wrong = sizes;
  wrong.block_size = 12;
  EXPECT_FALSE(LayoutView::on_device(layout.index(), wrong, {}).ok());
  wrong = sizes;
  wrong.in_features = int64_t{1} << 60;
  EXPECT_FALSE(LayoutView::on_device(layout.index(), wrong, {}).ok());
}

TEST(LayoutView, TheNumberOfWordsTellsWhatIsCut) {
  for (const auto& [graph, by_out, by_in] :
       {std::tuple("dense(8,8)", false, false), std::tuple("dense(2,300)", true, false),
        std::tuple("dense(300,2)", false, true), std::tuple("ba(200,4)", true, true)}) {
    const Layout layout = *Layout::from_graph(graph, {.block_size = 8}, 1);
    const auto view = LayoutView::on_device(
        layout.index(), {8, layout.out_features(), layout.in_features(), layout.blocks()}, {DeviceType::cuda, 0});
    ASSERT_TRUE(view.ok()) << view.status().message();
    for (const LayoutView& v : {layout.view(), *view}) {
      EXPECT_EQ(v.cut_by_out, by_out) << graph;
      EXPECT_EQ(v.cut_by_in, by_in) << graph;
    }
    EXPECT_EQ(header_of(layout).by_out.splits > 0, by_out) << graph;
  }
}

}  // namespace
}  // namespace blocksparse::gemm
