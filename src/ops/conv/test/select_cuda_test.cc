// Which kernel does a convolution on a card, for cards that are not here.
#include "ops/conv/cuda/select.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <climits>
#include <optional>
#include <vector>

#include "cuda/divider.h"
#include "ops/conv/cuda/gather/phases.h"
#include "ops/conv/cuda/halo/plan.h"

namespace blocksparse::conv {
namespace {

constexpr cuda::Card kHopper{.arch = 90, .multiprocessors = 132, .shared_bytes = 227 * 1024, .sm90a = true};
constexpr cuda::Card kAmpere{.arch = 80, .multiprocessors = 108, .shared_bytes = 163 * 1024, .sm90a = false};

Gather gather_of(int64_t kernel, int64_t stride, int64_t padding, bool inverse = false) {
  return {.inverse = inverse,
          .kernel = {1, kernel, kernel},
          .stride = {1, stride, stride},
          .dilation = {1, 1, 1},
          .padding = {0, padding, padding}};
}

Product product_of(const Layout& layout, DType dtype, const Gather& gather, int64_t hw, int64_t out_hw) {
  return {.dtype = dtype,
          .layout = layout.view(),
          .gather = gather,
          .x = {.n = 64, .channels = layout.in_features(), .size = {1, hw, hw}},
          .y = {.n = 64, .channels = layout.out_features(), .size = {1, out_hw, out_hw}}};
}

class ConvSelect : public testing::Test {
 protected:
  const Layout layout_ = *Layout::from_graph("random(8,8,0.25)", {.block_size = 32}, 1);
};

TEST_F(ConvSelect, OneTapInPlaceIsTheLinearOp) {
  for (DType dtype : {DType::f32, DType::bf16}) {
    const Product p = product_of(layout_, dtype, gather_of(1, 1, 0), 28, 28);
    EXPECT_EQ(choose_cuda_way(p, kHopper), CudaWay::pointwise);
    EXPECT_EQ(choose_cuda_way(p, kAmpere), CudaWay::pointwise);
  }
  EXPECT_NE(choose_cuda_way(product_of(layout_, DType::bf16, gather_of(1, 2, 0), 28, 14), kHopper), CudaWay::pointwise);
  EXPECT_NE(choose_cuda_way(product_of(layout_, DType::bf16, gather_of(1, 1, 1), 28, 30), kHopper), CudaWay::pointwise);
  EXPECT_NE(choose_cuda_way(product_of(layout_, DType::bf16, gather_of(1, 1, 0), 28, 29), kHopper), CudaWay::pointwise);
}

TEST_F(ConvSelect, ImagesThatTheCopyingHardwareWalks) {
  Product p = product_of(layout_, DType::bf16, gather_of(3, 1, 1), 28, 28);
  EXPECT_EQ(choose_cuda_way(p, kHopper), CudaWay::halo);
  EXPECT_EQ(choose_cuda_way(p, kAmpere), CudaWay::generic);
  EXPECT_EQ(choose_cuda_way(product_of(layout_, DType::bf16, gather_of(3, 2, 1), 28, 14), kHopper), CudaWay::gather);
  EXPECT_EQ(choose_cuda_way(product_of(layout_, DType::f32, gather_of(3, 1, 1), 28, 28), kHopper), CudaWay::generic);
  p.x.channels_last = p.y.channels_last = false;
  EXPECT_EQ(choose_cuda_way(p, kHopper), CudaWay::generic);
}

TEST_F(ConvSelect, InverseGathersAreDoneByPhases) {
  EXPECT_EQ(choose_cuda_way(product_of(layout_, DType::f16, gather_of(3, 1, 1, true), 28, 28), kHopper), CudaWay::halo);
  Product p = product_of(layout_, DType::f16, gather_of(3, 2, 1, true), 14, 28);
  EXPECT_EQ(choose_cuda_way(p, kHopper), CudaWay::gather);
  p.residual = p.y;
  p.residual.data = &p;
  EXPECT_EQ(choose_cuda_way(p, kHopper), CudaWay::generic);
}

TEST_F(ConvSelect, StridesMayBeLarge) {
  Product p = product_of(layout_, DType::bf16, gather_of(1, int64_t{1} << 30, 0, true), 1, 1);
  p.gather.stride[0] = 16;  // 2^64 phases
  EXPECT_EQ(choose_cuda_way(p, kHopper), CudaWay::generic);
  EXPECT_GT(phase_count(p.gather), 64);
}

// Every phase together reads what Gather::source says, once.
TEST_F(ConvSelect, PhasesAreTheInverseGather) {
  for (int64_t kernel : {1, 2, 3, 4, 5}) {
    for (int64_t stride : {1, 2, 3, 4}) {
      for (int64_t dilation : {1, 2, 3, 4}) {
        for (int64_t padding : {0, 1, 3}) {
          Gather g = gather_of(kernel, stride, padding, true);
          g.dilation = {1, dilation, dilation};
          const Images x{.n = 1, .channels = 32, .size = {1, 7, 9}}, y{.n = 1, .channels = 32, .size = {1, 20, 23}};
          std::vector<int> found(static_cast<size_t>(y.size[2] * kernel), INT_MIN);
          int64_t pixels = 0;
          for (int64_t i = 0; i < phase_count(g); ++i) {
            const Phase phase = phase_of(g, x, y, 32, i);
            pixels += phase.tokens();
            if (i / stride != 0) continue;  // of the first row's phases, for the width
            for (int64_t q = 0; q < phase.x.positions[0]; ++q) {
              for (int64_t j = 0; j < phase.taps.count[2]; ++j) {
                const int64_t tap = phase.taps.start[2] + j * phase.taps.step[2], place = phase.taps.count[2] - 1 - j;
                const int64_t pixel = phase.y.first[0] + q * phase.y.stride[0];
                found[static_cast<size_t>(pixel * kernel + tap)] =
                    static_cast<int>(phase.x.first[0] + q * phase.x.stride[0] + place * phase.x.dilation[0]);
              }
            }
          }
          EXPECT_EQ(pixels, y.pixels());
          for (int64_t pixel = 0; pixel < y.size[2]; ++pixel) {
            for (int64_t tap = 0; tap < kernel; ++tap) {
              const int got = found[static_cast<size_t>(pixel * kernel + tap)];
              const auto want = g.source(2, pixel, tap, x.size[2]);
              EXPECT_EQ(got >= 0 && got < x.size[2] ? std::optional<int64_t>(got) : std::nullopt, want);
            }
          }
        }
      }
    }
  }
}

// Of three slices that a stride of 3 made one of, the second has no pixel of it: that is not the same as all of the
// first.
TEST_F(ConvSelect, ASliceBeyondTheOnlyOneIsNotThatOne) {
  Gather g = gather_of(3, 1, 1, true);
  g.kernel[0] = 3, g.stride[0] = 3, g.dilation[0] = 2, g.padding[0] = 2;
  const Images x{.n = 5, .channels = 32, .size = {1, 5, 8}}, y{.n = 5, .channels = 32, .size = {3, 5, 8}};
  for (int64_t slice = 0; slice < 3; ++slice) {
    const Phase phase = phase_of(g, x, y, 32, slice);
    EXPECT_EQ(phase.x.first[2], slice == 1 ? 1 : 0);
    EXPECT_EQ(phase.x.deep(), slice == 1);
  }
}

TEST_F(ConvSelect, RaggedChannelsAreGeneric) {
  const Layout ragged =
      *Layout::from_graph("random(8,8,0.25)", {.block_size = 32, .out_features = 248, .in_features = 250}, 1);
  EXPECT_EQ(choose_cuda_way(product_of(ragged, DType::bf16, gather_of(3, 1, 1), 28, 28), kHopper), CudaWay::generic);
}

TEST_F(ConvSelect, TheWorkspaceHoldsTablesAndACopyOfWAlone) {
  const Product p = product_of(layout_, DType::bf16, gather_of(3, 1, 1), 28, 28);
  EXPECT_LT(cuda_workspace_bytes(p), size_t{1} << 20);
  EXPECT_EQ(cuda_workspace_bytes(product_of(layout_, DType::f32, gather_of(3, 1, 1), 28, 28)), 0u);
  const WeightGradient g{.dtype = DType::bf16,
                         .dw_dtype = DType::bf16,
                         .layout = layout_.view(),
                         .gather = gather_of(3, 1, 1),
                         .rows = p.y,
                         .columns = p.x};
  EXPECT_EQ(choose_cuda_way(g, kHopper), CudaWay::halo);
  EXPECT_LT(cuda_workspace_bytes(g), size_t{64} << 20);
  // As if it were dense this W would take 72 MiB.
  const Layout wide = *Layout::from_graph("random(128,128,0.4)", {.block_size = 16}, 1);
  const Product filled = product_of(wide, DType::bf16, gather_of(3, 1, 1), 7, 7);
  EXPECT_EQ(choose_cuda_way(filled, kHopper), CudaWay::gather);
  EXPECT_LT(cuda_workspace_bytes(filled), size_t{64} << 20);
}

TEST_F(ConvSelect, TapsShareWhatIsInSharedMemoryWhereItFits) {
  const Layout layout = *Layout::from_graph("random(4,4,0.25)", {.block_size = 64}, 1);
  const auto way = [&](const Gather& gather, int64_t hw) {
    const int64_t reach = (gather.kernel[1] - 1) * gather.dilation[1];
    return choose_cuda_way(product_of(layout, DType::bf16, gather, hw, hw + 2 * gather.padding[1] - reach), kHopper);
  };
  EXPECT_EQ(way(gather_of(5, 1, 2), 28), CudaWay::halo);
  EXPECT_EQ(way(gather_of(3, 1, 1), 112), CudaWay::halo);
  EXPECT_EQ(way(gather_of(5, 1, 2), 224), CudaWay::gather) << "five rows of an image do not fit";
  EXPECT_EQ(way(gather_of(3, 1, 1), 2), CudaWay::gather) << "most of the raster is zeros";
  Product p = product_of(layout, DType::bf16, gather_of(3, 1, 1), 28, 28);
  p.residual = p.y, p.residual.data = &p;
  EXPECT_EQ(choose_cuda_way(p, kHopper), CudaWay::gather);
  const Layout wide = *Layout::from_graph("random(2,2,1)", {.block_size = 128}, 1);
  EXPECT_EQ(choose_cuda_way(product_of(wide, DType::bf16, gather_of(3, 1, 1), 28, 28), kHopper), CudaWay::gather);
  WeightGradient g{.dtype = DType::bf16,
                   .dw_dtype = DType::bf16,
                   .layout = layout.view(),
                   .gather = gather_of(3, 1, 1),
                   .rows = p.y,
                   .columns = p.x};
  EXPECT_EQ(choose_cuda_way(g, kHopper), CudaWay::halo);
  g.dgates = &g;
  EXPECT_EQ(choose_cuda_way(g, kHopper), CudaWay::gather);
  g.dgates = nullptr;
  for (const SpatialSizes& kernel :
       {SpatialSizes{1, 2, 2}, SpatialSizes{1, 2, 3}, SpatialSizes{1, 3, 2}, SpatialSizes{1, 1, 3}}) {
    g.gather.kernel = kernel;
    EXPECT_EQ(choose_cuda_way(g, kHopper), CudaWay::halo);
    EXPECT_EQ(plan_halo_gradient(g)->tap_rows, kernel[1]);
    EXPECT_EQ(plan_halo_gradient(g)->tap_columns, kernel[2]);
  }
  g.gather = gather_of(5, 1, 2);
  EXPECT_EQ(choose_cuda_way(g, kHopper), CudaWay::gather);
}

// PixelCNN++'s: four groups of 32, behind concat-ELU.
TEST_F(ConvSelect, AGradientOfOneTapIsAProductUnlessItHasFewBlocks) {
  const auto way = [](std::string_view graph, int32_t block, int64_t hw) {
    const Layout layout = *Layout::from_graph(graph, {.block_size = block}, 1);
    const Product p = product_of(layout, DType::bf16, gather_of(1, 1, 0), hw, hw);
    const WeightGradient g{.dtype = DType::bf16,
                           .dw_dtype = DType::bf16,
                           .layout = layout.view(),
                           .gather = gather_of(1, 1, 0),
                           .rows = p.y,
                           .columns = p.x};
    EXPECT_EQ(choose_cuda_way(p, kHopper), CudaWay::pointwise);
    return choose_cuda_way(g, kHopper);
  };
  EXPECT_EQ(way("random(4,8,0.25)", 32, 32), CudaWay::halo);
  EXPECT_EQ(way("random(4,16,0.25)", 32, 32), CudaWay::halo);
  EXPECT_EQ(way("random(4,8,0.25)", 32, 5), CudaWay::pointwise) << "few tokens";
  EXPECT_EQ(way("random(8,8,0.25)", 32, 14), CudaWay::halo_block);
  EXPECT_EQ(way("random(8,8,0.25)", 32, 28), CudaWay::halo_block);
  EXPECT_EQ(way("random(8,8,0.25)", 32, 29), CudaWay::pointwise);
  EXPECT_EQ(way("random(4,4,0.25)", 64, 14), CudaWay::halo);
  EXPECT_EQ(way("random(16,16,0.25)", 32, 32), CudaWay::pointwise);
  EXPECT_EQ(way("dense(4,4)", 64, 32), CudaWay::pointwise);
}

TEST_F(ConvSelect, TheGenericGradientHasThreadBlocksEnough) {
  const Product p = product_of(layout_, DType::f32, gather_of(3, 1, 1), 28, 28);
  WeightGradient g{.dtype = DType::f32,
                   .dw_dtype = DType::f32,
                   .layout = layout_.view(),
                   .gather = gather_of(3, 1, 1),
                   .rows = p.y,
                   .columns = p.x};
  EXPECT_GT(generic_slices(g), 8);
  EXPECT_EQ(cuda_workspace_bytes(g), static_cast<size_t>(generic_workspace(g)));
  EXPECT_LT(cuda_workspace_bytes(g), size_t{33} << 20);
  g.dgates = &g;
  EXPECT_EQ(generic_slices(g), 1) << "all taps of a block are summed by one";
  g.dgates = nullptr, g.rows.n = g.columns.n = 1;
  EXPECT_EQ(generic_slices(g), 1) << "784 pixels";
}

TEST_F(ConvSelect, DensityDecides) {
  const auto way = [](std::string_view graph, int32_t block, int64_t hw = 28) {
    const Layout layout = *Layout::from_graph(graph, {.block_size = block}, 1);
    return choose_cuda_way(product_of(layout, DType::bf16, gather_of(3, 1, 1), hw, hw), kHopper);
  };
  EXPECT_EQ(way("random(8,8,0.25)", 32), CudaWay::halo);
  EXPECT_EQ(way("random(8,8,0.5)", 32), CudaWay::gather);
  EXPECT_EQ(way("random(4,4,1)", 64), CudaWay::halo);
  EXPECT_EQ(way("random(2,2,0.25)", 128), CudaWay::halo);
  EXPECT_EQ(way("random(2,2,0.5)", 128), CudaWay::gather);
  EXPECT_EQ(way("random(16,16,0.25)", 16), CudaWay::gather);
  EXPECT_EQ(way("random(16,16,0.25)", 16, 14), CudaWay::halo) << "gather makes tables";
  EXPECT_EQ(way("random(16,16,0.35)", 16, 14), CudaWay::gather);
  EXPECT_EQ(way("random(16,16,0.5)", 16, 8), CudaWay::halo);
  EXPECT_EQ(way("random(16,16,0.6)", 16, 8), CudaWay::gather);
  EXPECT_EQ(way("random(32,32,0.25)", 16, 7), CudaWay::halo);
  EXPECT_EQ(way("random(64,64,0.25)", 16, 7), CudaWay::gather);
  EXPECT_EQ(way("random(16,16,0.12)", 16), CudaWay::halo);
  EXPECT_EQ(way("diagonal(16)", 16), CudaWay::halo);
  EXPECT_EQ(way("diagonal(32)", 8), CudaWay::gather);
}

TEST_F(ConvSelect, TwoThreadBlocksShareAnSMWhereTheyFit) {
  const auto plan = [](int32_t block, int64_t hw) {
    const Layout layout = *Layout::from_graph("random(4,4,0.5)", {.block_size = block}, 1);
    return plan_halo_product(product_of(layout, DType::bf16, gather_of(3, 1, 1), hw, hw));
  };
  for (int32_t block : {16, 32, 64, 128}) {
    for (int64_t hw : {7, 14, 28, 56, 112}) {
      const auto p = plan(block, hw);
      ASSERT_TRUE(p) << block << " " << hw;
      EXPECT_GE(p->stages, p->resident == 2 ? 4 : 3);
      EXPECT_EQ(p->groups * p->resident, 4);
      EXPECT_EQ(p->stage_taps, block == 16 ? 9 : block == 32 ? 3 : 1);
      EXPECT_EQ(p->resident, hw <= (block == 16 ? 56 : 28) ? 2 : 1) << block << " " << hw;
      EXPECT_LE(p->shared_bytes(), p->resident == 2 ? kHaloHalfBytes : kHaloWholeBytes);
      EXPECT_GE(p->jobs * kHaloJob, p->raster.positions);
      EXPECT_EQ(p->rows, p->tile_jobs * kHaloJob + p->raster.reach);
    }
  }
  EXPECT_EQ(plan(64, 8)->tile_jobs, 2) << "a job for each warpgroup: 4 x 81 jobs for 264 thread blocks";
  EXPECT_EQ(plan(32, 8)->tile_jobs, 1) << "2 x 81 jobs";
  EXPECT_EQ(plan(64, 14)->tile_jobs, 4);
}

// Which pixel of x position `at` of a raster is, if it is one.
std::optional<std::array<int64_t, 3>> pixel_of(const Raster& raster, const Phase& phase, int64_t n, int64_t at) {
  const int64_t row = at / raster.width % raster.height + phase.x.first[1],
                column = at % raster.width + phase.x.first[0];
  const int64_t image = at / raster.width / raster.height;
  if (image >= n || row < 0 || row >= phase.x.size[1] || column < 0 || column >= phase.x.size[0]) return std::nullopt;
  return std::array{image, row, column};
}

void expect_taps_in_raster(const Gather& g, const Images& x, const Images& y) {
  const Phase phase = phase_of(g, x, y, 32, 0);
  const auto raster = raster_of(phase);
  ASSERT_TRUE(raster);
  for (int64_t i = 0; i < y.n * y.pixels(); ++i) {
    const int64_t image = i / y.pixels(), row = i / y.size[2] % y.size[1], column = i % y.size[2];
    const int64_t position = (image * raster->height + row) * raster->width + column;
    ASSERT_LT(position, raster->positions);
    for (int64_t tap = 0; tap < g.taps(); ++tap) {
      const int64_t place = g.inverse ? g.taps() - 1 - tap : tap;
      const int32_t shift = raster->shift(place / g.kernel[2], place % g.kernel[2]);
      ASSERT_LE(shift, raster->reach);
      const auto of_row = g.source(1, row, tap / g.kernel[2], x.size[1]);
      const auto of_column = g.source(2, column, tap % g.kernel[2], x.size[2]);
      std::optional<std::array<int64_t, 3>> want;
      if (of_row && of_column) want = {image, *of_row, *of_column};
      EXPECT_EQ(pixel_of(*raster, phase, x.n, position + shift), want);
    }
  }
}

TEST_F(ConvSelect, ATapIsAStepInTheRaster) {
  for (bool inverse : {false, true}) {
    for (int64_t kernel : {1, 2, 3, 5}) {
      for (int64_t dilation : {1, 2, 4}) {
        for (int64_t padding : {0, 1, 2, 9}) {
          for (int64_t after : {0, 1, 3}) {
            Gather g = gather_of(kernel, 1, padding, inverse);
            g.dilation = {1, dilation, dilation};
            const int64_t grows = padding + after - (kernel - 1) * dilation;  // of the forward gather
            const Images x{.n = 2, .channels = 32, .size = {1, 6, 9}};
            Images y = x;
            for (size_t a : {1, 2}) y.size[a] += inverse ? -grows : grows;
            if (y.size[1] > 0 && y.size[2] > 0) expect_taps_in_raster(g, x, y);
          }
        }
      }
    }
  }
}

TEST(Divider, DividesAll31Bits) {
  for (int by : {1, 2, 3, 5, 7, 9, 27, 64, 100, 784, 50176, 65535, 65537, 1 << 20, (1 << 30) - 1, 1 << 30, INT_MAX}) {
    const cuda::Divider divider(by);
    for (int value : {0, 1, by - 1, by, 2 * (by / 2) + 1, 1 << 30, INT_MAX - 1, INT_MAX}) {
      int rest = value;
      EXPECT_EQ(divider.divide(rest), value / by) << value << " / " << by;
      EXPECT_EQ(rest, value % by);
    }
    for (int64_t multiple = by; multiple < INT_MAX; multiple += std::max<int64_t>(by, (1 << 20) / by * int64_t{by})) {
      const auto value = static_cast<int>(multiple);
      ASSERT_EQ(divider.quotient(value), value / by);
      ASSERT_EQ(divider.quotient(value - 1), (value - 1) / by);
    }
  }
}

}  // namespace
}  // namespace blocksparse::conv
