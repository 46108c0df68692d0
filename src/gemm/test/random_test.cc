// Random problems of the linear op, by every kernel that can do them.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <random>

#include "blocksparse/blocksparse.h"
#include "core/random.h"
#include "ops/linear/problem.h"

namespace blocksparse::gemm {

using linear::LinearCase;
using linear::LinearData;
using linear::parse_linear_case;
namespace {

// Tokens around the sizes of tiles, groups and rounds.
int64_t random_tokens(Random& rng) {
  switch (rng.below(8)) {
    case 0: return 128 + rng.below(300);
    case 1: return rng.below(8);
    case 2: return 16 * (1 + rng.below(16)) + rng.below(3) - 1;
    case 3: return rng.below(4) == 0 ? 1020 + rng.below(80) : 510 + rng.below(5);
    default: return rng.below(140);
  }
}

// The problem with gate and up as its outputs, if these are whole groups.
void make_glu(LinearCase& c) {
  const auto layout = layout_of(c);
  if (!layout.ok() || layout->out_features() % 16 != 0) return;
  c.hidden = layout->out_features() / 2 - c.seed % 8;
  c.residual = false;
  c.y_order = Order::features_last;
  if (c.activation > Activation::relu) c.odd = 0;  // f(gate) is 0 sooner in f32 than in f64, and then 0 * Inf is NaN
}

// A random problem.
LinearCase random_case(Random& rng, int64_t seed) {
  auto one_of = [&](auto... choices) {
    const std::string list[] = {choices...};
    return list[static_cast<size_t>(rng.below(sizeof...(choices)))];
  };
  auto maybe = [&](const std::string& word) { return rng.below(3) == 0 ? " " + word : ""; };
  const std::string pass = one_of("fprop", "dgrad", "wgrad"), dtype = one_of("f32", "f32 tf32", "f64", "bf16", "f16");
  const int64_t b = std::stoll(one_of("8", "8", "16", "32", "64", "128"));
  // Rows of more than 32 blocks are cut if other rows are shorter: so one row is full among many with few blocks.
  const bool hub = b <= 16 && rng.below(4) == 0;
  const int64_t most = hub ? 90 : std::max<int64_t>(2, 160 / b), least = hub ? 50 : 1;
  const int64_t rows = least + rng.below(most - least + 1), columns = least + rng.below(most - least + 1);
  const int64_t n = !hub ? random_tokens(rng) : rng.below(rng.below(3) == 0 ? 8 : 80);
  std::string line = "linear:" + pass + " " + dtype + " n=" + std::to_string(n) + " b=" + std::to_string(b) +
                     " random(" + std::to_string(rows) + "," + std::to_string(columns) + "," +
                     (hub ? one_of("0", "0.02", "0.1") : one_of("0.1", "0.3", "0.7", "1")) +
                     ") seed=" + std::to_string(seed);
  line += maybe("out=" + std::to_string(rows * b - rng.below(b))) +
          maybe("in=" + std::to_string(columns * b - rng.below(b)));
  const bool whole_rows = line.find(" out=") == std::string::npos;
  if (whole_rows && b * rows <= 256) line += maybe("stack=4");
  if (hub) line += one_of(" full_row=", " full_col=") + std::to_string(rng.below(least));
  else line += maybe("empty_row=" + std::to_string(rng.below(rows))) + maybe("empty_col=0");
  line += maybe("x=first") + maybe("y=first") + maybe("pad=3") + maybe("offset=1") + maybe("w_offset=1") +
          maybe("gates") + maybe("t") + maybe("threads=" + one_of("2", "3", "7")) + maybe("values=int") +
          (rng.below(6) == 0 ? " odd=" + std::to_string(1 + rng.below(9)) : "");
  if (pass == "fprop")
    line += maybe("bias") + maybe("residual") + maybe("r=first") +
            maybe("act=" + one_of("relu", "gelu", "silu", "gelu_tanh"));
  if (pass == "wgrad") {
    line += maybe("pairs=3") + maybe("accumulate") + maybe("dgates");
    if (dtype != "f64") line += maybe("dw=f32");
  }
  const auto c = parse_linear_case(line);
  EXPECT_TRUE(c.ok()) << c.status().message();
  LinearCase problem = *c;
  if (c->pass == Pass::fprop && rng.below(4) == 0) make_glu(problem);
  // Results are exact only if every step is. gelu is not, and 8 bits may not hold the sum.
  if (c->activation > Activation::relu || c->dtype == DType::bf16) problem.integers = false;
  return problem;
}

// How many random problems, and their random numbers: always these, or <count> others with BLOCKSPARSE_FUZZ=<count>.
struct Fuzz {
  const char* more = std::getenv("BLOCKSPARSE_FUZZ");
  int64_t count = more != nullptr ? std::atoll(more) : 150;
  Random rng{more != nullptr ? std::random_device{}() : 2024};
};

// Random problems by every instruction set.
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

// Random problems by every CUDA kernel.
TEST(Linear, RandomProblemsOnCuda) {
  if (const Status status = cuda_status(); !status.ok()) GTEST_SKIP() << status.message();
  Fuzz fuzz;
  for (int64_t i = 0; i < fuzz.count; ++i) {
    LinearCase c = random_case(fuzz.rng, i);
    c.device.type = DeviceType::cuda;
    ASSERT_TRUE(set_cuda_kernel("generic").ok());  // a forced kernel's workspace suffices for all kernels
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
}  // namespace blocksparse::gemm
