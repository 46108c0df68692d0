// Operands of more than 2^31 elements or bytes.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "blocksparse/blocksparse.h"
#include "cuda/memory.h"

namespace blocksparse::gemm {
namespace {

constexpr Device kCard{DeviceType::cuda, 0};

class LargeLinearCuda : public testing::Test {
 protected:
  void SetUp() override {
    if (const Status status = cuda_status(); !status.ok()) GTEST_SKIP() << status.message();
  }
};

// A call on memory of its own, without a copy on the host. Only a few tokens are checked.
struct Large {
  std::shared_ptr<void> memory;
  Tensor tensor;

  Large(int64_t n, int64_t features, int value) {
    auto allocated = cuda::allocate(kCard, static_cast<size_t>(n * features));
    if (!allocated.ok()) return;
    memory = *std::move(allocated);
    cudaMemset(memory.get(), value, static_cast<size_t>(n * features));
    tensor = Tensor(memory.get(), DType::bf16, {n, features / 2}, kCard);
  }
};

// x and y of more than 2^31 elements, where 32-bit offsets go wrong. x is 0 except for one token at the end.
TEST_F(LargeLinearCuda, MoreThanTwoToThe31Elements) {
  const int64_t n = (int64_t{1} << 25) + 77, features = 64;
  const Large x(n, 2 * features, 0), y(n, 2 * features, 0xff);
  if (x.memory == nullptr || y.memory == nullptr) GTEST_SKIP() << "the card has too little memory";
  const Layout layout = *Layout::from_graph("dense(2,2)", {.block_size = 32});
  auto index = *cuda::allocate(kCard, layout.index().size_bytes());
  ASSERT_TRUE(cuda::copy_to_device(kCard, index.get(), layout.index().data(), layout.index().size_bytes()).ok());
  const std::vector<uint16_t> ones(4 * 32 * 32, 0x3f80);
  auto w = *cuda::allocate(kCard, 2 * ones.size());
  ASSERT_TRUE(cuda::copy_to_device(kCard, w.get(), ones.data(), 2 * ones.size()).ok());
  auto* last_x = static_cast<char*>(x.memory.get()) + (n - 1) * features * 2;
  ASSERT_TRUE(cuda::copy_to_device(kCard, last_x, ones.data(), static_cast<size_t>(2 * features)).ok());
  const auto view =
      LayoutView::on_device({static_cast<const int32_t*>(index.get()), layout.index().size()}, {32, 64, 64, 4}, kCard);
  ASSERT_TRUE(view.ok()) << view.status().message();
  const ConstTensor values(w.get(), DType::bf16, {4, 32, 32}, kCard);
  const size_t scratch_bytes = linear_fprop_workspace_size({*view, DType::bf16, n}, kCard);
  auto scratch = *cuda::allocate(kCard, scratch_bytes);
  const Status status = linear_fprop(*view, x.tensor, values, {}, y.tensor, {scratch.get(), scratch_bytes});
  ASSERT_TRUE(status.ok()) << status.message();
  std::vector<uint16_t> got(static_cast<size_t>(2 * features));
  const auto* last_y = static_cast<const char*>(y.memory.get()) + (n - 2) * features * 2;
  ASSERT_TRUE(cuda::copy_to_host(kCard, got.data(), last_y, 2 * got.size()).ok());
  for (size_t i = 0; i < got.size(); ++i) EXPECT_EQ(got[i], i < 64 ? 0x0000 : 0x4280) << i;  // 0 and 64

  Tensor dw(w.get(), DType::bf16, {4, 32, 32}, kCard);
  const GradPair pair{x.tensor, y.tensor};  // 1 x 64 in the last token alone
  const size_t bytes = linear_wgrad_workspace_size({*view, DType::bf16, n}, kCard);
  auto workspace = *cuda::allocate(kCard, bytes);
  ASSERT_TRUE(linear_wgrad(*view, {&pair, 1}, {}, Accumulate::no, dw, {workspace.get(), bytes}).ok());
  std::vector<uint16_t> gradient(ones.size());
  ASSERT_TRUE(cuda::copy_to_host(kCard, gradient.data(), w.get(), 2 * gradient.size()).ok());
  for (size_t i = 0; i < gradient.size(); ++i) ASSERT_EQ(gradient[i], 0x4280) << i;
}

// A copy of `bytes` bytes on the card. All have one value, except for `last` at the end.
std::shared_ptr<void> filled(size_t bytes, int value, const std::vector<uint16_t>& last) {
  auto memory = cuda::allocate(kCard, bytes);
  if (!memory.ok()) return nullptr;
  cudaMemset(memory->get(), value, bytes);
  char* end = static_cast<char*>(memory->get()) + bytes;
  EXPECT_TRUE(cuda::copy_to_device(kCard, end - 2 * last.size(), last.data(), 2 * last.size()).ok());
  return *std::move(memory);
}

// The last `count` elements of a buffer.
std::vector<uint16_t> end_of(const std::shared_ptr<void>& memory, size_t bytes, size_t count) {
  std::vector<uint16_t> got(count);
  const char* end = static_cast<const char*>(memory.get()) + bytes;
  EXPECT_TRUE(cuda::copy_to_host(kCard, got.data(), end - 2 * count, 2 * count).ok());
  return got;
}

// W of more than 2^31 elements. It is 0 except for its last block, which is 1; x and dy are 1 in that block's features
// only.
void check_large_weights(int32_t block, int64_t rows, int64_t columns, int64_t n, uint16_t expected_y,
                         uint16_t expected_dw) {
  const Layout layout =
      *Layout::from_graph("dense(" + std::to_string(rows) + "," + std::to_string(columns) + ")", {.block_size = block});
  const size_t of_block = static_cast<size_t>(block) * block, w_bytes = 2 * of_block * layout.blocks();
  ASSERT_GT(w_bytes / 2, size_t{1} << 31);
  const int64_t outputs = layout.out_features(), inputs = layout.in_features();
  const auto row = [block](int64_t features) {
    std::vector<uint16_t> ones(static_cast<size_t>(features), 0);
    std::fill(ones.end() - block, ones.end(), 0x3f80);
    return ones;
  };
  const auto rows_of = [n](const std::vector<uint16_t>& one) {
    std::vector<uint16_t> all;
    for (int64_t i = 0; i < n; ++i) all.insert(all.end(), one.begin(), one.end());
    return all;
  };
  const size_t x_bytes = 2 * static_cast<size_t>(n * inputs), y_bytes = 2 * static_cast<size_t>(n * outputs);
  const auto w = filled(w_bytes, 0, std::vector<uint16_t>(of_block, 0x3f80));
  if (w == nullptr) GTEST_SKIP() << "the card has too little memory";
  const auto x = filled(x_bytes, 0, rows_of(row(inputs))), dy = filled(y_bytes, 0, rows_of(row(outputs)));
  const auto y = filled(y_bytes, 0xff, {});
  const auto index = *cuda::allocate(kCard, layout.index().size_bytes());
  ASSERT_TRUE(cuda::copy_to_device(kCard, index.get(), layout.index().data(), layout.index().size_bytes()).ok());
  const auto view = *LayoutView::on_device({static_cast<const int32_t*>(index.get()), layout.index().size()},
                                           {block, outputs, inputs, layout.blocks()}, kCard);
  const size_t bytes = std::max(linear_fprop_workspace_size({view, DType::bf16, n}, kCard),
                                linear_wgrad_workspace_size({view, DType::bf16, n}, kCard));
  const auto workspace = *cuda::allocate(kCard, bytes);
  const ConstTensor xs(x.get(), DType::bf16, {n, inputs}, kCard), dys(dy.get(), DType::bf16, {n, outputs}, kCard);
  const Tensor ws(w.get(), DType::bf16, {layout.blocks(), block, block}, kCard);
  const Tensor ys(y.get(), DType::bf16, {n, outputs}, kCard);
  Status status = linear_fprop(view, xs, ws, {}, ys, {workspace.get(), bytes});
  ASSERT_TRUE(status.ok()) << status.message();
  const auto got = end_of(y, y_bytes, static_cast<size_t>(outputs));
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(got[i], i + static_cast<size_t>(block) < got.size() ? 0 : expected_y) << i;
  }
  cudaMemset(w.get(), 0xff, w_bytes);
  const GradPair pair{xs, dys};
  status = linear_wgrad(view, {&pair, 1}, {}, Accumulate::no, ws, {workspace.get(), bytes});
  ASSERT_TRUE(status.ok()) << status.message();
  const auto dw = end_of(w, w_bytes, of_block * static_cast<size_t>(columns));
  for (size_t i = 0; i < dw.size(); ++i) ASSERT_EQ(dw[i], i + of_block < dw.size() ? 0 : expected_dw) << i;
}

TEST_F(LargeLinearCuda, WeightsOfMoreThanTwoToThe31Elements) {
  check_large_weights(32, 1500, 1400, 8, 0x4200, 0x4100);   // 32 and 8: `stream_w`
  check_large_weights(128, 363, 362, 128, 0x4300, 0x4300);  // 128: `wgmma`
}

}  // namespace
}  // namespace blocksparse::gemm
