// Random problems of the linear op, with every kernel that can do them.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <ctime>

#include "blocksparse/blocksparse.h"
#include "core/random.h"
#include "ops/linear/problem.h"

namespace blocksparse::linear {
namespace {

// A problem at random.
LinearCase random_case(Random& rng, int64_t seed) {
  auto one_of = [&](auto... choices) {
    const std::string list[] = {choices...};
    return list[static_cast<size_t>(rng.below(sizeof...(choices)))];
  };
  auto maybe = [&](const std::string& word) { return rng.below(3) == 0 ? " " + word : ""; };
  const std::string pass = one_of("fprop", "dgrad", "wgrad");
  const int64_t b = std::stoll(one_of("8", "8", "16", "32", "64", "128"));
  const int64_t most = std::max<int64_t>(2, 160 / b), rows = 1 + rng.below(most), columns = 1 + rng.below(most);
  std::string line = "linear:" + pass + " " + one_of("f32", "f32 tf32", "f64", "bf16", "f16") +
                     " n=" + std::to_string(rng.below(4) == 0 ? 128 + rng.below(300) : rng.below(140)) +
                     " b=" + std::to_string(b) + " random(" + std::to_string(rows) + "," + std::to_string(columns) +
                     "," + one_of("0.1", "0.3", "0.7", "1") + ") seed=" + std::to_string(seed);
  line += maybe("out=" + std::to_string(rows * b - rng.below(b))) +
          maybe("in=" + std::to_string(columns * b - rng.below(b)));
  line += maybe("x=first") + maybe("y=first") + maybe("pad=3") + maybe("offset=1") + maybe("gates") + maybe("t") +
          maybe("threads=2") + maybe("values=int");
  if (pass == "fprop")
    line += maybe("bias") + maybe("residual") + maybe("r=first") + maybe("act=" + one_of("relu", "gelu", "silu"));
  if (pass == "wgrad") line += maybe("pairs=3") + maybe("accumulate") + maybe("dgates");
  const auto c = parse_linear_case(line);
  EXPECT_TRUE(c.ok()) << c.status().message();
  LinearCase problem = *c;
  // Results are exact only where every step is: not through gelu, and not where 8 bits cannot hold the sum.
  if (c->activation > Activation::relu || c->dtype == DType::bf16) problem.integers = false;
  return problem;
}

// How many random problems, and from where on: the same ones, or BLOCKSPARSE_FUZZ=<count> others.
struct Fuzz {
  const char* more = std::getenv("BLOCKSPARSE_FUZZ");
  int64_t count = more != nullptr ? std::atoll(more) : 150;
  Random rng{more != nullptr ? static_cast<uint64_t>(time(nullptr)) : 2024};
};

// Random problems, each with every instruction set.
TEST(Linear, RandomProblems) {
  Fuzz fuzz;
  for (int64_t i = 0; i < fuzz.count; ++i) {
    const LinearCase c = random_case(fuzz.rng, i);
    auto data = LinearData::make(c);
    ASSERT_TRUE(data.ok()) << to_string(c) << ": " << data.status().message();
    for (const std::string& isa : cpu_isas()) {
      ASSERT_TRUE(set_cpu_isa(isa).ok());
      const Status status = data->run();
      ASSERT_TRUE(status.ok()) << to_string(c) << ": " << status.message();
      const auto error = data->compare();
      ASSERT_LE(error.worst, 1) << isa << " " << to_string(c) << "\n" << error.where;
      ASSERT_EQ(data->overrun(), "") << isa << " " << to_string(c);
    }
  }
  ASSERT_TRUE(set_cpu_isa("").ok());
}

// The same, with every CUDA kernel.
TEST(Linear, RandomProblemsOnCuda) {
  if (const Status status = cuda_status(); !status.ok()) GTEST_SKIP() << status.message();
  Fuzz fuzz;
  for (int64_t i = 0; i < fuzz.count; ++i) {
    LinearCase c = random_case(fuzz.rng, i);
    c.device.type = DeviceType::cuda;
    auto data = LinearData::make(c);
    ASSERT_TRUE(data.ok()) << to_string(c) << ": " << data.status().message();
    for (const std::string& kernel : cuda_kernels()) {
      ASSERT_TRUE(set_cuda_kernel(kernel).ok());
      const Status status = data->run();
      if (status.code() == StatusCode::unsupported) continue;
      ASSERT_TRUE(status.ok()) << to_string(c) << ": " << status.message();
      const auto error = data->compare();
      ASSERT_LE(error.worst, 1) << kernel << " " << to_string(c) << "\n" << error.where;
      ASSERT_EQ(data->overrun(), "") << kernel << " " << to_string(c);
    }
  }
  ASSERT_TRUE(set_cuda_kernel("").ok());
}

}  // namespace
}  // namespace blocksparse::linear
