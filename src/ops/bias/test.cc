// The gradient of a bias against sums in f64, on the CPU and on a card, and what its edge refuses.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "blocksparse/blocksparse.h"
#include "core/convert.h"
#include "core/random.h"
#include "core/text.h"
#include "cuda/memory.h"
#include "ops/bias/bias.h"

namespace blocksparse {
namespace {

constexpr Device kCard{DeviceType::cuda, 0};
constexpr char kPoison = static_cast<char>(0xff);  // NaN in every type
constexpr int64_t kGuard = 16;                     // elements behind dbias

struct Case {
  int64_t n, features;
  DType dtype;
  int64_t pad = 0, offset = 0;  // elements between tokens, and in front of the first
};

// Small sizes; one thread block and many; lanes and strips that are not full; dy that vectors do not fit.
constexpr Case kCases[] = {
    {0, 8, DType::f32},          {1, 1, DType::bf16},           {3, 5, DType::f16},
    {7, 64, DType::bf16},        {64, 24, DType::bf16},         {100, 256, DType::f64},
    {513, 128, DType::f32},      {4096, 128, DType::bf16},      {4099, 256, DType::f16},
    {2001, 384, DType::bf16},    {3000, 1000, DType::bf16},     {1000, 257, DType::f32},
    {5000, 8, DType::bf16},      {5000, 3, DType::f64},         {2500, 128, DType::bf16, 8, 0},
    {2500, 128, DType::bf16, 3}, {2500, 128, DType::f16, 0, 1}, {40, 9000, DType::f32},
    {70000, 16, DType::bf16},    {66000, 40, DType::f32},
};

struct Sums {
  Case c;
  std::vector<char> dy, dbias;
  std::shared_ptr<void> dy_there, dbias_there, workspace;
  size_t bytes = 0;
  Device device;

