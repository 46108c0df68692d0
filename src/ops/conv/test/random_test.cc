// Random convolutions, with every kernel that can do them.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "blocksparse/blocksparse.h"
#include "core/random.h"
#include "core/text.h"
#include "ops/conv/problem.h"

namespace blocksparse::conv {
namespace {

ConvCase random_case(Random& rng, int64_t seed) {
  auto one_of = [&](auto... choices) {
    const std::string list[] = {choices...};
    return list[static_cast<size_t>(rng.below(sizeof...(choices)))];
  };
  auto maybe = [&](std::string_view word) { return rng.below(3) == 0 ? concat(" ", word) : std::string(); };
  const std::string pass = one_of("fprop", "dgrad", "wgrad"), dtype = one_of("f32", "f32", "f64", "bf16", "f16");
  const int64_t b = std::stoll(one_of("8", "8", "16", "32", "64", "128"));
  const int64_t most = std::max<int64_t>(2, 64 / b), rows = 1 + rng.below(most), columns = 1 + rng.below(most);
  const int64_t rank = std::stoll(one_of("1", "2", "2", "3"));
  auto each = [&](std::string_view key, int64_t least, int64_t largest) {
    std::string text = concat(key, "=");
    for (int64_t i = 0; i < rank; ++i) text += concat(i == 0 ? "" : "x", least + rng.below(largest - least + 1));
    return text;
  };
  std::string line = concat("conv:", pass, " ", dtype, " n=", 1 + rng.below(3), " dims=", rank, " b=", b, " random(",
                            rows, ",", columns, ",", one_of("0.3", "0.7", "1"), ") seed=", seed);
  line += concat(" ", each("hw", rank == 3 ? 3 : 5, rank == 1 ? 90 : rank == 2 ? 17 : 6));
  line += concat(" ", each("r", 1, rank == 3 ? 2 : 3));
  // Whole channels: what the faster kernels of a card take.
  if (rng.below(2) == 0) line += concat(" c=", columns * b - rng.below(b), " k=", rows * b - rng.below(b));
  line +=
      concat(" ", each("pad", 1, 2), " ", each("after", 1, 2), maybe(each("stride", 1, 3)), maybe(each("dil", 1, 2)));
  line += maybe("first") + maybe("order") + maybe("gates") + maybe("threads=2") + maybe("values=int");
  line += maybe("transposed");
  if (pass == "fprop")
    line += maybe("bias") + maybe("residual") + maybe(concat("act=", one_of("relu", "gelu", "silu")));
  if (pass == "wgrad") line += maybe("accumulate") + maybe("dgates");
  if (pass == "wgrad" && dtype != "f64") line += maybe("dw=f32");
  const auto c = parse_conv_case(line);
  EXPECT_TRUE(c.ok()) << c.status().message();
  ConvCase problem = *c;
  if (c->activation > Activation::relu) problem.integers = false;  // not exact
  return problem;
}

// How many random problems, and from where on: the same ones, or BLOCKSPARSE_FUZZ=<count> others.
struct Fuzz {
  const char* more = std::getenv("BLOCKSPARSE_FUZZ");
  int64_t count = more != nullptr ? std::atoll(more) : 150;
  Random rng{more != nullptr ? std::random_device{}() : 2024};
};

void expect_right(ConvData& data, const std::string& kernel) {
  const auto error = data.compare();
  ASSERT_LE(error.worst, 1) << kernel << " " << to_string(data.spec()) << "\n" << error.where;
  ASSERT_EQ(data.overrun(), "") << kernel << " " << to_string(data.spec());
}

// With every instruction set.
TEST(Conv, RandomProblems) {
  Fuzz fuzz;
  for (int64_t i = 0; i < fuzz.count && !testing::Test::HasFailure(); ++i) {
    const ConvCase c = random_case(fuzz.rng, i);
    if (!conv_output_size(c.geometry, c.size).ok()) continue;
    auto data = ConvData::make(c);
    ASSERT_TRUE(data.ok()) << to_string(c) << ": " << data.status().message();
    for (const std::string& isa : cpu_isas()) {
      ASSERT_TRUE(set_cpu_isa(isa).ok());
      const Status status = data->run();
      ASSERT_TRUE(status.ok()) << isa << " " << to_string(c) << ": " << status.message();
      expect_right(*data, isa);
    }
  }
  ASSERT_TRUE(set_cpu_isa("").ok());
}

// With every CUDA kernel, and the one that is chosen.
TEST(Conv, RandomProblemsOnCuda) {
  if (const Status status = cuda_status(); !status.ok()) GTEST_SKIP() << status.message();
  std::vector<std::string> kernels = cuda_kernels();
  kernels.emplace_back("");
  Fuzz fuzz;
  for (int64_t i = 0; i < fuzz.count && !testing::Test::HasFailure(); ++i) {
    ConvCase c = random_case(fuzz.rng, i);
    if (!conv_output_size(c.geometry, c.size).ok()) continue;
    c.device.type = DeviceType::cuda;
    ASSERT_TRUE(set_cuda_kernel("generic").ok());  // the workspace of one that is forced suffices for all
    auto data = ConvData::make(c);
    ASSERT_TRUE(data.ok()) << to_string(c) << ": " << data.status().message();
    for (const std::string& kernel : kernels) {
      ASSERT_TRUE(set_cuda_kernel(kernel).ok());
      const Status status = data->run();
      if (status.code() == StatusCode::unsupported && !kernel.empty()) continue;
      ASSERT_TRUE(status.ok()) << kernel << " " << to_string(c) << ": " << status.message();
      expect_right(*data, kernel);
    }
  }
  ASSERT_TRUE(set_cuda_kernel("").ok());
}

}  // namespace
}  // namespace blocksparse::conv
