// Tables that a card makes from a mask are those of the host.
#include "core/device_index.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "blocksparse/blocksparse.h"
#include "cuda/memory.h"

namespace blocksparse {
namespace {

constexpr Device kCard{DeviceType::cuda, 0};

class DeviceIndexCuda : public testing::Test {
 protected:
  void SetUp() override {
    if (const Status status = cuda_status(); !status.ok()) GTEST_SKIP() << status.message();
  }
};

std::vector<uint8_t> mask_of(const Layout& layout) {
  std::vector<uint8_t> mask(static_cast<size_t>(layout.out_blocks() * layout.in_blocks()), 0);
  const auto starts = layout.row_start(), columns = layout.columns();
  for (int64_t row = 0; row < layout.out_blocks(); ++row) {
    for (int32_t i = starts[static_cast<size_t>(row)]; i < starts[static_cast<size_t>(row) + 1]; ++i) {
      mask[static_cast<size_t>(row * layout.in_blocks() + columns[static_cast<size_t>(i)])] = 7;  // any byte that is
                                                                                                  // not 0
    }
  }
  return mask;
}

LayoutView::Sizes sizes_of(const Layout& layout) {
  return {layout.block_size(), layout.out_features(), layout.in_features(), layout.blocks()};
}

// The index that a card makes of a mask, in memory that was poisoned before.
std::vector<int32_t> build(const std::vector<uint8_t>& mask, const LayoutView::Sizes& sizes) {
  std::vector<int32_t> index(static_cast<size_t>(*device_index_words(sizes)), -1);
  const size_t bytes = device_index_workspace_size(sizes, kCard);
  const auto at = *cuda::allocate(kCard, index.size() * 4), workspace = *cuda::allocate(kCard, bytes),
             on_card = *cuda::allocate(kCard, mask.size());
  const std::vector<char> poison(bytes, -1);
  EXPECT_TRUE(cuda::copy_to_device(kCard, at.get(), index.data(), index.size() * 4).ok());
  EXPECT_TRUE(cuda::copy_to_device(kCard, workspace.get(), poison.data(), bytes).ok());
  EXPECT_TRUE(cuda::copy_to_device(kCard, on_card.get(), mask.data(), mask.size()).ok());
  const Status status =
      make_device_index(static_cast<const uint8_t*>(on_card.get()), sizes,
                        {static_cast<int32_t*>(at.get()), index.size()}, kCard, {workspace.get(), bytes});
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_TRUE(cuda::copy_to_host(kCard, index.data(), at.get(), index.size() * 4).ok());
  return index;
}

// The host's tables, with a hash of 0.
std::vector<int32_t> as_a_card_makes_them(const Layout& layout) {
  std::vector<int32_t> index(layout.index().begin(), layout.index().end());
  constexpr size_t kHash = offsetof(Header, hash) / 4;
  index[kHash] = index[kHash + 1] = 0;
  return index;
}

TEST_F(DeviceIndexCuda, IsThatOfTheHostButForTheHash) {
  for (const char* graph :
       {"ba(200,4)", "ba(384,8)", "dense(2,300)", "dense(300,2)", "random(384,0.1)", "random(33,65,0.4)",
        "random(70,3,0.5)", "random(5,7,0)", "dense(1,1)", "diagonal(50)", "random(1500,1300,0.02)", "dense(1,4096)"}) {
    const Layout layout = *Layout::from_graph(graph, {.block_size = 16}, 3);
    const auto sizes = sizes_of(layout);
    std::vector<int32_t> got = build(mask_of(layout), sizes);
    const auto again = layout_of_device_index(got);
    ASSERT_TRUE(again.ok()) << graph << ": " << again.status().message();
    EXPECT_EQ(*again, layout) << graph;
    ASSERT_TRUE(LayoutView::on_device(got, sizes, kCard).ok());
    EXPECT_TRUE(LayoutView::on_device(got, sizes, kCard)->cut_by_out);
    std::vector<int32_t> expected = as_a_card_makes_them(layout);
    expected.resize(got.size(), 0);
    const auto [a, b] = std::mismatch(got.begin(), got.end(), expected.begin());
    EXPECT_TRUE(a == got.end()) << graph << ": word " << a - got.begin() << " is " << *a << ", expected " << *b;
  }
}

TEST_F(DeviceIndexCuda, OfRaggedFeatures) {
  const Layout layout =
      *Layout::from_graph("random(9,7,0.4)", {.block_size = 32, .out_features = 270, .in_features = 201}, 1);
  EXPECT_EQ(*layout_of_device_index(build(mask_of(layout), sizes_of(layout))), layout);
}

TEST_F(DeviceIndexCuda, AnotherNumberOfBlocksLeavesNone) {
  const Layout layout = *Layout::from_graph("ba(100,4)", {.block_size = 8}, 1);
  for (const int more : {-1, 1, -200, 300}) {
    auto sizes = sizes_of(layout);
    sizes.blocks += more;
    const std::vector<int32_t> got = build(mask_of(layout), sizes);
    const auto refused = layout_of_device_index(got);
    ASSERT_FALSE(refused.ok());
    EXPECT_NE(refused.status().message().find("mask holds " + std::to_string(layout.blocks())), std::string::npos)
        << refused.status().message();
    const IndexSections at = index_sections(100, 100, sizes.blocks);
    Header h;
    std::copy_n(got.begin(), 32, reinterpret_cast<int32_t*>(&h));
    EXPECT_EQ(h.by_out.pieces, 100);
    EXPECT_EQ(h.by_in.splits, 0);
    for (int64_t i = at.by_out.starts; i < at.by_out.pieces; ++i) ASSERT_EQ(got[static_cast<size_t>(i)], 0) << i;
    for (int64_t i = at.out_of; i < at.words; ++i) ASSERT_EQ(got[static_cast<size_t>(i)], 0) << i;
  }
}

TEST(DeviceIndex, SaysWhatIsWrong) {
  const auto message = [](const LayoutView::Sizes& sizes) { return device_index_words(sizes).status().message(); };
  EXPECT_NE(message({12, 24, 24, 1}).find("block_size is 12"), std::string::npos);
  EXPECT_NE(message({8, 24, 24, 10}).find("holds 9 at most"), std::string::npos);
  EXPECT_NE(message({8, -1, 24, 1}).find("no layout"), std::string::npos);
  EXPECT_NE(message({8, int64_t{1} << 60, 24, 1}).find("no layout"), std::string::npos);
  const Device card{DeviceType::cuda, 0};
  EXPECT_EQ(device_index_workspace_size({12, 24, 24, 1}, card), 0u);
  EXPECT_EQ(device_index_workspace_size({8, 24, 24, 2}, {}), 0u);
  EXPECT_GT(device_index_workspace_size({8, 24, 24, 2}, card), 0u);
  std::vector<int32_t> index(7);
  const Status status = make_device_index(nullptr, {8, 24, 24, 2}, index, {}, {});
  EXPECT_FALSE(status.ok());
}

}  // namespace
}  // namespace blocksparse
