// Convolutions against the loops in f64, by every instruction set.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "blocksparse/blocksparse.h"
#include "core/text.h"
#include "ops/conv/problem.h"

namespace blocksparse::conv {
namespace {

constexpr std::string_view kAwkward[] = {
    // Nothing, or almost nothing, to do.
    "conv:fprop f32 n=0 b=8 random(4,4,0.5)",
    "conv:dgrad bf16 n=0 b=16 random(2,2,0.5)",
    "conv:wgrad f32 n=0 b=8 random(3,3,0.5) gates dgates",
    "conv:wgrad f32 n=0 b=8 random(3,3,0.5) accumulate dgates",
    "conv:fprop f32 n=1 hw=4 b=8 random(3,3,0) bias",
    "conv:wgrad f32 n=1 hw=4 b=8 random(3,3,0)",
    "conv:fprop f64 n=1 hw=1 b=128 diagonal(1) c=1 k=1 bias",
    "conv:fprop f32 n=1 hw=1 dims=1 b=8 diagonal(1)",
    "conv:dgrad f32 n=1 hw=1x1x1 r=1 b=8 random(3,2,1)",
    // Sizes around vectors and groups.
    "conv:fprop f32 n=3 hw=7 b=8 random(5,4,0.5) seed=1",
    "conv:fprop f32 n=2 hw=14 b=16 random(3,4,0.5) seed=2",
    "conv:fprop f32 n=1 hw=28 b=32 random(3,3,0.6) seed=3 first",
    "conv:fprop f32 n=2 hw=9x31 b=64 random(2,2,1) seed=4",
    "conv:dgrad f32 n=2 hw=15x3 b=8 random(6,5,0.4) seed=5",
    "conv:dgrad f32 n=1 hw=16 b=128 random(2,2,0.7) seed=6 r=2",
    "conv:fprop f32 n=3 hw=3x28 b=16 random(3,3,0.6) seed=95 bias",
    "conv:dgrad f32 n=2 hw=4x32 b=8 random(4,4,0.5) seed=96",
    "conv:fprop bf16 n=1 hw=2x45 b=16 random(3,3,0.6) seed=97",
    "conv:dgrad f64 n=2 hw=3x24 b=8 random(4,4,0.5) seed=98 first",
    "conv:wgrad f32 n=3 hw=13 b=8 random(5,4,0.5) seed=7",
    "conv:wgrad f32 n=2 hw=12x20 b=16 random(3,3,0.5) seed=8 first",
    "conv:wgrad f64 n=2 hw=6 b=64 random(2,2,0.8) seed=9",
    "conv:wgrad f32 n=1 hw=10 b=128 random(2,2,0.8) seed=10 r=2",
    // One and three dimensions.
    "conv:fprop f32 n=2 hw=37 dims=1 r=5 b=16 random(3,3,0.6) seed=11",
    "conv:dgrad f32 n=3 hw=300 dims=1 r=7 dil=4 b=8 random(3,3,0.6) seed=12 first",
    "conv:wgrad f32 n=2 hw=401 dims=1 r=3 b=8 random(3,3,0.6) seed=13",
    "conv:fprop f32 n=1 hw=4x5x6 b=16 random(2,3,0.6) seed=14",
    "conv:dgrad f64 n=1 hw=3x4x5 b=8 random(3,3,0.6) seed=15 first",
    "conv:wgrad f32 n=2 hw=3x5x4 b=8 random(3,3,0.6) seed=16",
    "conv:fprop f32 n=1 hw=5x6x7 r=1x3x2 stride=2x1x3 pad=1x0x2 after=0x2x1 dil=1x2x1 b=8 random(3,3,0.6) seed=17",
    // Strides, dilations, paddings; causal ones; taps that never meet a pixel; pixels that no tap meets.
    "conv:fprop f32 n=2 hw=15 stride=2 b=16 random(3,3,0.6) seed=20",
    "conv:fprop f32 n=2 hw=14 stride=2 r=1 pad=0 b=16 random(3,3,0.6) seed=21",
    "conv:fprop f32 n=2 hw=16 stride=4 r=4 pad=0 b=8 random(3,3,0.6) seed=22 first",
    "conv:fprop f32 n=2 hw=13 stride=3 r=2 pad=0 b=8 random(3,3,0.6) seed=23",
    "conv:dgrad f32 n=2 hw=15 stride=2 b=16 random(3,3,0.6) seed=24",
    "conv:dgrad f32 n=2 hw=17 stride=3 r=2 pad=0 b=8 random(3,3,0.6) seed=25 first",
    "conv:dgrad f32 n=2 hw=14 stride=2 r=1 pad=0 b=16 random(3,3,0.6) seed=26",
    "conv:wgrad f32 n=2 hw=15 stride=2 b=16 random(3,3,0.6) seed=27",
    "conv:wgrad f32 n=2 hw=16 stride=4 r=4 pad=0 b=8 random(3,3,0.6) seed=28 first",
    "conv:wgrad f32 n=2 hw=14 stride=2 r=1 pad=0 b=16 random(3,3,0.6) seed=29",
    "conv:fprop f32 n=2 hw=12 dil=3 b=8 random(3,3,0.6) seed=30",
    "conv:dgrad f32 n=2 hw=12 dil=2 stride=2 b=8 random(3,3,0.6) seed=31",
    "conv:wgrad f32 n=2 hw=12 dil=2 stride=3 pad=2 after=0 b=8 random(3,3,0.6) seed=32",
    "conv:fprop f32 n=2 hw=20 dims=1 r=2 dil=8 pad=8 after=0 b=8 random(3,3,0.6) seed=33",
    "conv:fprop f32 n=1 hw=3 r=3 dil=9 b=8 random(3,3,0.6) seed=34",
    "conv:dgrad f32 n=1 hw=3 r=3 pad=7 after=5 b=8 random(3,3,0.6) seed=35",
    "conv:wgrad f32 n=1 hw=3 r=3 dil=9 b=8 random(3,3,0.6) seed=36",
    "conv:fprop f32 n=2 hw=9 r=1 pad=1 b=8 random(3,3,0.6) seed=37",
    "conv:fprop f32 n=2 hw=9 r=1 pad=0 after=1 b=8 random(3,3,0.6) seed=91",
    "conv:dgrad f32 n=2 hw=9 r=1 pad=0 after=1 b=8 random(3,3,0.6) seed=92",
    "conv:wgrad f32 n=2 hw=9 r=1 pad=0 after=1 b=8 random(3,3,0.6) seed=93",
    "conv:dgrad f32 n=2 hw=7 r=1 transposed pad=0 after=1 b=8 random(3,3,0.6) seed=94",
    // The convolutions of a PixelCNN: down-shifted and down-right-shifted.
    "conv:fprop f32 n=2 hw=8 r=2x3 pad=1x1 after=0x1 b=16 random(2,4,0.6) seed=38 order bias",
    "conv:dgrad f32 n=2 hw=8 r=2x2 pad=1x1 after=0x0 b=16 random(2,4,0.6) seed=39 order",
    // Transposed.
    "conv:fprop f32 n=2 hw=7 transposed stride=2 opad=1 b=8 random(4,3,0.6) seed=40 bias act=relu",
    "conv:dgrad f32 n=2 hw=7 transposed stride=2 opad=1 b=8 random(4,3,0.6) seed=41",
    "conv:wgrad f32 n=2 hw=7 transposed stride=2 opad=1 b=8 random(4,3,0.6) seed=42 dgates gates",
    "conv:fprop f64 n=2 hw=5 transposed stride=3 r=2 pad=0 opad=2 b=16 random(2,3,0.6) seed=43 first",
    "conv:wgrad f64 n=2 hw=5 transposed stride=1 dil=2 r=3 pad=0 b=16 random(2,3,0.6) seed=44 first order",
    "conv:fprop bf16 n=1 hw=9 dims=1 r=4 transposed stride=2 pad=1 b=32 random(2,2,0.8) seed=45 residual",
    "conv:wgrad bf16 n=2 hw=3x2x4 transposed stride=2x1x2 b=8 random(2,2,0.8) seed=46 t accumulate",
    // One tap: the linear op.
    "conv:fprop f32 n=2 hw=9 r=1 b=16 random(4,4,0.5) seed=47 bias residual act=gelu gates",
    "conv:dgrad f32 n=3 hw=6 r=1 b=16 random(4,4,0.5) seed=48 first",
    "conv:fprop bf16 n=2 hw=5 r=1 b=8 random(4,4,0.5) seed=49 first residual",
    "conv:wgrad f32 n=2 hw=19 r=1 b=16 random(4,4,0.5) seed=50",
    "conv:dgrad f32 n=2 hw=9 r=1 b=16 random(4,4,0.5) seed=51 order",
    "conv:fprop f32 n=2 hw=9 r=1 b=16 random(4,4,0.5) seed=66 order",
    "conv:fprop bf16 n=2 hw=5 r=1 b=8 random(4,4,0.5) seed=67 order first residual",
    "conv:wgrad f32 n=2 hw=9 r=1 b=16 random(4,4,0.5) seed=68 order",
    // Epilogue, gates, orders, ragged channels, transposed views, types.
    "conv:fprop f32 n=2 hw=10 b=32 random(3,3,0.6) seed=52 c=75 k=90 bias residual act=silu gates",
    "conv:fprop f32 n=2 hw=10 b=16 random(3,3,0.6) seed=53 c=35 k=45 first bias residual act=gelu order",
    "conv:fprop bf16 n=2 hw=10 b=16 random(3,3,0.6) seed=54 c=35 k=45 bias residual act=gelu order",
    "conv:fprop f16 n=2 hw=10 b=8 random(3,4,0.6) seed=55 first bias residual act=relu gates",
    "conv:dgrad f16 n=2 hw=10 b=32 random(3,3,0.6) seed=56 c=75 k=90 order gates",
    "conv:dgrad bf16 n=2 hw=10 b=64 random(2,2,0.8) seed=57 c=75 k=90 order first",
    "conv:dgrad f64 n=2 hw=6 b=16 random(3,3,0.6) seed=58 t c=35 k=45",
    "conv:fprop f32 n=2 hw=6 b=16 random(3,2,0.6) seed=59 t bias",
    "conv:wgrad f32 n=2 hw=10 b=16 random(3,3,0.6) seed=60 c=35 k=45 gates dgates accumulate order",
    "conv:wgrad f32 n=2 hw=10 b=16 random(3,3,0.6) seed=61 c=35 k=45 t order first",
    "conv:wgrad bf16 n=3 hw=12 b=16 random(3,3,0.6) seed=62 gates dgates accumulate",
    "conv:wgrad bf16 n=3 hw=12 b=32 random(2,2,0.8) seed=63 dw=f32 accumulate order",
    "conv:wgrad f16 n=3 hw=12 b=8 random(4,4,0.5) seed=64 c=29 k=27 first stride=2",
    "conv:wgrad bf16 n=2 hw=9 b=8 random(4,4,0.5) seed=65 transposed gates dgates",
    // Small whole numbers: every bit must agree.
    "conv:fprop f32 n=2 hw=9 b=8 random(4,4,0.5) seed=70 values=int bias gates order",
    "conv:fprop bf16 n=2 hw=9 b=16 random(3,3,0.5) seed=71 values=int residual act=relu first",
    "conv:dgrad f16 n=2 hw=9 b=32 random(2,2,0.8) seed=72 values=int stride=2 gates",
    "conv:wgrad f32 n=2 hw=9 b=32 random(2,2,0.8) seed=73 values=int stride=2 gates accumulate dgates",
    "conv:wgrad bf16 n=2 hw=9 b=8 random(3,3,0.8) seed=74 values=int transposed dw=f32",
    // Hubs; threads; more than a round: many images, large ones, wide ones.
    "conv:fprop f32 n=1 hw=5 b=8 dense(2,60) seed=80 threads=2 bias",
    "conv:wgrad f32 n=2 hw=6 b=8 ba(30,3) seed=81 threads=2 dgates",
    "conv:dgrad f32 n=5 hw=24 b=16 random(4,4,0.4) seed=82 threads=2",
    "conv:fprop f32 n=9 hw=40 b=64 random(4,4,0.1) seed=83 threads=2",
    "conv:fprop f32 n=1 hw=150 b=64 random(1,1,1) seed=84 r=2 threads=2",
    "conv:fprop f32 n=1 hw=90000 dims=1 b=16 random(1,1,1) seed=85 r=2 threads=2",
    "conv:dgrad f32 n=1 hw=80000 dims=1 stride=2 b=16 random(1,1,1) seed=86 threads=2",
    "conv:wgrad bf16 n=1 hw=130 b=32 random(2,2,0.6) seed=87 r=2 threads=2 gates dgates",
    "conv:wgrad f32 n=1 hw=60000 dims=1 stride=2 b=16 random(1,1,1) seed=88 threads=2",
    "conv:wgrad f32 n=40 hw=16 b=16 random(4,4,0.3) seed=89 threads=2 accumulate",
    "conv:fprop f32 n=1 hw=2 r=2 dil=900 pad=900 after=0 b=16 random(1,1,1) seed=90",  // a grid would be too large
    // Taps that reach so far that each of them looks its pixels up.
    "conv:fprop f32 n=5 hw=6 dil=6 b=16 random(3,3,0.6) seed=91 order bias act=relu",
    "conv:fprop bf16 n=2 hw=7x5 r=3x2 dil=5x9 pad=5x9 after=5x0 c=41 k=39 b=16 random(3,3,0.6) seed=92 first gates "
    "residual",
    "conv:dgrad f32 n=4 hw=6 dil=6 b=64 random(3,2,0.6) seed=93 gates threads=2",
    "conv:dgrad f16 n=2 hw=9 stride=2 dil=9 pad=9 after=9 b=8 random(5,4,0.6) seed=94 order",
    "conv:wgrad f32 n=5 hw=6 dil=6 b=16 random(3,3,0.6) seed=95 gates dgates accumulate",
    "conv:wgrad bf16 n=9 hw=12x9 dil=12x9 c=59 k=62 b=32 random(2,2,1) seed=96 gates dgates threads=2",
    "conv:wgrad bf16 n=3 hw=8 dims=1 dil=7 pad=7 after=7 b=8 random(3,3,0.6) seed=97 transposed first dw=f32",
    "conv:wgrad f64 n=2 hw=5x6x4 dil=5 b=8 random(3,3,0.6) seed=98 order stride=2x1x1",
    "conv:fprop f32 n=2 hw=24 r=3 dil=20 pad=20 after=20 b=32 random(40,0.04) seed=99 threads=2",
    "conv:fprop f32 n=2 hw=24 r=3 dil=20 pad=20 after=20 b=64 random(2,3,0.7) seed=100",
    "conv:dgrad bf16 n=1 hw=24 r=3 dil=20 pad=20 after=20 b=128 random(2,1,1) seed=101",
    "conv:wgrad f32 n=3 hw=6 dil=5 pad=5 after=5 b=16 random(3,3,0.6) seed=103 dgates",
    "conv:wgrad bf16 n=2 hw=7 dil=6 pad=6 after=6 b=8 random(3,3,0.6) seed=104 gates dgates dw=f32",
    // Taps and zeros for which no workspace is promised: plain loops do these, with a workspace only for the check of
    // an order.
    "conv:fprop f32 n=1 hw=200 dims=1 r=3000 dil=310 pad=464845 after=464845 b=8 diagonal(1) seed=102 order",
};

void expect_right(const std::string& line, const ConvCase& c, const std::vector<std::string>& isas) {
  auto data = ConvData::make(c);
  ASSERT_TRUE(data.ok()) << line << ": " << data.status().message();
  EXPECT_LT(data->workspace_bytes(), size_t{64} << 20) << line;
  const bool large = data->flops() > 5e7;  // seconds of the plain loops
  for (const std::string& isa : isas) {
    if (large && isa == "reference") continue;
    ASSERT_TRUE(set_cpu_isa(isa).ok());
    const Status status = data->run();
    ASSERT_TRUE(status.ok()) << isa << " " << line << ": " << status.message();
    const auto error = large ? data->spot_check(2000) : data->compare();
    EXPECT_LE(error.worst, 1) << isa << " " << line << "\n" << error.where;
    EXPECT_EQ(data->overrun(), "") << isa << " " << line;
    // With gates any share of zeros is right: if they are few, all may be 0.
    const bool empty = c.n == 0 || data->layout().blocks() == 0 || (c.gates && data->layout().blocks() < 9);
    EXPECT_TRUE(empty || error.nonzero > 0) << line;
  }
  ASSERT_TRUE(set_cpu_isa("").ok());
}

class ConvSweep : public testing::TestWithParam<std::string_view> {};

TEST_P(ConvSweep, EveryIsaMatchesTheReference) {
  const auto c = parse_conv_case(GetParam());
  ASSERT_TRUE(c.ok()) << c.status().message();
  const auto again = parse_conv_case(to_string(*c));
  ASSERT_TRUE(again.ok()) << again.status().message();
  EXPECT_EQ(to_string(*again), to_string(*c));
  expect_right(to_string(*c), *c, cpu_isas());
}
INSTANTIATE_TEST_SUITE_P(Awkward, ConvSweep, testing::ValuesIn(kAwkward));

// Blocks, sizes and types, in every combination that takes a path of its own.
TEST(Conv, EveryCombination) {
  constexpr std::string_view kShapes[] = {"hw=9",
                                          "hw=7x10 r=2x3 stride=2 pad=1",
                                          "hw=6 dil=2",
                                          "hw=5 transposed stride=2 opad=1",
                                          "hw=17 dims=1 stride=3",
                                          "hw=3x4x5 r=2 pad=0 after=1"};
  int turn = 0;
  for (const char* pass : {"fprop", "dgrad", "wgrad"}) {
    for (const char* dtype : {"f32", "f64", "bf16", "f16"}) {
      for (int b : {8, 16, 32, 64, 128}) {
        const std::string graph = b >= 64 ? " random(1,2,1)" : " random(2,3,0.7)";
        const std::string_view extras[] = {"", " first", " gates", " order", " first order gates", " threads=2"};
        const std::string line = concat(
            "conv:", pass, " ", dtype, " n=2 b=", b, graph, " seed=", turn, " ", kShapes[static_cast<size_t>(turn % 6)],
            extras[static_cast<size_t>(turn / 6 % 6)], turn % 2 == 0 ? concat(" c=", (b >= 64 ? 2 : 3) * b - 3) : "");
        ++turn;
        const auto c = parse_conv_case(line);
        ASSERT_TRUE(c.ok()) << c.status().message();
        expect_right(line, *c, {"", "scalar"});
      }
    }
  }
}

// Threads may not change any bit.
TEST(Conv, BitsDoNotDependOnThreads) {
  for (const char* line :
       {"conv:fprop f32 n=3 hw=20 b=16 random(6,6,0.4)", "conv:dgrad f32 n=3 hw=20 b=16 ba(12,3) stride=2",
        "conv:wgrad f32 n=5 hw=20 b=16 random(6,6,0.4) gates dgates",
        "conv:wgrad f32 n=2 hw=300 dims=1 r=4 b=8 random(17,17,1) c=130"}) {
    std::vector<char> first;
    for (int threads : {1, 2, 3, 1}) {
      ConvCase c = *parse_conv_case(line);
      c.threads = threads;
      auto data = ConvData::make(c);
      ASSERT_TRUE(data->run().ok());
      const Tensor& y = data->output();
      const auto* bytes = static_cast<const char*>(y.data);
      int64_t size = size_of(y.dtype);
      for (int32_t i = 0; i < y.rank; ++i) size *= y.shape[i];
      const std::vector<char> bits(bytes, bytes + size);
      if (first.empty()) first = bits;
      EXPECT_EQ(bits, first) << line << " threads=" << threads;
    }
  }
}

}  // namespace
}  // namespace blocksparse::conv
