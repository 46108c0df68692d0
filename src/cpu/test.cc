#include <gtest/gtest.h>
#include <omp.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <set>
#include <thread>

#include "blocksparse/blocksparse.h"
#include "core/convert.h"
#include "core/text.h"
#include "cpu/isa.h"
#include "cpu/threads.h"
#include "ops/linear/problem.h"

namespace blocksparse {
namespace {

TEST(Threads, EachTaskRunsOnce) {
  for (int32_t threads : {1, 2, 3, 16}) {
    std::vector<std::atomic<int>> runs(100);
    parallel_for(threads, 100, [&](int64_t i) { ++runs[static_cast<size_t>(i)]; });
    for (const auto& count : runs) EXPECT_EQ(count, 1);
  }
  parallel_for(4, 0, [](int64_t) { FAIL(); });
}

TEST(Threads, NeverMoreThanAsked) {
  std::atomic<int> running{0}, most{0};
  parallel_for(2, 64, [&](int64_t) {
    const int now = ++running;
    for (int seen = most; now > seen && !most.compare_exchange_weak(seen, now);) {
    }
    std::this_thread::sleep_for(std::chrono::microseconds(200));
    --running;
  });
  EXPECT_LE(most, 2);
}

TEST(Threads, AreNotWokenForSmallProblems) {
  EXPECT_EQ(worthwhile_threads(16, 0), 1);
  EXPECT_EQ(worthwhile_threads(16, 9e5), 1);
  EXPECT_EQ(worthwhile_threads(16, 2e6), 4);
  EXPECT_EQ(worthwhile_threads(16, 1e12), 16);
  EXPECT_EQ(worthwhile_threads(1, 1e12), 1);
}

// libgomp alone would wait for ever in the child.
TEST(Threads, WorkAfterFork) {
  std::atomic<int64_t> sum{0};
  parallel_for(2, 10, [&](int64_t i) { sum += i; });
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    std::atomic<int64_t> in_child{0};
    parallel_for(3, 10, [&](int64_t i) { in_child += i; });
    _exit(in_child == 45 ? 0 : 1);
  }
  int status = -1;
  for (int tenths = 0; tenths < 100 && waitpid(child, &status, WNOHANG) == 0; ++tenths) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  ASSERT_NE(status, -1) << "the child hangs";
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST(Isa, ForcingIsCheckedAndEnds) {
  const char* wanted = std::getenv("BLOCKSPARSE_ISA");
  const std::string unforced = *cpu_isa();
  EXPECT_EQ(unforced, wanted != nullptr && *wanted != '\0' ? wanted : cpu_isas().front());
  EXPECT_EQ(cpu_isas().back(), "reference");
  ASSERT_TRUE(set_cpu_isa("scalar").ok());
  EXPECT_EQ(*cpu_isa(), "scalar");
  const Status unknown = set_cpu_isa("mmx");
  EXPECT_EQ(unknown.code(), StatusCode::invalid_argument);
  EXPECT_NE(unknown.message().find("there is no \"mmx\""), std::string::npos);
  EXPECT_EQ(*cpu_isa(), "scalar");
  for (Isa isa : kAllIsas) {
    if (!cpu_runs(isa)) {
      EXPECT_EQ(set_cpu_isa(name_of(isa)).code(), StatusCode::unavailable);
    }
  }
  ASSERT_TRUE(set_cpu_isa("").ok());
  EXPECT_EQ(*cpu_isa(), unforced);
}

TEST(Isa, IsChosenForCpusThatAreNotAtHand) {
  struct Case {
    const char* cpu;
    Cpu features;
    Isa best;
    std::string_view runs;
  };
  const Case cases[] = {
      {"before Haswell", {}, Isa::scalar, "scalar, reference"},
      {"Zen 3", {.avx2 = true}, Isa::avx2, "avx2, scalar, reference"},
      {"Skylake-X", {.avx2 = true, .avx512 = true}, Isa::avx512, "avx512, avx2, scalar, reference"},
      {"Zen 5",
       {.avx2 = true, .avx512 = true, .avx512_bf16 = true, .fast_bf16 = true},
       Isa::avx512_bf16,
       "avx512_bf16, avx512, avx2, scalar, reference"},
      {"Sapphire Rapids, tiles not allowed by the system",
       {.avx2 = true, .avx512 = true, .avx512_bf16 = true},
       Isa::avx512,
       "avx512, avx512_bf16, avx2, scalar, reference"},
      {"Sapphire Rapids",
       {.avx2 = true, .avx512 = true, .avx512_bf16 = true, .amx = true},
       Isa::amx,
       "amx, avx512, avx512_bf16, avx2, scalar, reference"},
      {"Cortex-A72", {.neon = true}, Isa::neon, "neon, scalar, reference"},
      {"Neoverse V1", {.neon = true, .neon_bf16 = true}, Isa::neon_bf16, "neon_bf16, neon, scalar, reference"},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.cpu);
    EXPECT_EQ(isas_of(c.features).front(), c.best);
    for (Isa isa : kAllIsas) {
      const auto named = named_isa(name_of(isa), c.features);
      if (cpu_runs(isa, c.features)) {
        EXPECT_EQ(*named, isa);
        continue;
      }
      EXPECT_EQ(named.status().code(), StatusCode::unavailable);
      EXPECT_EQ(named.status().message(), concat("[isa] this CPU does not run ", name_of(isa), "; it runs ", c.runs));
    }
  }
}

// The identity passes values through the kernels' own conversions. convert.h is the reference for all 65,536 of them.
void expect_identity_keeps(DType dtype) {
  constexpr int64_t kAll = 1 << 16, kFeatures = 8;
  const auto layout = Layout::from_graph("diagonal(1)", {.block_size = 8});
  std::vector<uint16_t> x(kAll), y(kAll), w(64, 0);
  for (int64_t i = 0; i < kAll; ++i) x[static_cast<size_t>(i)] = static_cast<uint16_t>(i);
  const auto one = static_cast<uint16_t>(dtype == DType::bf16 ? float_to_bf16(1) : float_to_f16(1));
  for (size_t i = 0; i < 8; ++i) w[i * 9] = one;
  const int64_t n = kAll / kFeatures;
  std::vector<char> workspace(linear_fprop_workspace_size({*layout, dtype, n}));
  for (const std::string& isa : cpu_isas()) {
    ASSERT_TRUE(set_cpu_isa(isa).ok());
    const bool takes_denormals_as_zero =
        dtype == DType::bf16 && (isa == "avx512_bf16" || isa == "amx" || isa == "neon_bf16");
    const Tensor out(y.data(), dtype, {n, kFeatures});
    // Features-first, one feature a row, so that a NaN or Inf does not spread to its neighbours by 0 * Inf ...
    std::fill(y.begin(), y.end(), uint16_t{0xabcd});
    ASSERT_TRUE(linear_fprop(*layout, ConstTensor(x.data(), dtype, {n, kFeatures}),
                             ConstTensor(w.data(), dtype, {1, 8, 8}), {}, out, {workspace.data(), workspace.size()})
                    .ok());
    for (size_t row = 0; row < static_cast<size_t>(n); ++row) {
      bool finite = true;  // ... but it does within its token
      for (size_t f = 0; f < 8; ++f)
        finite = finite && std::isfinite(load_element(x.data(), static_cast<int64_t>(row * 8 + f), dtype));
      for (size_t f = 0; finite && f < 8; ++f) {
        const size_t i = row * 8 + f;
        double expected = load_element(x.data(), static_cast<int64_t>(i), dtype);
        if (takes_denormals_as_zero && std::abs(expected) < 0x1p-126) expected = 0;
        ASSERT_EQ(load_element(y.data(), static_cast<int64_t>(i), dtype), expected) << isa << " bits " << i;
      }
    }
  }
  ASSERT_TRUE(set_cpu_isa("").ok());
}
TEST(Convert, EveryBf16PassesThroughTheKernels) { expect_identity_keeps(DType::bf16); }
TEST(Convert, EveryF16PassesThroughTheKernels) { expect_identity_keeps(DType::f16); }

TEST(Convert, HalvesRoundToNearestEven) {
  EXPECT_EQ(float_to_f16(1.0f), 0x3c00);
  EXPECT_EQ(float_to_f16(65504.0f), 0x7bff);
  EXPECT_EQ(float_to_f16(65519.9f), 0x7bff);
  EXPECT_EQ(float_to_f16(65520.0f), 0x7c00);
  EXPECT_EQ(float_to_f16(0x1p-24f), 1);
  EXPECT_EQ(float_to_f16(0x1p-25f), 0);
  EXPECT_EQ(float_to_f16(0x1.8p-24f), 2);
  EXPECT_EQ(float_to_f16(1.0f + 0x1p-11f), 0x3c00);
  EXPECT_EQ(float_to_f16(1.0f + 0x1.8p-10f), 0x3c02);
  EXPECT_EQ(float_to_f16(-0.0f), 0x8000);
  EXPECT_EQ(float_to_bf16(1.0f + 0x1p-8f), 0x3f80);
  EXPECT_EQ(float_to_bf16(1.0f + 0x1.8p-7f), 0x3f82);
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const float value = f16_to_float(static_cast<uint16_t>(bits));
    if (!std::isnan(value)) {
      ASSERT_EQ(float_to_f16(value), bits);
    }
  }
}

