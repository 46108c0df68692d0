// What is done with an order of channels on a card, for cards that are not here.
#include "ops/conv/cuda/order/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "core/ceil_div.h"
#include "core/convert.h"
#include "core/random.h"
#include "ops/conv/cuda/select.h"

namespace blocksparse::conv {
namespace {

constexpr cuda::Card kHopper{.arch = 90, .multiprocessors = 132, .shared_bytes = 227 * 1024, .sm90a = true};
constexpr cuda::Card kAmpere{.arch = 80, .multiprocessors = 108, .shared_bytes = 163 * 1024, .sm90a = false};
constexpr size_t kMost = size_t{64} << 20;

Gather gather_of(int64_t kernel, int64_t stride) {
  const int64_t padding = kernel / 2;
  return {.kernel = {1, kernel, kernel},
          .stride = {1, stride, stride},
          .dilation = {1, 1, 1},
          .padding = {0, padding, padding}};
}

class ConvSelectOrder : public testing::Test {
 protected:
  Product product(int64_t n, int64_t hw, int64_t kernel = 3, int64_t stride = 1) const {
    const int64_t out = ceil_div(hw, stride);
    return {.dtype = DType::bf16,
            .layout = layout_.view(),
            .gather = gather_of(kernel, stride),
            .x = {.n = n, .channels = layout_.in_features(), .size = {1, hw, hw}},
            .y = {.n = n, .channels = layout_.out_features(), .size = {1, out, out}},
            .x_channels = order_.data()};
  }
  WeightGradient gradient(int64_t n, int64_t hw, int64_t kernel = 3) const {
    const Product p = product(n, hw, kernel);
    return {.dtype = p.dtype,
            .dw_dtype = p.dtype,
            .layout = p.layout,
            .gather = p.gather,
            .rows = p.y,
            .columns = p.x,
            .column_channels = order_.data()};
  }

