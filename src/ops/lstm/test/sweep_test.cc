// The LSTM op against its reference in f64, by every instruction set, and what else it promises.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <random>

#include "blocksparse/blocksparse.h"
#include "core/random.h"
#include "ops/lstm/problem.h"
#include "ops/lstm/test/awkward.h"

namespace blocksparse::lstm {
namespace {

void expect_right(const LstmCase& c) {
  auto data = LstmData::make(c);
  ASSERT_TRUE(data.ok()) << data.status().message();
  for (const std::string& isa : cpu_isas()) {
    SCOPED_TRACE("BLOCKSPARSE_ISA=" + isa + " \"" + to_string(c) + "\"");
    ASSERT_TRUE(set_cpu_isa(isa).ok());
    const Status status = data->run();
    ASSERT_TRUE(status.ok()) << status.message();
    const auto error = data->compare();
    EXPECT_LE(error.worst, 1) << error.where;
    EXPECT_EQ(data->overrun(), "");
  }
  ASSERT_TRUE(set_cpu_isa("").ok());
}

class LstmSweep : public testing::TestWithParam<std::string_view> {};

TEST_P(LstmSweep, EveryIsaMatchesTheReference) {
  const auto c = parse_lstm_case(GetParam());
  ASSERT_TRUE(c.ok()) << c.status().message();
  expect_right(*c);
}

INSTANTIATE_TEST_SUITE_P(Awkward, LstmSweep, testing::ValuesIn(kAwkward));

TEST(Lstm, RandomProblems) {
  const char* more = std::getenv("BLOCKSPARSE_FUZZ");
  const int64_t count = more != nullptr ? std::atoll(more) : 60;
  Random rng{more != nullptr ? std::random_device{}() : 2025};
  constexpr DType kDtypes[] = {DType::f32, DType::f64, DType::bf16, DType::f16};
  for (int64_t i = 0; i < count && !testing::Test::HasFailure(); ++i) {
    LstmCase c;
    c.seed = i;
    c.block = int64_t{8} << rng.below(4);
    const int64_t most = std::max<int64_t>(1, 64 / c.block), units = 1 + rng.below(most);
    const bool own = rng.below(4) == 0;
    c.graph = "random(" + std::to_string(own ? 4 * units : units) + "," + std::to_string(units) + ",0.6)";
    c.dtype = kDtypes[rng.below(4)];
    c.t = rng.below(8);
    c.n = rng.below(3) == 0 ? rng.below(5) : rng.below(90);
    c.threads = 1 + rng.below(2);
    for (bool* flag : {&c.backward, &c.h0, &c.c0, &c.lengths, &c.sorted, &c.keep, &c.final, &c.dh0, &c.dc0, &c.dw,
                       &c.accumulate, &c.wide}) {
      *flag = rng.below(2) == 0;
    }
    expect_right(c);
  }
}

// The cell's functions against the C library, over all magnitudes that matter: without products, z is pre alone.
TEST(Lstm, GatesAreWithinAFewUlp) {
  const auto layout = Layout::from_graph("random(1,1,0)", {.block_size = 8})->stack(4);
  std::vector<float> z;
  for (float m = 1e-8f; m < 300; m *= 1.003f) z.insert(z.end(), {m, -m, m, -m, m, -m, m, -m});
  for (const float special : {0.0f, -INFINITY, INFINITY, NAN}) z.insert(z.end(), 8, special);
  const auto rows = static_cast<int64_t>(z.size()) / 8;
  std::vector<float> pre, y(z.size()), gates(4 * z.size()), cells(z.size());
  for (size_t row = 0; row < z.size(); row += 8) {
    for (int gate = 0; gate < 4; ++gate)
      pre.insert(pre.end(), z.begin() + static_cast<int64_t>(row), z.begin() + static_cast<int64_t>(row) + 8);
  }
  std::vector<char> workspace(lstm_forward_workspace_size({*layout, DType::f32, 1, rows}));
  for (const std::string& isa : cpu_isas()) {
    ASSERT_TRUE(set_cpu_isa(isa).ok());
    ASSERT_TRUE(lstm_forward(*layout,
                             {ConstTensor(pre.data(), DType::f32, {1, rows, 4, 8}),
                              ConstTensor(pre.data(), DType::f32, {0, 8, 8}),
                              {},
                              {},
                              nullptr},
                             {Tensor(y.data(), DType::f32, {1, rows, 8}),
                              {},
                              {},
                              Tensor(gates.data(), DType::f32, {1, rows, 4, 8}),
                              Tensor(cells.data(), DType::f32, {1, rows, 8})},
                             {workspace.data(), workspace.size()})
                    .ok());
    for (size_t i = 0; i < z.size(); ++i) {
      const size_t gate = i / 8 * 32 + i % 8;
      const double s = 1 / (1 + std::exp(-static_cast<double>(z[i]))), t = std::tanh(static_cast<double>(z[i]));
      if (std::isnan(z[i])) {
        EXPECT_TRUE(std::isnan(gates[gate]) && std::isnan(gates[gate + 16]) && std::isnan(y[i])) << isa;
        continue;
      }
      // The logistic function loses relative accuracy where it leaves the normal numbers.
      ASSERT_NEAR(gates[gate], s, s > 1e-37 ? 0x1p-21 * s : 1e-37) << isa << " logistic of " << z[i];
      ASSERT_NEAR(gates[gate + 16], t, 0x1p-21 * std::abs(t)) << isa << " tanh of " << z[i];
    }
  }
  ASSERT_TRUE(set_cpu_isa("").ok());
}

TEST(Lstm, SameBitsForAnyNumberOfThreads) {
  for (const char* line : {"lstm:forward f32 t=4 n=150 b=8 ba(40,4) h0 c0 keep final",
                           "lstm:backward bf16 t=4 n=150 b=8 ba(40,4) h0 c0 final dh0 dc0 dw"}) {
    auto c = *parse_lstm_case(line);
    std::vector<char> first;
    for (const int64_t threads : {1, 2, 3, 8}) {
      c.threads = threads;
      auto data = LstmData::make(c);
      ASSERT_TRUE(data.ok() && data->run().ok());
      if (first.empty()) first = data->bits();
      EXPECT_EQ(first, data->bits()) << threads << " threads";
    }
  }
}

}  // namespace
}  // namespace blocksparse::lstm