// The polynomials of the epilogue against the C library, over all magnitudes that matter.
TEST(Activation, IsWithinFourUlp) {
  const auto layout = Layout::from_graph("diagonal(1)", {.block_size = 8, .out_features = 1, .in_features = 1});
  std::vector<float> x;
  for (float magnitude = 1e-8f; magnitude < 200; magnitude *= 1.0007f) x.insert(x.end(), {magnitude, -magnitude});
  x.insert(x.end(), {0.0f, INFINITY, NAN});
  std::vector<float> y(x.size()), w(64, 0);
  w[0] = 1;
  const auto n = static_cast<int64_t>(x.size());
  std::vector<char> workspace(linear_fprop_workspace_size({*layout, DType::f32, n}));
  for (const std::string& isa : cpu_isas()) {
    ASSERT_TRUE(set_cpu_isa(isa).ok());
    for (Activation activation : {Activation::relu, Activation::gelu, Activation::silu, Activation::gelu_tanh}) {
      ASSERT_TRUE(linear_fprop(*layout, ConstTensor(x.data(), DType::f32, {n, 1}),
                               ConstTensor(w.data(), DType::f32, {1, 8, 8}),
                               {.bias = {}, .residual = {}, .activation = activation},
                               Tensor(y.data(), DType::f32, {n, 1}), {workspace.data(), workspace.size()})
                      .ok());
      for (size_t i = 0; i < x.size(); ++i) {
        const double z = x[i];
        const double u = std::sqrt(2 / 3.14159265358979323846) * (z + 0.044715 * z * z * z);
        const double expected = activation == Activation::relu ? (z < 0 ? 0 : z)
                                : activation == Activation::gelu
                                    ? 0.5 * z * std::erfc(-z / std::sqrt(2.0))
                                    : z / (1 + std::exp(activation == Activation::silu ? -z : -2 * u));
        if (std::isnan(expected) || std::isinf(expected)) {
          EXPECT_EQ(std::isnan(y[i]), std::isnan(expected)) << isa << " " << z;
          EXPECT_EQ(std::isinf(y[i]), std::isinf(expected)) << isa << " " << z;
          continue;
        }
        ASSERT_LE(std::abs(y[i] - expected), 4 * 0x1p-23 * std::max(std::abs(z), 1.0)) << isa << " z = " << z;
        if (z < -1 && expected < -1e-30) {  // the tail keeps its relative accuracy
          ASSERT_LE(std::abs(y[i] / expected - 1), 1e-5 * (1 + z * z)) << isa << " z = " << z;
        }
      }
    }
  }
  ASSERT_TRUE(set_cpu_isa("").ok());
}

}  // namespace
}  // namespace blocksparse
