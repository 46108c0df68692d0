// Multiprocessors that a thread leaves to other streams.
#include "cuda/card.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <thread>

#include "blocksparse/blocksparse.h"
#include "ops/linear/problem.h"

namespace blocksparse::cuda {
namespace {

constexpr Device kCard{DeviceType::cuda, 0};

// One for each family of kernels that fills a card by itself.
constexpr const char* kProblems[] = {
    "linear:fprop bf16 n=256 b=32 random(64,0.2) device=cuda",
    "linear:fprop bf16 n=256 b=64 ba(64,4) device=cuda",
    "linear:dgrad bf16 n=2100 b=32 random(64,0.2) device=cuda",
    "linear:fprop bf16 n=16 b=32 random(64,0.2) device=cuda",
    "linear:wgrad bf16 n=1100 b=16 random(64,0.2) device=cuda",
    "linear:wgrad bf16 n=2048 b=64 random(32,0.2) device=cuda",
    "linear:wgrad bf16 n=256 b=64 random(32,0.2) device=cuda",
    "linear:fprop f32 n=600 b=32 random(32,0.2) device=cuda",
};

TEST(CardCuda, LeavesMultiprocessorsToOthers) {
  if (const Status status = cuda_status(); !status.ok()) GTEST_SKIP() << status.message();
  EXPECT_EQ(cuda_leave_multiprocessors(-1).code(), StatusCode::invalid_argument);
  const auto all = card_of(kCard);
  ASSERT_TRUE(all.ok());
  for (const int32_t left : {24, 1 << 30}) {
    ASSERT_TRUE(cuda_leave_multiprocessors(left).ok());
    EXPECT_EQ(card_of(kCard)->multiprocessors, std::max(1, all->multiprocessors - left));
    std::thread([&] { EXPECT_EQ(card_of(kCard)->multiprocessors, all->multiprocessors) << "another thread"; }).join();
    for (const char* line : kProblems) {
      auto data = linear::LinearData::make(*linear::parse_linear_case(line));
      ASSERT_TRUE(data.ok()) << data.status().message();
      const Status status = data->run();
      ASSERT_TRUE(status.ok()) << status.message();
      const auto error = data->spot_check(200);
      EXPECT_LE(error.worst, 1) << line << ", " << left << " left, at " << error.where;
    }
  }
  ASSERT_TRUE(cuda_leave_multiprocessors(0).ok());
  EXPECT_EQ(card_of(kCard)->multiprocessors, all->multiprocessors);
}

}  // namespace
}  // namespace blocksparse::cuda
