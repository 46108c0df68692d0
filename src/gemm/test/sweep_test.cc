#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "blocksparse/blocksparse.h"
#include "core/text.h"
#include "cuda/memory.h"
#include "gemm/test/awkward.h"
#include "gemm/test/awkward_few.h"
#include "gemm/test/awkward_many.h"
#include "gemm/test/awkward_odd.h"
#include "ops/linear/problem.h"

namespace blocksparse::gemm {

using linear::LinearCase;
using linear::LinearData;
using linear::parse_linear_case;
namespace {

// The line with other types instead of bf16 and f16.
std::string with_types(std::string line, std::string_view one, std::string_view other) {
  const auto replace = [&line](std::string_view what, std::string_view by) {
    if (const size_t at = line.find(what); at != std::string::npos) line.replace(at, what.size(), by);
  };
  replace(" bf16 ", concat(" ", one, " "));
  replace(" f16 ", concat(" ", other, " "));
  return line;
}

// The range of the CUDA kernel for few tokens: every block size with every edge of its numbers of tokens, and both
// passes. The other options of a call take turns.
std::vector<std::string> few_tokens(std::string_view one, std::string_view other) {
  constexpr int kTokens[] = {1, 7, 8, 16, 17, 32, 33, 63, 64, 65, 190};
  struct Shape {
    int b, rows, columns;
  };
  constexpr Shape kShapes[] = {{8, 20, 17}, {16, 9, 12}, {32, 6, 7}, {64, 4, 5}, {128, 3, 3}};
  constexpr std::string_view kFprop[] = {"",
                                         " gates",
                                         " bias residual act=gelu",
                                         " ragged values=int",
                                         " ragged gates bias act=relu x=first y=first",
                                         " x=first residual r=first act=silu",
                                         " ragged pad=3 offset=1 gates",
                                         " pad=8 y=first t",
                                         " empty_row=1 bias pad=16 values=int"};
  constexpr std::string_view kDgrad[] = {" gates values=int", " ragged", " x=first y=first", "",        " ragged gates",
                                         " pad=1 offset=3",   " pad=8",  " empty_col=0",     " t gates"};
  std::vector<std::string> lines;
  size_t turn = 0;
  for (const Shape& shape : kShapes) {
    for (const int n : kTokens) {
      for (const bool forward : {true, false}) {
        std::string more(forward ? kFprop[turn % std::size(kFprop)] : kDgrad[turn % std::size(kDgrad)]);
        const int cut = turn % 4 < 2 ? 3 : 6;  // odd and even numbers of features
        const std::string ragged =
            concat("out=", shape.rows * shape.b - cut, " in=", shape.columns * shape.b - (shape.b > 64 ? 70 : cut));
        if (const size_t at = more.find("ragged"); at != std::string::npos) more.replace(at, 6, ragged);
        lines.push_back(concat("linear:", forward ? "fprop " : "dgrad ", turn / 2 % 2 == 0 ? one : other, " n=", n,
                               " b=", shape.b, " random(", shape.rows, ",", shape.columns, ",0.5) seed=", 100 + turn,
                               more));
        ++turn;
      }
    }
  }
  for (const char* line : kAwkwardFewTokens) {
    lines.push_back(with_types(line, one, other));
  }
  return lines;
}

// Gradients of up to 1024 tokens: every block size at the edges of chunks of 32 tokens (f32: 16), and at the edges of
// what warps hold and share. The other options of a call take turns.
std::vector<std::string> few_gradients(std::string_view one, std::string_view other) {
  constexpr int kTokens[] = {1, 8, 17, 31, 32, 33, 64, 65, 100, 129, 260, 1024};
  struct Shape {
    int b, rows, columns;
  };
  constexpr Shape kShapes[] = {{8, 20, 17}, {16, 9, 12}, {32, 6, 7}, {64, 4, 5}, {128, 3, 3}};
  constexpr std::string_view kMore[] = {"",
                                        " dw=f32",
                                        " gates accumulate dw=f32",
                                        " x=first y=first",
                                        " values=int dgates",
                                        " ragged pad=3 offset=1 dw=f32",
                                        " t dw=f32 x=first",
                                        " ragged gates dgates accumulate",
                                        " pad=8 y=first accumulate",
                                        " pairs=3 dw=f32",
                                        " pairs=2 x=first gates dgates dw=f32",
                                        " ragged x=first y=first dgates dw=f32 accumulate",
                                        " empty_row=1 empty_col=0 values=int"};
  std::vector<std::string> lines;
  size_t turn = 0;
  for (const Shape& shape : kShapes) {
    for (const int n : kTokens) {
      std::string more(kMore[turn % std::size(kMore)]);
      if (const size_t at = more.find("ragged"); at != std::string::npos) {
        more.replace(at, 6, concat("out=", shape.rows * shape.b - 3, " in=", shape.columns * shape.b - 5));
      }
      lines.push_back(concat("linear:wgrad ", turn % 2 == 0 ? one : other, " n=", n, " b=", shape.b, " random(",
                             shape.rows, ",", shape.columns, ",0.5) seed=", 700 + turn, more));
      ++turn;
    }
  }
  for (const char* line : {
           // Warps with several batches of tiles, tiles across rows, empty rows.
           "linear:wgrad bf16 n=3 b=8 random(600,600,0.3) seed=1",
           "linear:wgrad f16 n=50 b=8 random(300,300,0.02) seed=2 dw=f32 dgates",
           "linear:wgrad bf16 n=32 b=16 random(100,120,0.4) seed=3 dw=f32",
           "linear:wgrad f16 n=64 b=32 ba(60,5) seed=4 gates",
           "linear:wgrad bf16 n=17 b=64 random(40,50,0.3) seed=5 dgates",
           "linear:wgrad bf16 n=33 b=128 random(14,14,0.3) seed=6",
           // One tile for each warp, shared by two, by four.
           "linear:wgrad bf16 n=65 b=32 random(82,82,0.25) seed=7 dw=f32",
           "linear:wgrad f16 n=100 b=32 random(45,45,0.45) seed=8",
           "linear:wgrad bf16 n=400 b=128 random(5,5,1) seed=9 dgates gates",
           "linear:wgrad f16 n=70 b=8 random(200,300,0.2) seed=10",
           // Pairs within a chunk, more than a launch packs; orders that differ.
           "linear:wgrad bf16 n=1 b=32 random(6,6,0.5) seed=11 pairs=70 dw=f32",
           "linear:wgrad f16 n=5 b=8 random(9,9,0.5) seed=12 pairs=180 x=first",
           "linear:wgrad bf16 n=32 b=16 random(9,9,0.5) seed=13 pairs=20 y=first dgates",
           // A thread block for two blocks of dW of which only one exists: it must be added to once.
           "linear:wgrad bf16 n=65 b=64 diagonal(3) seed=14 accumulate",
       }) {
    lines.push_back(with_types(line, one, other));
  }
  return lines;
}

// The range of the CUDA kernel for many tokens, and what lies just beyond it.
std::vector<std::string> many_tokens(std::string_view one, std::string_view other) {
  struct Shape {
    int b, rows, columns;
    std::string_view density;
  };
  constexpr Shape kShapes[] = {{8, 41, 37, "0.3"},  {8, 70, 61, "0.04"}, {16, 21, 23, "0.3"}, {16, 33, 18, "1"},
                               {32, 11, 13, "0.3"}, {32, 9, 20, "1"},    {64, 5, 6, "0.5"},   {128, 3, 4, "0.5"}};
  constexpr int kTokens[] = {128, 129, 300, 513};
  constexpr std::string_view kFprop[] = {"",
                                         " bias residual act=gelu",
                                         " ragged pad=3 values=int",
                                         " ragged pad=3 bias act=relu y=first",
                                         " y=first act=silu",
                                         " t",
                                         " empty_row=1 bias",
                                         " out=ragged pad=5 residual r=first",
                                         " x=first pad=align",
                                         " gates",
                                         " x=first y=first pad=align ragged bias residual r=first act=relu",
                                         " gates ragged bias",
                                         " x=first y=first pad=align gates values=int",
                                         " offset=1 pad=align"};
  constexpr std::string_view kDgrad[] = {"",
                                         " ragged pad=3",
                                         " values=int",
                                         " in=ragged pad=5",
                                         " t",
                                         " empty_col=0",
                                         " y=first",
                                         " gates",
                                         " x=first y=first pad=align",
                                         " x=first pad=align ragged gates"};
  std::vector<std::string> lines;
  size_t turn = 0;
  for (const Shape& shape : kShapes) {
    for (const int n : kTokens) {
      for (const bool forward : {true, false}) {
        std::string more(forward ? kFprop[turn / 2 % std::size(kFprop)] : kDgrad[turn / 2 % std::size(kDgrad)]);
        const auto replace = [&more](std::string_view what, const std::string& by) {
          if (const size_t at = more.find(what); at != std::string::npos) more.replace(at, what.size(), by);
        };
        replace("pad=align", concat("pad=", 8 - n % 8));
        const std::string out = concat("out=", shape.rows * shape.b - 3),
                          in = concat("in=", shape.columns * shape.b - 3);
        replace("out=ragged", concat("out=", shape.rows * shape.b - 5));
        replace("in=ragged", concat("in=", shape.columns * shape.b - 5));
        replace("ragged", concat(out, " ", in));
        lines.push_back(concat("linear:", forward ? "fprop " : "dgrad ", turn / 4 % 2 == 0 ? one : other, " n=", n,
                               " b=", shape.b, " random(", shape.rows, ",", shape.columns, ",", shape.density,
                               ") seed=", 300 + turn, more));
        ++turn;
      }
    }
  }
  constexpr std::string_view kWgrad[] = {"",
                                         " gates accumulate",
                                         " dw=f32 ragged pad=3",
                                         " t dw=f32",
                                         " accumulate dw=f32 ragged pad=3 values=int",
                                         " gates dw=f32 accumulate",
                                         " dgates",
                                         " x=first y=first pad=align dw=f32",
                                         " dgates gates accumulate ragged pad=3",
                                         " x=first y=first pad=align ragged dgates",
                                         " x=first"};
  for (const Shape& shape : kShapes) {
    for (const int n : {128, 300, 1030}) {
      std::string more(kWgrad[turn++ % std::size(kWgrad)]);
      if (const size_t at = more.find("pad=align"); at != std::string::npos) {
        more.replace(at, 9, concat("pad=", 8 - n % 8));
      }
      if (const size_t at = more.find("ragged"); at != std::string::npos) {
        more.replace(at, 6, concat("out=", shape.rows * shape.b - 3, " in=", shape.columns * shape.b - 3));
      }
      lines.push_back(concat("linear:wgrad ", turn / 3 % 2 == 0 ? one : other, " n=", n, " b=", shape.b, " random(",
                             shape.rows, ",", shape.columns, ",", shape.density, ") seed=", 500 + turn, more));
    }
  }
  for (const char* line : {
           // Edges within a block of 128; a layout without blocks.
           "linear:wgrad bf16 n=1100 b=128 random(3,3,1) in=304 pad=8 seed=21 dw=f32",
           "linear:wgrad f16 n=1030 b=128 random(2,2,1) in=136 out=152 seed=22 accumulate",
           "linear:fprop bf16 n=256 b=64 random(4,4,0) seed=23 bias",
           "linear:dgrad f16 n=300 b=16 random(4,4,0) seed=24",
           "linear:wgrad bf16 n=1024 b=64 random(4,4,0) seed=25",
           // W at 2, 4 and 8 bytes, patches of each kind, either way.
           "linear:fprop bf16 n=300 b=8 random(41,37,0.04) seed=26 w_offset=1 gates out=321 in=291",
           "linear:dgrad f16 n=300 b=8 random(41,37,0.04) seed=27 w_offset=2 out=321 in=291",
           "linear:fprop f16 n=300 b=8 random(41,37,0.3) seed=28 w_offset=4 in=291",
           "linear:dgrad bf16 n=300 b=8 random(41,37,0.3) seed=29 w_offset=1 gates out=321",
           "linear:fprop bf16 n=300 b=16 random(21,23,0.2) seed=30 w_offset=2 gates",
           "linear:dgrad f16 n=300 b=16 random(21,23,0.2) seed=31 w_offset=4 out=331",
           "linear:fprop f16 n=300 b=16 random(21,23,0.5) seed=32 w_offset=1 in=357 values=int",
           "linear:dgrad bf16 n=300 b=16 random(21,23,0.5) seed=33 w_offset=2 out=331 gates",
           "linear:fprop bf16 n=300 b=32 random(11,13,0.3) seed=34 w_offset=4 in=406",
           "linear:dgrad f16 n=300 b=32 random(11,13,0.3) seed=35 w_offset=1 gates out=342",
           "linear:dgrad bf16 n=300 b=32 random(11,13,0.7) seed=36 w_offset=2 out=342",
           "linear:fprop f16 n=300 b=64 random(5,6,0.5) seed=37 w_offset=4",
           "linear:dgrad bf16 n=300 b=128 random(3,4,0.5) seed=38 w_offset=1 gates",
       }) {
    lines.push_back(with_types(line, one, other));
  }
  return lines;
}

// More than one round of a card.
std::vector<std::string> many_rounds(std::string_view one, std::string_view other) {
  std::vector<std::string> lines;
  for (const char* line : {
           // More jobs than thread blocks, some of them shared.
           "linear:wgrad bf16 n=999 b=8 random(150,150,0.05) seed=11 dw=f32",
           "linear:wgrad f16 n=700 b=16 ba(150,5) seed=12 values=int dw=f32",
           "linear:wgrad bf16 n=500 b=32 random(100,100,0.3) seed=13 gates accumulate",
           "linear:wgrad bf16 n=500 b=64 ba(60,6) seed=14",
           "linear:wgrad f16 n=300 b=128 random(24,24,0.6) seed=15 dw=f32",
           "linear:wgrad f16 n=1030 b=32 random(60,60,0.3) seed=16 dgates",
           "linear:wgrad bf16 n=1100 b=64 random(20,20,0.3) seed=17 dw=f32 pairs=3 accumulate dgates",
           "linear:wgrad bf16 n=1056 b=16 ba(150,5) seed=18 x=first y=first dgates gates",
           // Lists whose pairs end within a step; more pairs than a launch takes; dW of f32 and of 16 bits.
           "linear:wgrad bf16 n=150 b=16 random(40,50,0.2) seed=50 pairs=8 dw=f32 gates",
           "linear:wgrad f16 n=104 b=128 random(14,14,0.4) seed=51 pairs=12 x=first y=first dgates",
           "linear:wgrad bf16 n=201 b=32 random(40,30,0.3) seed=52 pairs=25 dw=f32 values=int accumulate",
           "linear:wgrad f16 n=80 b=64 random(10,12,0.5) seed=53 pairs=26 dgates",
           "linear:wgrad bf16 n=170 b=16 random(45,45,0.4) seed=54 pairs=7 out=712 in=712",
           "linear:wgrad f16 n=544 b=128 random(18,18,0.6) seed=19 x=first y=first dgates",
           // Patches of 128 x 64 that nearly all have blocks; jobs of fewer patches, so that every thread block has
           // one.
           "linear:wgrad bf16 n=1000 b=8 random(170,130,0.3) seed=42 dw=f32",
           "linear:wgrad f16 n=500 b=16 random(90,190,0.5) seed=43 out=1435 in=3031 gates accumulate dgates",
           "linear:wgrad bf16 n=544 b=32 random(80,80,0.6) seed=44 x=first y=first dgates gates",
           "linear:wgrad f16 n=300 b=8 dense(300,300) seed=45 values=int dw=f32",
           "linear:wgrad bf16 n=20000 b=16 random(16,16,0.5) seed=46 dw=f32 accumulate",
           "linear:wgrad bf16 n=640 b=64 random(64,64,0.1) seed=47 values=int dw=f32",
           "linear:wgrad f16 n=640 b=128 random(32,32,0.1) seed=48 dw=f32",
           // Few jobs, each shared by many thread blocks.
           "linear:wgrad bf16 n=9000 b=128 random(2,2,0.5) seed=20 accumulate dgates",
           "linear:wgrad f16 n=12000 b=16 random(9,7,0.3) seed=21 dw=f32 gates",
           "linear:wgrad bf16 n=7001 b=64 random(3,4,0.6) seed=22 values=int dw=f32",
           // More patches in a chunk than a record takes, and a residual.
           "linear:fprop bf16 n=400 b=16 diagonal(64,16) seed=23 bias residual",
           "linear:dgrad f16 n=300 b=32 diagonal(32,8) seed=24 values=int",
           // More than 256 tiles, or strips. Most of them are empty, and so are the last ones.
           "linear:fprop bf16 n=128 b=64 random(530,2,0.1) seed=39 empty_row=529 values=int",
           "linear:wgrad bf16 n=1024 b=64 random(300,2,0.1) seed=40 empty_row=299 dw=f32 values=int",
           "linear:wgrad f16 n=1024 b=128 random(270,2,0.05) seed=41 empty_row=269 dw=f32",
           // More tokens than the kernel for few tokens takes in a launch.
           "linear:fprop bf16 n=17000 b=8 random(5,4,0.6) seed=60 bias residual act=relu x=first",
           "linear:dgrad f16 n=17100 b=32 random(3,2,0.8) seed=61 gates pad=3",
           "linear:fprop bf16 n=1300 b=64 random(2,140,0.3) seed=62 y=first",
           "linear:dgrad bf16 n=1100 b=16 ba(100,3) seed=63 offset=1",
           // More tiles than thread blocks, rows of very different lengths.
           "linear:fprop bf16 n=9000 b=16 random(20,6,0.3) seed=1",
           "linear:dgrad f16 n=2500 b=32 ba(60,3) seed=2 values=int",
           "linear:fprop f16 n=2000 b=64 ba(40,3) seed=3 bias",
           "linear:dgrad bf16 n=2000 b=128 ba(20,3) seed=4",
           "linear:fprop bf16 n=3500 b=8 ba(150,3) seed=5",
           "linear:dgrad bf16 n=1000 b=8 dense(80,80) seed=6",
           "linear:fprop bf16 n=512 b=32 dense(20,150) seed=7",
           // More tiles of few features than a thread block has stages.
           "linear:fprop bf16 n=34000 b=16 random(2,32,0.3) seed=8 bias",
           "linear:dgrad f16 n=17000 b=32 random(2,16,0.4) seed=9",
           "linear:fprop f16 n=20000 b=8 random(17,20,0.2) seed=10 residual act=gelu",
       }) {
    lines.push_back(with_types(line, one, other));
  }
  return lines;
}

class LinearSweep : public testing::TestWithParam<std::string> {};

TEST_P(LinearSweep, EveryIsaMatchesTheReference) {
  auto c = parse_linear_case(GetParam());
  ASSERT_TRUE(c.ok()) << c.status().message();
  auto data = LinearData::make(*c);
  ASSERT_TRUE(data.ok()) << data.status().message();
  for (const std::string& isa : cpu_isas()) {
    SCOPED_TRACE("BLOCKSPARSE_ISA=" + isa + " blocksparse-bench \"" + to_string(*c) + "\"");
    ASSERT_TRUE(set_cpu_isa(isa).ok());
    const Status status = data->run();
    ASSERT_TRUE(status.ok()) << status.message();
    const auto error = data->compare();
    EXPECT_LE(error.worst, 1) << error.where;
    const bool something = c->n * c->pairs > 0 && data->layout().blocks() > 0;
    EXPECT_GT(error.nonzero, something ? 0.3 : -1.0);  // zeros agree with anything
    EXPECT_EQ(data->overrun(), "");
  }
  ASSERT_TRUE(set_cpu_isa("").ok());
}

void every_cuda_kernel(const std::string& line) {
  if (const Status status = cuda_status(); !status.ok()) GTEST_SKIP() << status.message();
  auto c = parse_linear_case(line);
  ASSERT_TRUE(c.ok()) << c.status().message();
  c->device.type = DeviceType::cuda;
  ASSERT_TRUE(set_cuda_kernel("generic").ok());  // a forced kernel's workspace suffices for all kernels
  auto data = LinearData::make(*c);
  ASSERT_TRUE(data.ok()) << data.status().message();
  int did_it = 0;
  for (const std::string& kernel : cuda_kernels()) {
    SCOPED_TRACE("BLOCKSPARSE_CUDA_KERNEL=" + kernel + " blocksparse-bench \"" + to_string(*c) + "\"");
    ASSERT_TRUE(set_cuda_kernel(kernel).ok());
    const Status status = data->run();
    if (status.code() == StatusCode::unsupported) continue;
    ASSERT_TRUE(status.ok()) << status.message();
    ++did_it;
    const auto error = data->compare();
    EXPECT_LE(error.worst, 1) << error.where;
    EXPECT_EQ(data->overrun(), "");
  }
  EXPECT_GT(did_it, 0);
  ASSERT_TRUE(set_cuda_kernel("").ok());
}

TEST_P(LinearSweep, EveryCudaKernelMatchesTheReference) { every_cuda_kernel(GetParam()); }

// A number just below 1 + 2^-10 becomes 1 + 2^-10 if it is rounded to 11 bits, and 1 if it is cut. For random numbers
// the bound of the sweep has room for both.
TEST(Tf32, IsRoundedAndNotCutByEveryCudaKernel) {
  if (const Status status = cuda_status(); !status.ok()) GTEST_SKIP() << status.message();
  constexpr float kBelow = 0x1.003ffep0f;
  for (const char* line : {"linear:fprop f32 n=300 b=32 dense(3,4) tf32", "linear:dgrad f32 n=300 b=32 dense(3,4) tf32",
                           "linear:wgrad f32 n=300 b=32 dense(3,4) tf32"}) {
    ASSERT_TRUE(set_cuda_kernel("generic").ok());  // a forced kernel's workspace suffices for all kernels
    LinearData data = *LinearData::make(*parse_linear_case(concat(line, " device=cuda")));
    const bool gradient = data.spec().pass == Pass::wgrad;
    const Tensor x = data.x(), other = gradient ? data.dy() : data.weights();
    const Tensor& y = data.output();
    const auto fill = [&data](const Tensor& tensor, float value) {
      int64_t count = 1;
      for (int i = 0; i < tensor.rank; ++i) count *= tensor.shape[static_cast<size_t>(i)];
      const std::vector<float> values(static_cast<size_t>(count), value);
      const Tensor to = data.placed(tensor);
      ASSERT_TRUE(cuda::copy_to_device(to.device, to.data, values.data(), values.size() * sizeof(float)).ok());
    };
    const int64_t terms = gradient ? x.shape[0] : x.shape[1];
    const float expected = static_cast<float>(terms) * (1 + 0x1p-10f);
    for (const bool of_x : {true, false}) {
      fill(x, of_x ? kBelow : 1);
      fill(other, of_x ? 1 : kBelow);
      for (const std::string& kernel : cuda_kernels()) {
        SCOPED_TRACE(concat(kernel, of_x ? ", x: " : ", the other: ", line));
        ASSERT_TRUE(set_cuda_kernel(kernel).ok());
        const Status status = data.run();
        if (status.code() == StatusCode::unsupported) continue;
        ASSERT_TRUE(status.ok()) << status.message();
        linear::for_each_element(y, [&](int64_t i) {
          ASSERT_NEAR(static_cast<const float*>(y.data)[i], expected, static_cast<float>(terms) * 0x1p-13f) << i;
        });
      }
    }
  }
  ASSERT_TRUE(set_cuda_kernel("").ok());
}

// Cases that say nothing new about CPUs.
class LinearCudaSweep : public testing::TestWithParam<std::string> {};
TEST_P(LinearCudaSweep, EveryCudaKernelMatchesTheReference) { every_cuda_kernel(GetParam()); }

INSTANTIATE_TEST_SUITE_P(Awkward, LinearSweep,
                         testing::ValuesIn(std::vector<std::string>(std::begin(kAwkward), std::end(kAwkward))));
INSTANTIATE_TEST_SUITE_P(FewTokens, LinearSweep, testing::ValuesIn(few_tokens("bf16", "f16")));
INSTANTIATE_TEST_SUITE_P(FewGradients, LinearSweep, testing::ValuesIn(few_gradients("bf16", "f16")));
INSTANTIATE_TEST_SUITE_P(ManyTokens, LinearSweep, testing::ValuesIn(many_tokens("bf16", "f16")));
INSTANTIATE_TEST_SUITE_P(ManyRounds, LinearCudaSweep, testing::ValuesIn(many_rounds("bf16", "f16")));
INSTANTIATE_TEST_SUITE_P(SmallBlocks, LinearCudaSweep,
                         testing::ValuesIn(std::vector<std::string>(std::begin(kAwkwardManyTokens),
                                                                    std::end(kAwkwardManyTokens))));
INSTANTIATE_TEST_SUITE_P(InfAndNaN, LinearSweep,
                         testing::ValuesIn(std::vector<std::string>(std::begin(kAwkwardOdd), std::end(kAwkwardOdd))));
INSTANTIATE_TEST_SUITE_P(F32FewTokens, LinearCudaSweep, testing::ValuesIn(few_tokens("f32", "f32 tf32")));
INSTANTIATE_TEST_SUITE_P(F32FewGradients, LinearCudaSweep, testing::ValuesIn(few_gradients("f32 tf32", "f32 tf32")));
INSTANTIATE_TEST_SUITE_P(F32ManyTokens, LinearCudaSweep, testing::ValuesIn(many_tokens("f32", "f32 tf32")));
INSTANTIATE_TEST_SUITE_P(F32ManyRounds, LinearCudaSweep, testing::ValuesIn(many_rounds("f32", "f32 tf32")));

}  // namespace
}  // namespace blocksparse::gemm