  const Layout layout_ = *Layout::from_graph("random(8,8,0.25)", {.block_size = 32}, 1);
  const std::vector<int32_t> order_ = std::vector<int32_t>(256);
};

template <class Problem>
Problem without_order(Problem p) {
  if constexpr (requires { p.x_channels; }) p.x_channels = p.y_channels = nullptr;
  else p.row_channels = p.column_channels = nullptr;
  return p;
}

TEST_F(ConvSelectOrder, TheWayIsThatWithoutAnOrder) {
  for (int64_t kernel : {1, 3}) {
    for (int64_t stride : {1, 2}) {
      Product p = product(64, 28, kernel, stride);
      EXPECT_EQ(choose_cuda_way(p, kHopper), choose_cuda_way(without_order(p), kHopper));
      EXPECT_NE(choose_cuda_way(p, kHopper), CudaWay::generic);
      std::swap(p.x_channels, p.y_channels);
      EXPECT_EQ(choose_cuda_way(p, kHopper), choose_cuda_way(without_order(p), kHopper));
      EXPECT_EQ(plan_order(p).slices, 1);
    }
    const WeightGradient g = gradient(64, 28, kernel);
    EXPECT_EQ(choose_cuda_way(g, kHopper), choose_cuda_way(without_order(g), kHopper));
    EXPECT_NE(choose_cuda_way(g, kHopper), CudaWay::generic);
    EXPECT_EQ(plan_order(g).slices, 1);
  }
  EXPECT_EQ(choose_cuda_way(product(64, 28, 1), kAmpere), CudaWay::pointwise);
  EXPECT_EQ(choose_cuda_way(product(64, 28), kAmpere), CudaWay::generic);
}

TEST_F(ConvSelectOrder, WhatCannotBeCopiedInVectorsIsGeneric) {
  const auto is_generic = [](const Product& p) { return choose_cuda_way(p, kHopper) == CudaWay::generic; };
  Product p = product(64, 28);
  p.dtype = DType::f32;
  EXPECT_TRUE(is_generic(p));
  p = product(64, 28);
  p.x.channels_last = p.y.channels_last = false;
  EXPECT_TRUE(is_generic(p));
  p = product(64, 28);
  p.x.data = reinterpret_cast<const void*>(8);
  EXPECT_TRUE(is_generic(p)) << "not of 16 bytes";
  EXPECT_TRUE(is_generic(product(0, 28)));
  const Layout ragged = *Layout::from_graph("random(8,8,0.25)", {.block_size = 32, .in_features = 252}, 1);
  p = product(64, 28, 1);
  p.layout = ragged.view(), p.x.channels = 252;
  EXPECT_TRUE(is_generic(p)) << "though one tap in place";
  EXPECT_EQ(cuda_workspace_bytes(p), 0u);
  const Layout wide = *Layout::from_graph("random(1,65,0.25)", {.block_size = 128}, 1);
  p = product(64, 28);
  p.layout = wide.view(), p.x.channels = 65 * 128, p.y.channels = 128;
  EXPECT_TRUE(is_generic(p)) << "a row of channels and the order are too much for shared memory";
}

// Slices cover all images, are of two sizes at most, and the copy of none goes beyond what is in front of the rest.
template <class Problem>
void expect_slices(const Problem& p, int64_t slices) {
  const OrderPlan plan = plan_order(p);
  EXPECT_EQ(plan.slices, slices);
  if (plan.slices == 0) return;
  EXPECT_LT(cuda_workspace_bytes(p), kMost);
  EXPECT_GE(cuda_workspace_bytes(p), static_cast<size_t>(plan.end));
  const Images all = ordered_images(p).images;
  int64_t images = 0;
  for (int64_t i = 0; i < plan.slices; ++i) {
    const auto slice = ordered_slice(p, plan, i, nullptr);
    EXPECT_FALSE(has_order(slice));
    const Images of_slice = slice_of(all, p.dtype, plan, i);
    images += of_slice.n;
    EXPECT_GE(of_slice.n, all.n / plan.slices);
    EXPECT_LE(of_slice.n, ceil_div(all.n, plan.slices));
    EXPECT_LE(of_slice.n * of_slice.image_stride() * 2, plan.sums);
    EXPECT_LE(plan.rest + static_cast<int64_t>(cuda_workspace_bytes(slice)), plan.end);
    EXPECT_TRUE(cuda_supports(choose_cuda_way(p, kHopper), slice, kHopper));
  }
  EXPECT_EQ(images, all.n);
  EXPECT_NE(choose_cuda_way(p, kHopper), CudaWay::generic);
}

TEST_F(ConvSelectOrder, SlicesAreOfWholeImages) {
  expect_slices(product(64, 28), 1);   // 25.7 MB
  expect_slices(product(64, 56), 2);   // 103 MB
  expect_slices(product(67, 112), 7);  // 430 MB
  expect_slices(product(5, 224), 3);   // 128 MB, 26 MB an image
  expect_slices(product(5, 224, 1), 3);
  expect_slices(product(2, 400), 0);  // 82 MB an image
  EXPECT_EQ(choose_cuda_way(product(2, 400), kHopper), CudaWay::generic);
  EXPECT_EQ(cuda_workspace_bytes(product(2, 400)), 0u);
  expect_slices(gradient(64, 28), 1);
  expect_slices(gradient(64, 56), 4);
  WeightGradient narrow = gradient(64, 56), wide = narrow;
  wide.dw_dtype = DType::f32;
  EXPECT_TRUE(sums_in_workspace(narrow, plan_order(narrow)));
  EXPECT_FALSE(sums_in_workspace(wide, plan_order(wide)));
  EXPECT_GE(plan_order(narrow).rest - plan_order(narrow).sums, layout_.blocks() * 9 * 32 * 32 * 4);
}

// Of slices the first does as the caller says, the others add to it.
TEST_F(ConvSelectOrder, SlicesOfAGradientAreAdded) {
  for (DType dtype : {DType::bf16, DType::f32}) {
    for (bool accumulate : {false, true}) {
      WeightGradient g = gradient(64, 56);
      g.dw_dtype = dtype;
      g.accumulate = accumulate;
      const OrderPlan plan = plan_order(g);
      for (int64_t i = 0; i < plan.slices; ++i) {
        const WeightGradient slice = ordered_slice(g, plan, i, nullptr);
        EXPECT_EQ(slice.accumulate, accumulate || i > 0);
        EXPECT_EQ(slice.dw_dtype, DType::f32);
      }
    }
  }
}

// What copy_channels() does, in plain loops.
void copy_by_hand(const Images& from, const Images& to, const std::vector<int32_t>& order, bool inverse) {
  const auto* source = static_cast<const uint16_t*>(from.data);
  auto* target = static_cast<uint16_t*>(const_cast<void*>(to.data));
  const auto channels = static_cast<size_t>(from.channels);
  const auto rows = static_cast<size_t>(from.n * from.pixels());
  for (size_t row = 0; row < rows; ++row) {
    for (size_t c = 0; c < channels; ++c) {
      const size_t at = row * channels + c, named = row * channels + static_cast<size_t>(order[c]);
      if (inverse) target[named] = source[at];
      else target[at] = source[named];
    }
  }
}

// Small whole numbers, so that slices add up to the same bits.
class ConvSlicesByHand : public testing::Test {
 protected:
  ConvSlicesByHand() {
    Random rng(5);
    for (int32_t i = 0; i < 32; ++i) order_.push_back(i);
    rng.shuffle(order_);
    const auto fill = [&](std::vector<uint16_t>& values, int64_t count) {
      for (int64_t i = 0; i < count; ++i) values.push_back(float_to_bf16(static_cast<float>(rng.below(5) - 2)));
    };
    fill(x_, 5 * 12 * 32), fill(y_, 5 * 12 * 24), fill(w_, layout_.blocks() * 9 * 64);
  }
  Images x() const { return {.data = x_.data(), .n = 5, .channels = 32, .size = {1, 3, 4}}; }
  Images y() const { return {.data = y_.data(), .n = 5, .channels = 24, .size = {1, 3, 4}}; }

