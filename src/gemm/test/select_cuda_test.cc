// The choice of CUDA kernels.
#include <gtest/gtest.h>

#include "blocksparse/layout.h"
#include "core/ceil_div.h"
#include "core/index.h"
#include "gemm/cuda/families.h"
#include "gemm/cuda/stream_w/plan.h"
#include "gemm/cuda/stream_x/plan.h"
#include "gemm/cuda/tiled_f32/plan.h"
#include "gemm/cuda/w_in_smem/plan.h"
#include "gemm/cuda/wgmma/plan.h"

namespace blocksparse::gemm {
namespace {

std::string_view chosen(const CudaProblem& p, const cuda::Card& card) { return choose_family(p, card).name; }

TEST(SelectCuda, FamiliesAreFoundByTheirNames) {
  for (const Family& family : families()) EXPECT_EQ(find_family(family.name), &family);
  EXPECT_EQ(find_family("fastest"), nullptr);
  EXPECT_EQ(families().back().name, "generic") << "asked last, for it always answers";
}

TEST(SelectCuda, TheGenericFamilyAlwaysAnswers) {
  for (int32_t arch : {80, 86, 89, 90, 100, 120}) {
    for (int32_t block : {8, 16, 32, 64, 128}) {
      const CudaProblem p{.dtype = DType::f64, .block = block, .n = 1, .inputs = 1, .outputs = 1, .blocks = 1};
      EXPECT_TRUE(find_family("generic")->takes(p, {.arch = arch, .multiprocessors = 1}));
    }
  }
  EXPECT_FALSE(find_family("generic")->takes({}, {.arch = 75, .multiprocessors = 1}));
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
  EXPECT_EQ(chosen(p, a100), "tiled_f32");
  const auto but = [&](auto change) {
    CudaProblem other = p;
    change(other);
    return chosen(other, a100);
  };
  EXPECT_EQ(but([](CudaProblem& o) { o.tf32 = true; }), "tiled_f32");
  EXPECT_EQ(but([](CudaProblem& o) { o.pass = Pass::wgrad; }), "tiled_f32");
  EXPECT_EQ(but([](CudaProblem& o) { o.n = 64; }), "stream_w_f32");
  EXPECT_EQ(but([](CudaProblem& o) { o.n = 128; }), "generic") << "32 tiles for 108 multiprocessors";
  EXPECT_EQ(but([](CudaProblem& o) { o.tf32 = true, o.n = 512; }), "stream_w");
  EXPECT_EQ(but([](CudaProblem& o) { o.tf32 = true, o.n = 513; }), "tiled_f32");
  EXPECT_EQ(but([](CudaProblem& o) { o.tf32 = true, o.block = 16; }), "stream_w");
  EXPECT_EQ(but([](CudaProblem& o) { o.tf32 = true, o.gated = true; }), "stream_w");
  EXPECT_EQ(but([](CudaProblem& o) { o.tf32 = true, o.n = 256, o.pass = Pass::wgrad; }), "wgrad_stream");
  EXPECT_EQ(but([](CudaProblem& o) { o.tf32 = true, o.n = 512, o.pass = Pass::wgrad; }), "tiled_f32");
  EXPECT_EQ(but([](CudaProblem& o) { o.tf32 = true, o.n = 512, o.pass = Pass::wgrad, o.block = 8; }), "wgrad_stream");
  EXPECT_EQ(but([](CudaProblem& o) { o.n = 32, o.pass = Pass::wgrad; }), "tiled_f32") << "needs every bit";
  EXPECT_EQ(but([](CudaProblem& o) { o.dtype = DType::bf16; }), "stream_w");
  EXPECT_EQ(but([](CudaProblem& o) { o.x_in_rows = false; }), "generic");
  EXPECT_EQ(but([](CudaProblem& o) { o.w_aligned = false; }), "generic");
  EXPECT_EQ(but([](CudaProblem& o) { o.gated = true; }), "generic");
  EXPECT_EQ(but([](CudaProblem& o) { o.pass = Pass::wgrad, o.pairs = 2; }), "generic");
  EXPECT_EQ(but([](CudaProblem& o) { o.block = 8, o.inputs = o.outputs = 200000, o.blocks = 100000; }), "generic")
      << "lists that are much larger than W";
  EXPECT_EQ(tiled_f32::groups_of(p), 32);
  EXPECT_EQ(tiled_f32::workspace_places(p).end - tiled_f32::workspace_places(p).weights, 32 * 128 * 4 * 4);
  EXPECT_GE(tiled_f32::most_runs(p), 1600 / 8);
}

TEST(SelectCuda, RoundsOfFewTokensFillTheCard) {
  const auto round = [](int64_t inputs, DType dtype, bool tf32 = false, int64_t slots = 0) {
    return stream_w::round_tokens({.dtype = dtype, .inputs = inputs, .outputs = 4096, .slots = slots, .tf32 = tf32});
  };
  EXPECT_EQ(round(4096, DType::bf16), 2048);
  EXPECT_EQ(round(4096, DType::f32, true), 2048);
  EXPECT_EQ(round(256, DType::f16), 16384);
  EXPECT_EQ(round(0, DType::f16), 16384);
  EXPECT_EQ(round(100000, DType::bf16), stream_w::kMostTokens);
  EXPECT_EQ(round(256, DType::bf16, false, 9), stream_w::kMostTokens);
  EXPECT_EQ(round(5000, DType::bf16) % stream_w::kTokens, 0);
}

constexpr cuda::Card kH200 = {.arch = 90, .multiprocessors = 132, .sm90a = true};

TEST(SelectCuda, FewTokensHaveAKernelOfTheirOwn) {
  const CudaProblem p{.dtype = DType::bf16, .block = 32, .n = 32, .inputs = 4096, .outputs = 4096, .blocks = 1600};
  EXPECT_EQ(chosen(p, kH200), "stream_w");
  EXPECT_EQ(chosen(p, {.arch = 80, .multiprocessors = 108}), "stream_w");
  const auto but = [&p](auto change) {
    CudaProblem other = p;
    change(other);
    return chosen(other, kH200);
  };
  EXPECT_EQ(but([](CudaProblem& o) { o.n = 1; }), "stream_w");
  EXPECT_EQ(but([](CudaProblem& o) { o.n = 64; }), "stream_w");
  EXPECT_EQ(but([](CudaProblem& o) { o.n = 65, o.block = 16; }), "stream_w");
  EXPECT_EQ(but([](CudaProblem& o) { o.n = 65, o.dtype = DType::f32; }), "generic");
  EXPECT_EQ(but([](CudaProblem& o) { o.dtype = DType::f16; }), "stream_w");
  EXPECT_EQ(but([](CudaProblem& o) { o.dtype = DType::f32; }), "stream_w_f32");
  EXPECT_EQ(but([](CudaProblem& o) { o.dtype = DType::f64; }), "generic");
  EXPECT_EQ(but([](CudaProblem& o) { o.pass = Pass::dgrad; }), "stream_w");
  EXPECT_EQ(but([](CudaProblem& o) { o.inputs = o.outputs = 4093; }), "stream_w") << "ragged";
  EXPECT_EQ(but([](CudaProblem& o) { o.w_aligned = false; }), "generic");
  EXPECT_EQ(but([](CudaProblem& o) { o.blocks = int64_t{1} << 27; }), "generic") << "offsets of 32 bits";
}

TEST(SelectCuda, FewTokensOfManyOutputsHaveItToo) {
  CudaProblem p{.dtype = DType::bf16, .block = 32, .n = 1, .inputs = 256, .outputs = int64_t{4} << 20, .blocks = 9000};
  EXPECT_EQ(chosen(p, kH200), "stream_w") << "for few inputs a round is long, of which y knows nothing";
  p.outputs = int64_t{1} << 26;
  EXPECT_NE(chosen(p, kH200), "stream_w");
  std::swap(p.inputs, p.outputs);
  EXPECT_NE(chosen(p, kH200), "stream_w");
}

// 64 images of 14 x 14, 8 x 8 and 7 x 7, as convolutions of one tap have them.
TEST(SelectCuda, FewFeaturesOfLargeBlocksAreReadForEachBlock) {
  const auto of = [](int64_t n, int64_t features, int64_t blocks, int32_t block = 64) {
    const CudaProblem p{
        .dtype = DType::bf16, .block = block, .n = n, .inputs = features, .outputs = features, .blocks = blocks};
    return chosen(p, kH200);
  };
  EXPECT_EQ(of(12544, 256, 4), "row_wgmma");
  EXPECT_EQ(of(4096, 256, 2), "row_wgmma");
  EXPECT_EQ(of(3136, 512, 16), "row_wgmma");
  EXPECT_EQ(of(4096, 256, 2, 128), "row_wgmma");
  EXPECT_EQ(of(4096, 1024, 102), "row_wgmma");
  EXPECT_EQ(of(4096, 1024, 128), "wgmma") << "x is read often";
  EXPECT_EQ(of(12544, 512, 32), "row_wgmma");
  EXPECT_EQ(of(4096, 2048, 20), "wgmma") << "x and y do not stay in L2";
  EXPECT_EQ(of(16385, 128, 2), "wgmma") << "not measured";
  EXPECT_EQ(of(12544, 256, 16, 32), "w_in_smem");
}

TEST(SelectCuda, StreamXHasShortTilesInOneWave) {
  CudaProblem p{.dtype = DType::bf16, .block = 32, .n = 512, .inputs = 4096, .outputs = 4096, .blocks = 4096};
  EXPECT_EQ(stream_x::tokens_of_tile(p, kH200), 64);
  EXPECT_EQ(chosen(p, kH200), "stream_x");
  p.n = 577;
  EXPECT_EQ(stream_x::tokens_of_tile(p, kH200), 128) << "160 tiles of 64 tokens are more than 132";
  p.n = 384, p.blocks = 1638;
  EXPECT_EQ(chosen(p, kH200), "stream_x") << "10 % of the blocks";
  p.n = 512;
  EXPECT_EQ(chosen(p, kH200), "row_wgmma");
}

TEST(SelectCuda, ManyTokensHaveAKernelOnHopper) {
  const CudaProblem p{.dtype = DType::bf16, .block = 64, .n = 4096, .inputs = 4096, .outputs = 4096, .blocks = 400};
  EXPECT_EQ(chosen(p, kH200), "wgmma");
  for (const cuda::Card& card :
       {cuda::Card{.arch = 80, .multiprocessors = 108}, cuda::Card{.arch = 100, .multiprocessors = 148},
        cuda::Card{.arch = 90, .multiprocessors = 132}}) {
    EXPECT_EQ(chosen(p, card), "stream_w") << card.arch << " without code for 9.0a";
  }
  const auto but = [&p](auto change) {
    CudaProblem other = p;
    change(other);
    return chosen(other, kH200);
  };
  EXPECT_EQ(but([](CudaProblem& o) { o.n = 2049; }), "wgmma");
  // Features-first x, which row_wgmma does not take: the choice among the others.
  EXPECT_EQ(but([](CudaProblem& o) { o.x_first = true, o.n = 257; }), "wgmma");
  EXPECT_EQ(but([](CudaProblem& o) { o.x_first = true, o.n = 256; }), "stream_w") << "32 tiles";
  EXPECT_EQ(but([](CudaProblem& o) { o.x_first = true, o.n = 256, o.outputs *= 2; }), "wgmma");
  EXPECT_EQ(but([](CudaProblem& o) { o.x_first = true, o.n = 255, o.outputs *= 2; }), "stream_w");
  EXPECT_EQ(but([](CudaProblem& o) { o.x_first = true, o.n = 512, o.inputs = o.outputs = 1024, o.blocks = 64; }),
            "stream_w");
  EXPECT_EQ(but([](CudaProblem& o) { o.gated = true; }), "wgmma");
  EXPECT_EQ(but([](CudaProblem& o) { o.x_first = true; }), "wgmma");
  EXPECT_EQ(but([](CudaProblem& o) { o.x_in_rows = false; }), "stream_w");
  EXPECT_EQ(but([](CudaProblem& o) { o.w_aligned = false; }), "wgmma") << "W is copied";
  EXPECT_EQ(but([](CudaProblem& o) { o.dtype = DType::f32; }), "tiled_f32");
  EXPECT_EQ(but([](CudaProblem& o) { o.outputs -= 3; }), "wgmma");
  EXPECT_EQ(but([](CudaProblem& o) { o.inputs -= 3; }), "wgmma") << "W is copied, and cleared";
  EXPECT_EQ(but([](CudaProblem& o) { o.inputs -= 3, o.block = 32; }), "wgmma");
  EXPECT_EQ(but([](CudaProblem& o) { o.n = stream_w::kMostTokens, o.block = 32; }), "row_wgmma");
  EXPECT_EQ(but([](CudaProblem& o) { o.n = 2049, o.block = 32; }), "wgmma");
  EXPECT_EQ(but([](CudaProblem& o) { o.inputs = 64 * (wgmma::kMostChunks + 1); }), "stream_w");
}

TEST(SelectCuda, ManyTokensOfSmallBlocksAreSwept) {
  const CudaProblem p{.dtype = DType::bf16, .block = 16, .n = 4096, .inputs = 4096, .outputs = 4096, .blocks = 6554};
  const auto but = [&p](auto change) {
    CudaProblem other = p;
    change(other);
    return chosen(other, kH200);
  };
  EXPECT_EQ(but([](CudaProblem&) {}), "stream_x");
  EXPECT_EQ(but([](CudaProblem& o) { o.pass = Pass::dgrad, o.by_in = true; }), "stream_x");
  EXPECT_EQ(but([](CudaProblem& o) { o.outputs -= 3; }), "stream_x");
  EXPECT_EQ(but([](CudaProblem& o) { o.blocks = 28000; }), "stream_x");
  EXPECT_EQ(but([](CudaProblem& o) { o.blocks = 30000; }), "wgmma") << "nearly as fast as a dense product";
  EXPECT_EQ(but([](CudaProblem& o) { o.blocks = 900; }), "wgmma") << "x is swept for little";
  EXPECT_EQ(but([](CudaProblem& o) { o.block = 8, o.blocks = 50000; }), "stream_x");
  EXPECT_EQ(but([](CudaProblem& o) { o.block = 8, o.blocks = 54000; }), "wgmma");
  EXPECT_EQ(but([](CudaProblem& o) { o.block = 32, o.blocks = 4000; }), "stream_x");
  EXPECT_EQ(but([](CudaProblem& o) { o.block = 32, o.blocks = 1600; }), "wgmma");
  EXPECT_EQ(but([](CudaProblem& o) { o.block = 32, o.blocks = 4000, o.n = 8192; }), "wgmma");
  EXPECT_EQ(but([](CudaProblem& o) { o.n = stream_w::kMostTokens; }), "stream_x");
  EXPECT_EQ(but([](CudaProblem& o) { o.n = stream_w::kMostTokens - 1; }), "stream_w");
  EXPECT_EQ(but([](CudaProblem& o) { o.outputs = 256; }), "wgmma") << "32 tiles for 132 processors";
  EXPECT_EQ(but([](CudaProblem& o) { o.slots = 100; }), "stream_x");
  EXPECT_EQ(but([](CudaProblem& o) { o.slots = 100, o.blocks = 2000; }), "wgmma") << "hubs of 256 blocks";
  // Problems that stream_x cannot do.
  EXPECT_EQ(but([](CudaProblem& o) { o.inputs -= 3; }), "wgmma") << "W may hold anything there";
  EXPECT_EQ(but([](CudaProblem& o) { o.gated = true; }), "wgmma");
  EXPECT_EQ(but([](CudaProblem& o) { o.w_aligned = false; }), "wgmma");
  EXPECT_EQ(but([](CudaProblem& o) { o.x_first = true; }), "wgmma");
  EXPECT_EQ(but([](CudaProblem& o) { o.x_in_rows = false; }), "stream_w");
  EXPECT_EQ(chosen(p, {.arch = 90, .multiprocessors = 132}), "stream_w") << "without code for 9.0a";
}

TEST(SelectCuda, FewFeaturesAreKeptInSharedMemory) {
  const CudaProblem p{.dtype = DType::bf16, .block = 16, .n = 50176, .inputs = 256, .outputs = 256, .blocks = 64};
  const auto but = [&p](auto change) {
    CudaProblem other = p;
    change(other);
    return chosen(other, kH200);
  };
  EXPECT_EQ(but([](CudaProblem&) {}), "w_in_smem");
  EXPECT_EQ(but([](CudaProblem& o) { o.block = 32, o.blocks = 16, o.pass = Pass::dgrad; }), "w_in_smem");
  EXPECT_EQ(but([](CudaProblem& o) { o.block = 64, o.blocks = 4; }), "wgmma") << "boxes of W";
  EXPECT_EQ(but([](CudaProblem& o) { o.n = 256; }), "w_in_smem");
  EXPECT_EQ(but([](CudaProblem& o) { o.n = 255; }), "stream_w");
  EXPECT_EQ(but([](CudaProblem& o) { o.n = 16384, o.block = 8, o.blocks = 256; }), "w_in_smem");
  EXPECT_EQ(but([](CudaProblem& o) { o.block = 8, o.blocks = 256; }), "wgmma");
  EXPECT_EQ(but([](CudaProblem& o) { o.inputs -= 3, o.outputs -= 3; }), "w_in_smem") << "cleared as it is copied";
  EXPECT_EQ(but([](CudaProblem& o) { o.outputs = 513; }), "wgmma");
  EXPECT_EQ(but([](CudaProblem& o) { o.inputs = 1025; }), "wgmma");
  EXPECT_EQ(but([](CudaProblem& o) { o.blocks = 128; }), "wgmma") << "bound by its products";
  EXPECT_EQ(w_in_smem::plan_of({.block = 32, .n = 4096, .inputs = 512, .outputs = 512, .blocks = 140}), std::nullopt)
      << "no room for two tiles of x";
  EXPECT_EQ(but([](CudaProblem& o) { o.gated = true; }), "wgmma");
  EXPECT_EQ(but([](CudaProblem& o) { o.w_aligned = false; }), "wgmma");
  EXPECT_EQ(but([](CudaProblem& o) { o.x_first = true; }), "wgmma");
  EXPECT_EQ(chosen(p, {.arch = 80, .multiprocessors = 108}), "stream_w");
  const auto plan = w_in_smem::plan_of(p);
  ASSERT_TRUE(plan);
  EXPECT_EQ(plan->tokens, 64);
  EXPECT_EQ(plan->warp_tiles(), w_in_smem::kWarps) << "one each";
  EXPECT_EQ(plan->tiles, 784);
  EXPECT_EQ(plan->stages, 5);
  EXPECT_LE(plan->shared_bytes(), w_in_smem::kSharedBytes);
  CudaProblem wide = p;
  wide.outputs = 512;
  EXPECT_EQ(w_in_smem::plan_of(wide)->tokens, 32);
  EXPECT_EQ(w_in_smem::plan_of(wide)->warp_tiles(), w_in_smem::kWarps);
}

TEST(SelectCuda, CardsWithoutThemDoNotLoadHoppersKernels) {
  constexpr cuda::Card kAmpere = {.arch = 80, .multiprocessors = 108};
  EXPECT_FALSE(find_family("row_wgmma")->runs(kAmpere));
  EXPECT_FALSE(find_family("wgmma")->runs(kAmpere)) << "they ask for more shared memory than there is";
  EXPECT_TRUE(find_family("stream_w")->runs(kAmpere));
  EXPECT_TRUE(find_family("wgmma")->runs(kH200));
}

TEST(SelectCuda, ManyTokensArePlannedByBlockAndDensity) {
  CudaProblem p{.dtype = DType::bf16, .block = 8, .n = 4096, .inputs = 4096, .outputs = 1000, .blocks = 512 * 125 / 4};
  EXPECT_EQ(wgmma::plan_of(p).kind, wgmma::Kind::filled);
  EXPECT_EQ(wgmma::plan_of(p).tiles, 8);
  EXPECT_EQ(wgmma::plan_of(p).patches, 8 * 64 * 2) << "W as if it were dense";
  p.blocks /= 10;
  EXPECT_EQ(wgmma::plan_of(p).kind, wgmma::Kind::patches16);
  EXPECT_EQ(wgmma::plan_of(p).patches, p.blocks);
  for (const int32_t block : {16, 32}) {
    const int64_t grid = 4096 / block * ceil_div(1000, block);
    p.block = block;
    p.blocks = grid * 6 / 10;
    EXPECT_EQ(wgmma::plan_of(p).kind, wgmma::Kind::filled) << block;
    p.blocks = grid / 4;
    EXPECT_EQ(wgmma::plan_of(p).kind, block == 16 ? wgmma::Kind::patches16 : wgmma::Kind::patches32);
  }
  p.block = 128;
  EXPECT_EQ(wgmma::plan_of(p).kind, wgmma::Kind::direct);
  EXPECT_EQ(wgmma::plan_of(p).records, 2 * p.blocks);
  const wgmma::WorkspacePlaces direct = wgmma::workspace_places(wgmma::plan_of(p), p.block);
  EXPECT_EQ(direct.copy, direct.patches) << "there are no patches";
  EXPECT_GE(direct.end - direct.copy, p.blocks * 128 * 128 * 2) << "room for a copy";
  p.block = 32;
  const wgmma::WorkspacePlaces at = wgmma::workspace_places(wgmma::plan_of(p), p.block);
  EXPECT_EQ(at.copy - at.patches, p.blocks * 32 * 32 * 2);
  EXPECT_EQ(at.end, at.copy);
}

TEST(SelectCuda, FewTokensArePlannedBySizesAndCard) {
  CudaProblem p{.dtype = DType::bf16, .inputs = 12288, .outputs = 12288, .blocks = 14745};  // 384 x 384, density .1
  const auto tokens = [&p](int32_t block, int64_t n, bool gated = false) {
    p.block = block;
    p.n = n;
    return stream_w::plan_of(p, gated, kH200).tokens;
  };
  EXPECT_EQ(tokens(32, 1), 8);
  EXPECT_EQ(tokens(32, 9), 32);
  EXPECT_EQ(tokens(128, 33), 64);
  EXPECT_EQ(tokens(8, 1), 16);
  EXPECT_EQ(tokens(16, 17), 32);
  EXPECT_EQ(tokens(32, 1, true), 32);
  EXPECT_EQ(tokens(8, 64, true), 64);

  p.block = 32;
  EXPECT_EQ(stream_w::plan_of(p, false, kH200).warps, 4) << "384 strips";
  EXPECT_EQ(stream_w::plan_of(p, false, {.arch = 100, .multiprocessors = 400}).warps, 8);
  p.outputs = 4096;
  EXPECT_EQ(stream_w::plan_of(p, false, kH200).warps, 8) << "128 strips";
  EXPECT_EQ(stream_w::plan_of(p, false, {.arch = 80, .multiprocessors = 108}).warps, 4);
  p.slots = 5;
  EXPECT_EQ(stream_w::plan_of(p, false, kH200).warps, 4);
  p.slots = 0;
  p.dtype = DType::f32;
  EXPECT_EQ(stream_w::plan_of(p, false, kH200).warps, 8);
  EXPECT_EQ(stream_w::plan_of(p, false, {.arch = 89, .multiprocessors = 142}).warps, 4) << "less shared memory";
  p.n = 1;
  EXPECT_EQ(stream_w::plan_of(p, true, kH200).tokens, 8);
  EXPECT_FALSE(stream_w::plan_of(p, true, kH200).pack);

  p = {.dtype = DType::bf16, .block = 32, .n = 64, .inputs = 12288, .outputs = 12288, .blocks = 14745};
  EXPECT_FALSE(stream_w::plan_of(p, false, kH200).pack) << "density .1";
  p.blocks *= 2;
  EXPECT_TRUE(stream_w::plan_of(p, false, kH200).pack);
  p.n = 32;
  EXPECT_FALSE(stream_w::plan_of(p, false, kH200).pack);
  p.block = 16;
  EXPECT_TRUE(stream_w::plan_of(p, false, kH200).pack);
}

// The bound has to hold for every layout.
TEST(SelectCuda, NoLayoutHasMoreSlotsThanItsSizesAllow) {
  for (const char* graph : {"ba(200,4)", "ba(384,8)", "dense(2,300)", "dense(300,2)", "dense(40,40)", "random(64,0.3)",
                            "random(16,400,0.4)", "random(400,16,0.4)", "diagonal(50)", "dense(1,33)", "dense(1,32)"}) {
    const Layout layout = *Layout::from_graph(graph, {.block_size = 8}, 3);
    const Header h = header_of(layout);
    EXPECT_LE(h.by_out.slots, most_slots(h.out_blocks, h.in_blocks, h.blocks)) << graph;
    EXPECT_LE(h.by_in.slots, most_slots(h.in_blocks, h.out_blocks, h.blocks)) << graph;
  }
  EXPECT_EQ(most_slots(128, 128, 4096), 2 * 64) << "rows of more than 64 blocks are cut";
  EXPECT_EQ(most_slots(64, 64, 4096), 0) << "no row is long enough";
  EXPECT_EQ(most_slots(0, 0, 0), 0);
}

}  // namespace
}  // namespace blocksparse::gemm
