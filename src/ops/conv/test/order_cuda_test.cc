// Orders of channels on a card, beyond the lines of cuda_test.cc: those of concatenations, those that are none, and
// images that are copied in slices.
#include <gtest/gtest.h>

#include <climits>
#include <iostream>
#include <string_view>
#include <vector>

#include "blocksparse/blocksparse.h"
#include "core/convert.h"
#include "core/text.h"
#include "ops/conv/problem.h"

namespace blocksparse::conv {
namespace {

constexpr std::string_view kKernels[] = {"", "gather", "halo", "halo_block", "generic"};

ConvData make(std::string_view line) {
  auto data = ConvData::make(*parse_conv_case(concat(line, " device=cuda")));
  EXPECT_TRUE(data.ok()) << data.status().message();
  return *std::move(data);
}

class ConvCudaOrder : public testing::Test {
 protected:
  void SetUp() override {
    if (const Status status = cuda_status(); !status.ok()) GTEST_SKIP() << status.message();
  }
  void TearDown() override { EXPECT_TRUE(set_cuda_kernel("").ok() || !cuda_status().ok()); }
};

// False where the kernel that was asked for does something else.
bool runs(ConvData& data) {
  const Status status = data.run();
  if (status.code() == StatusCode::unsupported) return false;
  EXPECT_TRUE(status.ok()) << status.message();
  return status.ok();
}

std::vector<char> bytes_of(const ConvData& data) {
  const Tensor& y = data.output();
  int64_t count = 1;
  for (int i = 0; i < y.rank; ++i) count *= y.shape[static_cast<size_t>(i)];
  const auto* first = static_cast<const char*>(y.data);
  return {first, first + count * size_of(y.dtype)};
}

// Behind elu([x, -x]), b channels of x and of -x are neighbours.
TEST_F(ConvCudaOrder, OfAConcatenation) {
  for (std::string_view line :
       {"conv:fprop bf16 n=3 hw=14 b=32 random(4,6,0.5) order", "conv:dgrad f16 n=3 hw=14 b=32 random(4,6,0.5) order",
        "conv:wgrad bf16 n=3 hw=14 b=32 random(4,6,0.5) order"}) {
    for (std::string_view kernel : kKernels) {
      ASSERT_TRUE(set_cuda_kernel(kernel).ok());
      ConvData data = make(line);
      const auto b = static_cast<int32_t>(data.spec().block), half = static_cast<int32_t>(data.order().size()) / 2;
      std::vector<int32_t> order;
      for (int32_t block = 0; block < half; block += b) {
        for (int32_t first : {block, half + block}) {
          for (int32_t c = 0; c < b; ++c) order.push_back(first + c);
        }
      }
      ASSERT_TRUE(data.set_order(order).ok());
      if (!runs(data)) continue;
      const auto error = data.compare();
      EXPECT_LE(error.worst, 1) << line << " " << kernel << ": " << error.where;
      EXPECT_EQ(data.overrun(), "");
    }
  }
}

// An entry that is no channel is a channel of zeros, and no result goes anywhere.
TEST_F(ConvCudaOrder, EntriesThatAreNoChannels) {
  constexpr size_t kEntry = 3;
  for (std::string_view line :
       {"conv:fprop bf16 n=3 hw=14 b=32 random(4,6,0.5) order", "conv:dgrad bf16 n=3 hw=14 b=32 random(4,6,0.5) order",
        "conv:wgrad bf16 n=3 hw=14 b=32 random(4,6,0.5) order", "conv:wgrad f16 n=3 hw=14 b=16 random(4,6,0.5) t order",
        "conv:fprop f16 n=3 hw=14 r=1 b=32 random(4,6,0.5) order",
        "conv:dgrad f16 n=3 hw=14 r=1 b=32 random(4,6,0.5) order",
        "conv:wgrad f16 n=3 hw=14 r=1 b=32 random(4,6,0.5) order",
        "conv:fprop f32 n=2 hw=9 b=16 random(3,3,0.6) c=35 order first",
        "conv:dgrad f64 n=2 hw=9 b=16 random(3,3,0.6) c=35 order", "conv:wgrad f32 n=2 hw=9 b=8 random(3,3,0.6) order",
        "conv:dgrad bf16 n=2 hw=9 b=16 random(3,3,0.6) order first"}) {
    for (std::string_view kernel : kKernels) {
      ASSERT_TRUE(set_cuda_kernel(kernel).ok());
      ConvData data = make(line);
      const std::vector<int32_t> right = data.order();
      const auto channels = static_cast<int32_t>(right.size());
      ASSERT_TRUE(data.silence(right[kEntry]).ok());
      if (!runs(data)) continue;
      const bool writes = data.spec().pass == Pass::dgrad;
      const auto hide = [&] {  // dx of that channel is 0, or as it was
        const Status status = writes ? data.silence(right[kEntry]) : Status();
        EXPECT_TRUE(status.ok()) << status.message();
      };
      hide();
      const std::vector<char> expected = bytes_of(data);
      for (int32_t wrong : {-1, channels, INT_MIN, INT_MAX}) {
        std::vector<int32_t> order = right;
        order[kEntry] = wrong;
        ASSERT_TRUE(data.set_order(order).ok());
        ASSERT_TRUE(runs(data));
        hide();
        EXPECT_TRUE(bytes_of(data) == expected) << line << " " << kernel << " " << wrong;
        EXPECT_EQ(data.overrun(), "") << line << " " << kernel << " " << wrong;
      }
    }
  }
}

// dx of a channel that is named twice comes from the last one that names it; of one that nobody names it is 0.
TEST_F(ConvCudaOrder, TheCopySetsChannelsThatNobodyNames) {
  ConvData data = make("conv:dgrad bf16 n=3 hw=14 b=32 random(4,6,0.5) values=int order");
  const auto way = data.kernel();
  if (!way.ok() || *way == "generic") GTEST_SKIP() << "no other kernel on this card";
  std::vector<int32_t> order = data.order();
  const int32_t unnamed = order[5];
  ASSERT_TRUE(data.run().ok());
  const std::vector<char> before = bytes_of(data);
  order[5] = order[9];
  ASSERT_TRUE(data.set_order(order).ok());
  ASSERT_TRUE(data.run().ok());
  const std::vector<char> after = bytes_of(data);
  const size_t channels = order.size();
  int64_t nonzero = 0;
  for (size_t i = 0; i < after.size() / 2; ++i) {
    const auto at = static_cast<int64_t>(i);
    const double got = load_element(after.data(), at, DType::bf16);
    const double want = load_element(before.data(), at, DType::bf16);
    if (i % channels == static_cast<size_t>(unnamed)) {
      nonzero += got != 0;
    } else {
      EXPECT_EQ(got, want) << i;
    }
  }
  EXPECT_EQ(nonzero, 0);
}

// More than fits into the workspace at once.
TEST_F(ConvCudaOrder, SlicesOfImages) {
  for (std::string_view line : {"conv:fprop bf16 n=45 hw=112 b=32 random(2,2,0.8) bias residual act=relu order",
                                "conv:fprop bf16 n=45 hw=112 b=32 random(2,2,0.8) bias order",
                                "conv:fprop f16 n=45 hw=112 r=1 b=32 random(2,2,0.8) order",
                                "conv:dgrad f16 n=47 hw=113 stride=2 b=64 random(1,1,1) order",
                                "conv:dgrad bf16 n=45 hw=112 b=32 random(2,2,0.8) gates order",
                                "conv:wgrad bf16 n=21 hw=112 b=64 random(1,1,1) accumulate order",
                                "conv:wgrad bf16 n=21 hw=112 b=32 random(2,2,0.8) c=64 k=56 gates order",
                                "conv:wgrad f16 n=21 hw=112 r=5 b=32 random(2,2,0.8) dw=f32 accumulate order",
                                "conv:wgrad f16 n=45 hw=112 r=1 b=32 random(2,2,0.8) dw=f32 order"}) {
    for (std::string_view kernel : {"", "gather", "halo"}) {
      ASSERT_TRUE(set_cuda_kernel(kernel).ok());
      ConvData data = make(line);
      const auto way = data.kernel();
      if (!runs(data)) continue;
      ASSERT_TRUE(way.ok());
      std::cout << line << ": " << *way << ", workspace of " << data.workspace_bytes() / 1000000 << " MB\n";
      EXPECT_LT(data.workspace_bytes(), size_t{64} << 20);
      const auto error = data.spot_check(data.spec().pass == Pass::wgrad ? 40 : 2000);
      EXPECT_LE(error.worst, 1) << line << " " << kernel << ": " << error.where;
      EXPECT_EQ(data.overrun(), "");
      const std::vector<char> first = bytes_of(data);
      ASSERT_TRUE(data.run().ok());
      EXPECT_TRUE(bytes_of(data) == first) << line << ": the same bits";
    }
  }
}

}  // namespace
}  // namespace blocksparse::conv