  Sums(const Case& c, Device device) : c(c), device(device) {
    dy.assign(static_cast<size_t>((c.offset + c.n * (c.features + c.pad) + 8) * size_of(c.dtype)), kPoison);
    dbias.assign(static_cast<size_t>((c.features + kGuard) * size_of(c.dtype)), kPoison);
    Random random(7);
    for (int64_t t = 0; t < c.n; ++t) {
      for (int64_t f = 0; f < c.features; ++f) store_element(dy.data(), at(t, f), c.dtype, 2 * random.uniform() - 0.9);
    }
    bytes = bias_gradient_workspace_size(tensor(dy.data()));
    if (device.type != DeviceType::cuda) return;
    dy_there = *cuda::allocate(device, dy.size());
    dbias_there = *cuda::allocate(device, dbias.size());
    workspace = *cuda::allocate(device, bytes + 16);
    EXPECT_TRUE(cuda::copy_to_device(device, dy_there.get(), dy.data(), dy.size()).ok());
  }
  int64_t at(int64_t t, int64_t f) const { return c.offset + t * (c.features + c.pad) + f; }
  ConstTensor tensor(const void* data) const {
    ConstTensor made(static_cast<const char*>(data) + c.offset * size_of(c.dtype), c.dtype, {c.n, c.features}, device);
    made.stride[0] = c.features + c.pad;
    return made;
  }
  Status run(int32_t threads = 1) {
    std::fill(dbias.begin(), dbias.end(), kPoison);
    if (device.type != DeviceType::cuda) {
      Tensor out(dbias.data(), c.dtype, {c.features}, device);
      return bias_gradient(tensor(dy.data()), out, {}, {nullptr, threads});
    }
    BS_RETURN_IF_ERROR(cuda::copy_to_device(device, dbias_there.get(), dbias.data(), dbias.size()));
    Tensor out(dbias_there.get(), c.dtype, {c.features}, device);
    BS_RETURN_IF_ERROR(bias_gradient(tensor(dy_there.get()), out, {workspace.get(), bytes}, {}));
    return cuda::copy_to_host(device, dbias.data(), dbias_there.get(), dbias.size());
  }
  void expect_right() const {
    const double unit = c.dtype == DType::f64    ? 0x1p-52
                        : c.dtype == DType::f32  ? 0x1p-23
                        : c.dtype == DType::bf16 ? 0x1p-8
                                                 : 0x1p-11;
    const double of_sums = c.dtype == DType::f64 ? 0x1p-52 : 0x1p-23;
    for (int64_t f = 0; f < c.features; ++f) {
      double sum = 0, size = 0;
      for (int64_t t = 0; t < c.n; ++t) {
        const double value = load_element(dy.data(), at(t, f), c.dtype);
        sum += value, size += std::abs(value);
      }
      // Each element is added to at most 300 others, or their sum, before everything is.
      ASSERT_NEAR(load_element(dbias.data(), f, c.dtype), sum, unit * std::abs(sum) + of_sums * 16 * size + 1e-300)
          << c.n << " x " << c.features << " " << name_of(c.dtype) << ", feature " << f;
    }
    for (size_t i = static_cast<size_t>(c.features * size_of(c.dtype)); i < dbias.size(); ++i) {
      ASSERT_EQ(dbias[i], kPoison);
    }
  }
};

void check_all(Device device) {
  for (const Case& c : kCases) {
    Sums sums(c, device);
    const Status status = sums.run();
    ASSERT_TRUE(status.ok()) << status.message();
    sums.expect_right();
    const std::vector<char> first = sums.dbias;
    for (int run = 0; run < 3; ++run) {
      ASSERT_TRUE(sums.run(run + 1).ok());
      ASSERT_EQ(first, sums.dbias) << "the bits differ";
    }
  }
}

TEST(BiasGradient, MatchesSumsInF64) { check_all({}); }

class BiasGradientCuda : public testing::Test {
 protected:
  void SetUp() override {
    if (const Status status = cuda_status(); !status.ok()) GTEST_SKIP() << status.message();
  }
};

TEST_F(BiasGradientCuda, MatchesSumsInF64) { check_all(kCard); }

TEST(BiasGradient, SeveralLeadingDimensionsAreTokens) {
  const std::vector<float> dy(2 * 3 * 4 * 5, 1.0f);
  std::vector<float> sums(5);
  const ConstTensor given(dy.data(), DType::f32, {2, 3, 4, 5});
  ASSERT_TRUE(bias_gradient(given, {sums.data(), DType::f32, {5}}, {}).ok());
  for (float sum : sums) EXPECT_EQ(sum, 24);
}

TEST(BiasGradient, RefusesWhatDoesNotFit) {
  std::vector<float> dy(12, 1.0f), sums(12);
  const ConstTensor given(dy.data(), DType::f32, {3, 4});
  const auto message = [&](const ConstTensor& x, const Tensor& y) {
    const Status status = bias_gradient(x, y, {});
    EXPECT_EQ(status.code(), StatusCode::invalid_argument);
    return std::string(status.message());
  };
  const Tensor right(sums.data(), DType::f32, {4});
  EXPECT_NE(message({}, right).find("dy is not given"), std::string::npos);
  EXPECT_NE(message(given, {}).find("dbias is not given"), std::string::npos);
  EXPECT_NE(message(given, {sums.data(), DType::f32, {3}}).find("dbias"), std::string::npos);
  EXPECT_NE(message(given, {sums.data(), DType::bf16, {4}}).find("dbias"), std::string::npos);
  EXPECT_NE(message(given, {dy.data(), DType::f32, {4}}).find("overlap"), std::string::npos);
  ConstTensor by_tokens = given;
  by_tokens.stride = {1, 3};
  EXPECT_NE(message(by_tokens, right).find("side by side"), std::string::npos);
}

// Every card gets as many parts as have worth, and no more workspace than is asked for.
TEST(BiasGradient, PartsOfTokens) {
  EXPECT_EQ(bias::plan_of(65536, 256, 8, 4).parts, bias::kMostBlocks);
  EXPECT_EQ(bias::plan_of(65536, 128, 8, 4).lanes, 16);
  EXPECT_EQ(bias::plan_of(63, 256, 8, 4).parts, 1);
  EXPECT_EQ(bias::plan_of(63, 256, 8, 4).part_bytes, 0);
  EXPECT_EQ(bias::plan_of(65536, 100000, 8, 4).parts, 1);
  EXPECT_EQ(bias_gradient_workspace_size({nullptr, DType::bf16, {64, 32, 32, 256}, kCard}),
            static_cast<size_t>(bias::kMostBlocks * 256 * 4));
  EXPECT_EQ(bias_gradient_workspace_size({nullptr, DType::bf16, {64, 32, 32, 256}}), 0u);
}

}  // namespace
}  // namespace blocksparse
