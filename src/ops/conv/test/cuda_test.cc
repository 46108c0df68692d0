// Convolutions on a card: every kernel against the loops in f64, repeatable bits, graphs, streams.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "blocksparse/blocksparse.h"
#include "core/text.h"
#include "cuda/memory.h"
#include "ops/conv/problem.h"

namespace blocksparse::conv {
namespace {

constexpr Device kCard{DeviceType::cuda, 0};

ConvData make(std::string_view line) {
  auto data = ConvData::make(*parse_conv_case(concat(line, " device=cuda")));
  EXPECT_TRUE(data.ok()) << data.status().message();
  return *std::move(data);
}

void expect_right(ConvData& data) {
  const Status status = data.download_outputs();
  ASSERT_TRUE(status.ok()) << status.message();
  const auto error = data.compare();
  EXPECT_LE(error.worst, 1) << to_string(data.spec()) << ": " << error.where;
  EXPECT_EQ(data.overrun(), "");
}

constexpr std::string_view kLines[] = {
    // Whole channels, which the copying hardware gathers; every block size; one tile more and one less.
    "conv:fprop bf16 n=2 hw=9 b=8 random(6,5,0.4)",
    "conv:fprop bf16 n=3 hw=13 b=16 random(9,7,0.3) bias act=gelu",
    "conv:fprop f16 n=2 hw=16 b=32 random(9,5,0.3) bias residual act=relu",
    "conv:fprop bf16 n=1 hw=20x13 b=64 random(4,3,0.6) gates bias",
    "conv:fprop f16 n=5 hw=8 b=128 random(3,2,0.6) act=silu",
    "conv:fprop bf16 n=4 hw=12 b=8 random(20,20,0.05) gates",
    "conv:dgrad bf16 n=3 hw=11 b=8 random(6,5,0.4)",
    "conv:dgrad f16 n=3 hw=13 b=16 random(9,7,0.3) gates",
    "conv:dgrad bf16 n=2 hw=16 b=32 random(5,9,0.3)",
    "conv:dgrad bf16 n=1 hw=20x13 b=64 random(4,3,0.6)",
    "conv:dgrad f16 n=5 hw=8 b=128 random(3,2,0.6) gates",
    "conv:wgrad bf16 n=3 hw=13 b=8 random(6,5,0.4) dgates gates",
    "conv:wgrad f16 n=3 hw=13 b=16 random(9,7,0.3) dw=f32 accumulate",
    "conv:wgrad bf16 n=2 hw=16 b=32 random(9,5,0.3) accumulate dgates",
    "conv:wgrad bf16 n=1 hw=40x33 b=64 random(4,3,0.6) gates",
    "conv:wgrad f16 n=9 hw=8 b=128 random(3,2,0.6) dgates dw=f32",
    // Taps that share pixels in shared memory: several tiles, chunks of channels and jobs, and taps that reach far.
    "conv:fprop bf16 n=2 hw=17x15 b=32 random(12,8,0.3) bias act=relu",
    "conv:fprop f16 n=1 hw=17 r=5 b=16 random(20,18,0.2) act=gelu",
    "conv:fprop bf16 n=1 hw=20x15 dil=2 b=64 random(3,5,0.5) gates bias",
    "conv:fprop bf16 n=9 hw=7 b=64 random(5,5,0.3)",
    "conv:fprop bf16 n=4 hw=19 b=16 diagonal(9) bias",
    "conv:dgrad bf16 n=1 hw=20x15 dil=3x2 pad=1x4 after=2x3 b=16 random(7,20,0.4)",
    "conv:fprop bf16 n=1 hw=300 dims=1 r=7 pad=9 after=2 b=8 random(20,20,0.05)",
    "conv:dgrad f16 n=1 hw=18 b=64 random(6,5,0.3) gates",
    "conv:dgrad bf16 n=1 hw=11x24 r=3x5 pad=1x0 after=0x3 b=32 random(6,9,0.4)",
    "conv:dgrad bf16 n=12 hw=7 b=16 random(20,17,0.2)",
    "conv:wgrad bf16 n=1 hw=20 b=64 random(5,4,0.5) dw=f32",
    "conv:wgrad bf16 n=2 hw=17x11 b=32 random(9,9,0.3) accumulate",
    "conv:wgrad f16 n=1 hw=29 dil=3 pad=2 after=5 b=16 random(9,9,0.3)",
    "conv:wgrad bf16 n=3 hw=20 b=8 random(20,19,0.1) dw=f32 accumulate",
    "conv:wgrad f16 n=1 hw=3x35 b=64 random(24,24,0.25)",
    "conv:fprop bf16 n=2 hw=20 b=128 random(3,3,0.35) bias act=silu",
    "conv:fprop f16 n=2 hw=15 b=128 random(2,2,0.8) k=200",
    "conv:fprop bf16 n=1 hw=14 r=2 b=32 random(9,7,0.3) k=272",
    "conv:dgrad bf16 n=2 hw=19 b=128 random(3,2,0.4)",
    "conv:wgrad bf16 n=2 hw=19 b=128 random(3,2,0.5) dw=f32 accumulate",
    "conv:wgrad bf16 n=2 hw=17 b=128 random(2,3,0.8) k=200",
    // More jobs than thread blocks have steps.
    "conv:wgrad f16 n=1 hw=12 b=8 random(80,80,0.1)",
    "conv:wgrad bf16 n=1 hw=12 b=128 random(6,6,0.6) k=712 accumulate",
    // Four jobs of positions at once, and two; four warpgroups of a thread block.
    "conv:fprop bf16 n=6 hw=16 b=32 random(32,2,0.1) bias act=relu",
    "conv:fprop f16 n=6 hw=16 b=16 random(64,4,0.1)",
    "conv:dgrad bf16 n=6 hw=16 b=64 random(2,16,0.1)",
    "conv:fprop bf16 n=6 hw=16 b=32 random(24,2,0.15)",
    "conv:dgrad f16 n=6 hw=16 b=64 random(2,12,0.1)",
    "conv:fprop bf16 n=1 hw=12x120 b=64 random(16,1,0.2)",
    "conv:dgrad bf16 n=1 hw=12x120 b=32 random(2,32,0.1)",
    // Geometry: strides, dilation, padding that differs, kernels that are even, one and three sizes.
    "conv:fprop bf16 n=3 hw=15 stride=2 b=32 random(4,4,0.5)",
    "conv:fprop bf16 n=3 hw=15x22 stride=3x2 r=5x2 pad=1x0 after=4x2 b=16 random(4,4,0.5)",
    "conv:fprop f16 n=2 hw=17 dil=3 b=32 random(4,4,0.5)",
    "conv:fprop bf16 n=2 hw=200 dims=1 r=5 dil=4 pad=16 after=0 b=16 random(4,4,0.5)",
    "conv:fprop bf16 n=2 hw=6x7x8 b=32 random(3,3,0.5) residual",
    "conv:dgrad bf16 n=3 hw=16 stride=2 b=32 random(4,4,0.5) gates",
    "conv:dgrad f16 n=3 hw=15x22 stride=3x2 r=5x2 pad=1x0 after=4x2 b=16 random(4,4,0.5)",
    "conv:dgrad bf16 n=2 hw=14 stride=2 r=1 pad=0 b=64 random(3,3,0.5)",
    "conv:dgrad bf16 n=2 hw=19 dil=2 stride=2 b=128 random(2,2,0.8)",
    "conv:dgrad bf16 n=2 hw=6x7x8 stride=2 b=32 random(3,3,0.5)",
    "conv:wgrad bf16 n=3 hw=15x22 stride=3x2 r=5x2 pad=1x0 after=4x2 b=16 random(4,4,0.5)",
    "conv:wgrad bf16 n=3 hw=6x7x8 b=32 random(3,3,0.5)",
    // One slice, with taps beyond it.
    "conv:dgrad bf16 n=5 hw=3x5x8 r=3x1x3 stride=3x1x1 dil=2x3x3 pad=2x1x5 after=2x0x5 b=128 random(2,2,0.8)",
    "conv:wgrad bf16 n=5 hw=1x9x8 r=1x3x3 stride=3x1x1 pad=1x1x1 b=64 random(2,2,0.8)",
    "conv:fprop bf16 n=2 hw=9 transposed stride=2 opad=1 b=32 random(4,3,0.6) bias act=relu",
    "conv:fprop bf16 n=2 hw=9 transposed stride=2 opad=1 b=32 random(4,3,0.6) bias residual",
    "conv:dgrad f16 n=2 hw=9 transposed stride=2 opad=1 b=16 random(4,3,0.6)",
    "conv:wgrad bf16 n=2 hw=9 transposed stride=2 opad=1 b=16 random(4,3,0.6) gates dgates",
    // One tap: the linear op; not where padding makes y larger.
    "conv:fprop bf16 n=3 hw=16 r=1 b=32 random(6,6,0.4) bias",
    "conv:wgrad f32 n=3 hw=16 r=1 b=32 random(6,6,0.4) dgates",
    "conv:dgrad f32 n=3 hw=16 r=1 pad=1 b=16 random(6,6,0.4)",
    "conv:fprop bf16 n=3 hw=16 r=1 pad=0 after=1 b=16 random(6,6,0.4)",
    // What only the generic kernels do.
    "conv:fprop f32 n=2 hw=10 b=32 random(3,3,0.6) c=75 k=90 bias residual act=silu gates",
    "conv:fprop bf16 n=2 hw=10 b=16 random(3,3,0.6) c=35 k=45 first bias residual act=gelu order",
    "conv:fprop f64 n=2 hw=9 b=64 random(2,2,0.8) stride=2",
    "conv:dgrad f16 n=2 hw=10 b=32 random(3,3,0.6) c=75 k=90 order gates",
    "conv:dgrad f32 n=2 hw=15 stride=2 b=128 random(2,2,0.8) first",
    "conv:wgrad f32 n=2 hw=10 b=16 random(3,3,0.6) c=35 k=45 gates dgates accumulate order",
    "conv:wgrad f64 n=2 hw=9 b=128 random(2,2,0.8) dgates",
    // Orders of channels: copied for the other kernels, of whole rows of channels and where the last tile has fewer.
    "conv:fprop bf16 n=2 hw=17x15 b=32 random(12,8,0.3) bias act=relu order",
    "conv:fprop f16 n=3 hw=13 b=16 random(9,7,0.3) bias residual order",
    "conv:fprop bf16 n=3 hw=9 b=8 random(6,5,0.4) gates order",
    "conv:fprop bf16 n=3 hw=15 stride=2 b=32 random(4,4,0.5) order",
    "conv:fprop bf16 n=2 hw=6x7x8 b=32 random(3,3,0.5) residual order",
    "conv:fprop bf16 n=1 hw=14 b=32 random(9,7,0.3) t order",
    "conv:fprop f16 n=2 hw=12 b=64 random(2,100,0.1) order",
    "conv:fprop bf16 n=2 hw=9 b=128 random(2,65,0.1) order",
    "conv:fprop bf16 n=2 hw=9 transposed stride=2 opad=1 b=32 random(4,3,0.6) bias order",
    "conv:fprop bf16 n=3 hw=16 r=1 b=32 random(6,6,0.4) bias order",
    "conv:fprop bf16 n=1 hw=3 r=1 b=32 random(6,6,0.4) order",
    "conv:fprop f32 n=3 hw=16 r=1 b=32 random(6,6,0.4) order",
    "conv:fprop bf16 n=3 hw=14 b=32 random(5,4,0.5) values=int order",
    "conv:dgrad bf16 n=2 hw=16 b=32 random(5,9,0.3) gates order",
    "conv:dgrad f16 n=3 hw=15 stride=2 b=16 random(4,4,0.5) order",
    "conv:dgrad bf16 n=3 hw=16 r=1 b=32 random(6,6,0.4) order",
    "conv:dgrad bf16 n=2 hw=12 b=32 random(3,3,0.6) c=72 order",
    "conv:dgrad bf16 n=2 hw=9 transposed stride=2 opad=1 b=16 random(4,3,0.6) order",
    "conv:dgrad f16 n=3 hw=14 b=64 random(3,3,0.6) values=int order",
    "conv:wgrad bf16 n=2 hw=17x11 b=32 random(9,9,0.3) accumulate order",
    "conv:wgrad f16 n=3 hw=13 b=16 random(9,7,0.3) dw=f32 gates dgates order",
    "conv:wgrad bf16 n=3 hw=16 r=1 b=32 random(6,6,0.4) dgates order",
    "conv:wgrad bf16 n=3 hw=12 b=16 random(3,3,0.6) t order",
    "conv:wgrad f16 n=2 hw=9 transposed stride=2 opad=1 b=16 random(4,3,0.6) order",
    "conv:wgrad bf16 n=0 hw=12 b=32 random(3,3,0.5) order",
    // In slices of the pixels.
    "conv:wgrad f32 n=3 hw=23 b=16 random(3,3,0.6) c=35 k=45 gates accumulate order",
    "conv:wgrad f64 n=4 hw=17 b=128 random(2,2,0.8) c=250 k=200",
    "conv:wgrad bf16 n=3 hw=20 b=32 random(3,3,0.6) c=75 k=90 dw=f32 accumulate first stride=1",
    "conv:wgrad f16 n=3 hw=12 b=8 random(4,4,0.5) c=29 k=27 first stride=2",
    "conv:dgrad f64 n=2 hw=6 b=16 random(3,3,0.6) t c=35 k=45",
    "conv:wgrad bf16 n=3 hw=12 b=16 random(3,3,0.6) t",
    // Exact; hubs; nothing to do.
    "conv:fprop bf16 n=2 hw=12 b=16 random(3,3,0.5) values=int residual act=relu",
    "conv:dgrad f16 n=2 hw=12 b=32 random(3,3,0.8) values=int stride=2 gates",
    "conv:wgrad bf16 n=2 hw=12 b=8 random(3,3,0.8) values=int dw=f32",
    "conv:fprop bf16 n=3 hw=12 b=8 ba(40,3)",
    "conv:fprop bf16 n=2 hw=12 b=32 random(3,3,0) bias",
    "conv:wgrad bf16 n=0 hw=12 b=32 random(3,3,0.5) dgates",
    // The last of nine jobs, of two steps, is shared by four thread blocks, two of which have none.
    "conv:wgrad f16 n=1 hw=12 b=64 dense(3,3)",
    // wgrad of up to 3 x 3 taps: every size of blocks, whole jobs and shared ones, one warpgroup and three.
    "conv:wgrad bf16 n=40 hw=16 r=1 b=32 diagonal(4)",
    "conv:wgrad f16 n=20 hw=17x15 r=1 b=16 random(9,7,0.3) dw=f32 accumulate",
    "conv:wgrad bf16 n=20 hw=16 r=1 b=128 random(2,2,0.8) k=200",
    "conv:wgrad bf16 n=3 hw=16 r=1 pad=1 b=64 random(4,3,0.6)",
    "conv:wgrad f16 n=4 hw=300 dims=1 r=3 b=32 random(6,6,0.4) dw=f32",
    "conv:wgrad bf16 n=4 hw=150 dims=1 r=2 dil=3 pad=3 after=0 b=64 random(4,4,0.5) accumulate",
    "conv:wgrad bf16 n=2 hw=13x17 r=3x1 pad=1x0 after=1x0 b=32 random(6,6,0.4)",
    "conv:wgrad bf16 n=2 hw=13x17 r=2x1 pad=1x0 after=0x0 b=8 random(6,5,0.4) values=int dw=f32",
    "conv:wgrad bf16 n=3 hw=13x11 r=2x3 pad=1x1 after=0x1 b=32 random(4,8,0.3)",
    "conv:wgrad bf16 n=40 hw=16 r=2x3 pad=1x1 after=0x1 b=32 diagonal(4)",
    "conv:wgrad bf16 n=2 hw=16 r=2 pad=1 after=0 b=32 random(8,8,0.25) dw=f32 accumulate",
    "conv:wgrad f16 n=64 hw=8 r=2 pad=1 after=0 b=32 diagonal(8) order",
    "conv:wgrad f16 n=1 hw=20x13 r=2 pad=1 after=0 b=64 random(4,3,0.6)",
    "conv:wgrad bf16 n=2 hw=17x15 r=2x3 b=128 random(3,2,0.6) k=328 accumulate",
    "conv:wgrad bf16 n=2 hw=19 r=2 b=128 random(2,2,0.8) dw=f32",
    "conv:wgrad bf16 n=2 hw=15x17 r=3x2 dil=2x3 pad=2 after=2x1 b=16 random(9,7,0.3)",
    "conv:wgrad f16 n=3 hw=20 r=2 b=8 random(20,19,0.1) dw=f32",
    "conv:wgrad f16 n=1 hw=12 r=2x3 b=64 random(24,24,0.25)",
    "conv:wgrad bf16 n=2 hw=12 r=2 b=8 random(3,3,0.8) values=int dw=f32",
    "conv:wgrad bf16 n=2 hw=12 r=2x3 b=64 random(2,2,0.8) values=int dw=f32",
    // A cluster for each block: one, two, four and eight parts; a row of taps or all; outputs that end in a block.
    "conv:wgrad bf16 n=3 hw=7 b=16 random(20,20,0.8) k=312",
    "conv:wgrad bf16 n=8 hw=7 b=16 random(16,16,0.4) dw=f32",
    "conv:wgrad f16 n=12 hw=8 b=16 random(16,16,0.25) accumulate",
    "conv:wgrad bf16 n=8 hw=8 b=32 random(8,8,0.25) gates",
    "conv:wgrad bf16 n=24 hw=8 b=32 random(4,4,0.25) dw=f32 accumulate",
    "conv:wgrad bf16 n=19 hw=8 b=32 random(4,4,0.25)",  // the last step's other rows of taps begin behind the images
    "conv:wgrad f16 n=16 hw=7 b=64 random(4,4,0.25)",
    "conv:wgrad bf16 n=4 hw=7 b=64 random(8,8,0.15) gates",
    "conv:wgrad bf16 n=33 hw=8 r=1 b=16 random(8,8,0.25) gates accumulate",
    "conv:wgrad bf16 n=33 hw=8 r=1 b=32 random(8,8,0.25) k=232",
    "conv:wgrad f16 n=11 hw=14 r=1 b=64 random(4,4,0.25) k=216 accumulate",
    "conv:wgrad bf16 n=9 hw=8 b=64 random(3,3,0.6) k=136 dw=f32 gates",
    "conv:wgrad bf16 n=6 hw=8 b=16 random(8,8,0.25) values=int dw=f32",
    "conv:wgrad bf16 n=6 hw=8 b=32 random(4,4,0.5) values=int dw=f32",
    "conv:wgrad bf16 n=6 hw=8 b=64 random(2,2,0.8) values=int dw=f32",
};

class ConvCuda : public testing::Test {
 protected:
  void SetUp() override {
    if (const Status status = cuda_status(); !status.ok()) GTEST_SKIP() << status.message();
  }
  void TearDown() override { EXPECT_TRUE(set_cuda_kernel("").ok() || !cuda_status().ok()); }
};

class ConvCudaSweep : public ConvCuda, public testing::WithParamInterface<std::string_view> {};

TEST_P(ConvCudaSweep, EveryKernelMatchesTheReference) {
  ConvData data = make(GetParam());
  for (std::string_view kernel : {"", "gather", "halo", "halo_block", "generic"}) {
    ASSERT_TRUE(set_cuda_kernel(kernel).ok());
    const Status status = data.run();
    if (kernel != "" && kernel != "generic" && status.code() == StatusCode::unsupported) continue;
    ASSERT_TRUE(status.ok()) << status.message();
    const auto error = data.compare();
    EXPECT_LE(error.worst, 1) << kernel << ": " << error.where;
    EXPECT_EQ(data.overrun(), "");
  }
}

INSTANTIATE_TEST_SUITE_P(OnCards, ConvCudaSweep, testing::ValuesIn(kLines),
                         [](const auto& test) { return std::to_string(test.index); });

// Of `data`, which has been run.
void expect_the_same_bits(ConvData& data) {
  const auto first = data.output_bits();
  for (int run = 0; run < 5; ++run) {
    ASSERT_TRUE(data.run().ok());
    ASSERT_TRUE(data.output_bits() == first) << to_string(data.spec());
  }
}

TEST_F(ConvCuda, TwoRunsGiveTheSameBits) {
  for (std::string_view line : kLines) {
    ConvData data = make(line);
    ASSERT_TRUE(data.run().ok()) << line;
    expect_the_same_bits(data);
    ASSERT_TRUE(set_cuda_kernel("halo_block").ok());
    if (data.run().ok()) expect_the_same_bits(data);
    ASSERT_TRUE(set_cuda_kernel("").ok());
  }
}

TEST_F(ConvCuda, AGraphReplays) {
  for (std::string_view line : kLines) {
    if (line.find("accumulate") != std::string_view::npos) continue;  // a second replay would add once more
    ConvData data = make(line);
    cudaStream_t stream = nullptr;
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    ASSERT_TRUE(cuda_prepare(kCard).ok());
    data.poison();
    ASSERT_TRUE(data.upload_outputs().ok());
    data.set_stream(stream);
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
    const Status status = data.run_again(data.weights_on_device());
    ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    ASSERT_TRUE(status.ok()) << status.message();
    ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
    for (int replay = 0; replay < 2; ++replay) {
      // What is captured is the work, not its results: those are the bits of a call.
      ASSERT_TRUE((replay == 0 ? Status() : data.change_inputs(99)).ok());
      ASSERT_TRUE(data.run().ok());
      const auto of_call = data.output_bits();
      data.poison();
      ASSERT_TRUE(data.upload_outputs().ok());
      ASSERT_EQ(cudaGraphLaunch(exec, stream), cudaSuccess);
      ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
      ASSERT_TRUE(data.download_outputs().ok());
      ASSERT_TRUE(data.output_bits() == of_call) << line;
      EXPECT_EQ(data.overrun(), "") << line;
    }
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
    cudaStreamDestroy(stream);
  }
}

// Each problem has a workspace of its own, and nothing else is shared.
TEST_F(ConvCuda, TwoStreamsAtOnce) {
  constexpr std::string_view kAtOnce[] = {
      "conv:fprop bf16 n=9 hw=28 b=32 random(8,8,0.25) bias act=relu",
      "conv:fprop f16 n=9 hw=28 b=16 random(8,8,0.25) residual order",
      "conv:dgrad bf16 n=9 hw=28 b=32 random(4,4,0.5) order",
      "conv:dgrad f16 n=5 hw=28 stride=2 b=64 random(3,3,0.5)",
      "conv:wgrad bf16 n=5 hw=28 b=32 random(4,4,0.5) order",
      "conv:wgrad f16 n=5 hw=28 b=64 random(2,2,0.8) dw=f32 dgates",
      "conv:fprop bf16 n=9 hw=28 r=1 b=32 random(8,8,0.25) order",
      "conv:wgrad f32 n=3 hw=20 b=16 random(3,3,0.6) c=35 k=45 order",
  };
  cudaStream_t streams[2] = {};
  for (cudaStream_t& stream : streams) {
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  }
  std::vector<ConvData> problems;
  for (std::string_view line : kAtOnce) {
    problems.push_back(make(line));
    problems.back().poison();
    ASSERT_TRUE(problems.back().upload_outputs().ok());
    problems.back().set_stream(streams[problems.size() % 2]);
  }
  for (int round = 0; round < 20; ++round) {
    for (ConvData& data : problems) {
      const Status status = data.run_again(data.weights_on_device());
      ASSERT_TRUE(status.ok()) << status.message();
    }
  }
  for (cudaStream_t stream : streams) ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  for (ConvData& data : problems) expect_right(data);
  for (cudaStream_t stream : streams) cudaStreamDestroy(stream);
}

TEST_F(ConvCuda, AKernelThatDoesNotDoItIsRefused) {
  ASSERT_TRUE(set_cuda_kernel("stream_w").ok());
  ConvData data = make("conv:fprop bf16 n=2 hw=9 b=32 random(3,3,0.5)");
  const Status status = data.run();
  EXPECT_EQ(status.code(), StatusCode::unsupported);
  EXPECT_NE(std::string(status.message()).find("stream_w"), std::string::npos) << status.message();
}

TEST_F(ConvCuda, MorePixelsThanAreCountedAreRefused) {
  ConvData data = make("conv:fprop bf16 n=2 hw=9 r=1 b=8 random(1,1,1)");
  const int64_t width = int64_t{1} << 16, height = int64_t{1} << 15;
  // Nobody looks at the images: addresses that are there, and far enough apart.
  auto* base = static_cast<char*>(nullptr) + (int64_t{1} << 40);
  const ConstTensor x(base, DType::bf16, {1, 8, height, width}, kCard);
  const Tensor y(base + (int64_t{1} << 42), DType::bf16, {1, 8, height, width}, kCard);
  const ConstTensor w(data.weights_on_device(), DType::bf16, {1, 1, 8, 8}, kCard);
  const Status status = conv_fprop({.layout = data.view(), .geometry = {.rank = 2}}, x, w, {}, y, {});
  EXPECT_EQ(status.code(), StatusCode::unsupported);
  EXPECT_NE(std::string(status.message()).find("2147483648"), std::string::npos) << status.message();
}

}  // namespace
}  // namespace blocksparse::conv