  const Layout layout_ = *Layout::from_graph("random(3,4,0.6)", {.block_size = 8}, 1);
  std::vector<int32_t> order_;
  std::vector<uint16_t> x_, y_, w_;
  std::vector<float> workspace_ = std::vector<float>(1 << 14);
  const OrderPlan plan_{.slices = 3, .sums = 4096, .rest = 1 << 15, .end = 1 << 16};
};

TEST_F(ConvSlicesByHand, OfProducts) {
  for (bool backward : {false, true}) {
    std::vector<uint16_t> whole(backward ? x_.size() : y_.size()), sliced(whole.size(), 0xffff);
    Product p{.dtype = DType::bf16, .layout = layout_.view(), .by_in = backward, .gather = gather_of(3, 1)};
    p.gather.inverse = backward;
    p.x = backward ? y() : x(), p.y = backward ? x() : y();
    p.w = w_.data();
    (backward ? p.y_channels : p.x_channels) = order_.data();
    p.y.data = whole.data();
    reference_product(p);
    p.y.data = sliced.data();
    for (int64_t i = 0; i < plan_.slices; ++i) {
      const Product slice = ordered_slice(p, plan_, i, workspace_.data());
      const Images theirs = slice_of(ordered_images(p).images, p.dtype, plan_, i);
      if (!backward) copy_by_hand(theirs, slice.x, order_, false);
      reference_product(slice);
      if (backward) copy_by_hand(slice.y, theirs, order_, true);
    }
    EXPECT_TRUE(sliced == whole);
  }
}

TEST_F(ConvSlicesByHand, OfGradients) {
  for (bool accumulate : {false, true}) {
    std::vector<float> whole(w_.size(), 3), sliced = whole;
    WeightGradient g{.dtype = DType::bf16,
                     .dw_dtype = DType::f32,
                     .layout = layout_.view(),
                     .gather = gather_of(3, 1),
                     .rows = y(),
                     .columns = x(),
                     .column_channels = order_.data(),
                     .dw = whole.data(),
                     .accumulate = accumulate};
    reference_weight_gradient(g);
    g.dw = sliced.data();
    for (int64_t i = 0; i < plan_.slices; ++i) {
      const WeightGradient slice = ordered_slice(g, plan_, i, workspace_.data());
      copy_by_hand(slice_of(g.columns, g.dtype, plan_, i), slice.columns, order_, false);
      reference_weight_gradient(slice);
    }
    EXPECT_TRUE(sliced == whole);
    g.dw_dtype = DType::bf16;
    EXPECT_EQ(ordered_slice(g, plan_, 1, workspace_.data()).dw, workspace_.data() + 1024);
  }
}

// A workspace is asked for without pointers, and has to do for a call with any.
TEST_F(ConvSelectOrder, TheSizeForSizesIsEnoughForCalls) {
  alignas(16) static char memory[16];
  for (int64_t hw : {14, 28, 56, 112}) {
    Product p = product(64, hw);
    const size_t asked = cuda_workspace_bytes(p);
    for (const void* gates : {static_cast<const void*>(nullptr), static_cast<const void*>(memory)}) {
      for (int offset : {0, 2}) {
        p.x.data = p.y.data = memory, p.w = memory + offset, p.gates = gates;
        p.residual = p.y;
        EXPECT_LE(cuda_workspace_bytes(p), asked);
        EXPECT_EQ(plan_order(p).end, plan_order(product(64, hw)).end);
      }
    }
    WeightGradient g = gradient(64, hw);
    const size_t asked_of_gradient = cuda_workspace_bytes(g);
    for (int offset : {0, 2}) {
      for (void* dgates : {static_cast<void*>(nullptr), static_cast<void*>(memory)}) {
        g.rows.data = g.columns.data = memory, g.dw = memory + offset, g.dgates = dgates;
        EXPECT_LE(cuda_workspace_bytes(g), asked_of_gradient);
        EXPECT_EQ(plan_order(g).end, plan_order(gradient(64, hw)).end);
      }
    }
  }
}

}  // namespace
}  // namespace blocksparse::conv
