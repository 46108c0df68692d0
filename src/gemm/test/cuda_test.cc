// What the linear op promises on a card beside right results: repeatable bits, streams, graphs.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "blocksparse/blocksparse.h"
#include "core/text.h"
#include "cuda/memory.h"
#include "gemm/cuda/families.h"
#include "gemm/cuda/stream_w/plan.h"
#include "gemm/cuda/wgmma/plan.h"
#include "gemm/cuda/wgrad_wgmma/plan.h"
#include "gemm/cuda/wgrad_wgmma/terms.cuh"
#include "ops/linear/problem.h"

namespace blocksparse::gemm {

using linear::LinearCase;
using linear::LinearData;
using linear::parse_linear_case;
namespace {

constexpr Device kCard{DeviceType::cuda, 0};

class LinearCuda : public testing::Test {
 protected:
  void SetUp() override {
    if (const Status status = cuda_status(); !status.ok()) GTEST_SKIP() << status.message();
  }
  void TearDown() override { EXPECT_TRUE(set_cuda_kernel("").ok() || !cuda_status().ok()); }
};

LinearData make(std::string line) {
  auto data = LinearData::make(*parse_linear_case(line + " device=cuda"));
  EXPECT_TRUE(data.ok()) << data.status().message();
  return *std::move(data);
}

void expect_right(LinearData& data) {
  const Status status = data.download_outputs();
  ASSERT_TRUE(status.ok()) << status.message();
  const auto error = data.compare();
  EXPECT_LE(error.worst, 1) << error.where;
  EXPECT_EQ(data.overrun(), "");
}

// Recurrent ops alone ask for its kernel, by Product::quarters_are_alike.
constexpr const char* kOfGates = "linear:fprop bf16 n=140 b=32 ba(60,3) stack=4 full_row=7";

constexpr const char* kProblems[] = {
    "linear:fprop bf16 n=70 b=8 ba(200,4) bias act=gelu gates",
    "linear:fprop f32 n=33 b=32 random(20,0.3)",
    "linear:dgrad f32 n=20 b=8 ba(200,4) gates tf32",
    "linear:fprop f32 n=64 b=16 ba(200,4) x=first bias",
    "linear:fprop f32 n=500 b=32 ba(80,4) tf32",
    "linear:dgrad f32 n=300 b=16 ba(80,4)",
    "linear:wgrad f32 n=600 b=64 ba(40,4) tf32",
    "linear:dgrad f16 n=1100 b=16 ba(80,4)",
    "linear:fprop bf16 n=33 b=32 random(20,0.3) bias act=silu",
    "linear:dgrad f16 n=8 b=8 ba(200,4) gates",
    "linear:fprop f16 n=64 b=16 ba(200,4) x=first",
    "linear:fprop bf16 n=200 b=32 ba(40,4) bias act=relu",
    "linear:fprop bf16 n=200 b=32 random(64,16,0.1)",
    "linear:fprop f16 n=130 b=64 random(20,0.12) stack=4 empty_row=3",
    kOfGates,
    "linear:fprop bf16 n=70 b=64 ba(60,3) stack=4 full_row=7",
    "linear:dgrad bf16 n=129 b=8 ba(200,4)",
    "linear:fprop bf16 n=700 b=8 ba(100,4) bias",
    "linear:wgrad bf16 n=1024 b=16 ba(100,4)",
    "linear:wgrad f16 n=1024 b=64 ba(20,4) dw=f32",
    "linear:wgrad bf16 n=70 b=64 random(24,0.95)",
    "linear:wgrad bf16 n=70 b=64 random(12,0.8) out=752 in=728 pairs=3 dw=f32",
    "linear:wgrad f16 n=70 b=128 random(12,0.95) out=1472 pairs=2",
    "linear:dgrad f16 n=300 b=16 ba(80,4)",
    "linear:fprop f16 n=500 b=32 ba(80,4)",
    "linear:dgrad bf16 n=600 b=64 ba(40,3)",
    "linear:fprop bf16 n=300 b=128 ba(20,3) act=relu",
    "linear:fprop bf16 n=256 b=32 dense(16,4)",
    "linear:wgrad bf16 n=500 b=32 random(9,0.4) dgates",
    "linear:wgrad bf16 n=32 b=32 ba(100,4)",
    "linear:wgrad f16 n=60 b=8 ba(100,4) dw=f32 gates dgates",
    "linear:wgrad f16 n=700 b=128 random(4,0.6) dgates",
    "linear:wgrad bf16 n=200 b=32 ba(60,4) pairs=14 dw=f32 dgates",
    "linear:wgrad f16 n=150 b=64 ba(20,4) pairs=5 x=first y=first",
    "linear:fprop bf16 n=1100 b=16 ba(100,3) offset=1",
    "linear:wgrad f32 n=40 b=128 random(3,0.6) dgates pairs=5",
    "linear:fprop bf16 n=2100 b=16 random(64,0.1) bias",
    "linear:dgrad f16 n=2100 b=8 random(130,0.1)",
    "linear:fprop f16 n=3000 b=32 random(8,0.25)",
    "linear:fprop f16 n=2100 b=32 random(40,32,0.1)",    // tiles of 128 tokens
    "linear:fprop bf16 n=1024 b=64 random(4,260,0.06)",  // x of more than 32 MB: rows of one tile side by side
    "linear:wgrad bf16 n=1100 b=16 random(64,0.2) dgates",
    // Rows that are dealt: 8 tiles, tiles of 128 and 256 tokens, and inputs that are no multiple of a block.
    "linear:fprop bf16 n=500 b=64 ba(90,6)",
    "linear:dgrad bf16 n=250 b=64 ba(150,4) out=9570",
    "linear:fprop bf16 n=250 b=64 ba(150,4) out=9570 bias",
    "linear:dgrad f16 n=200 b=32 ba(140,4) full_col=3 empty_col=5 y=first",
    "linear:fprop f16 n=512 b=32 ba(420,4) bias",
    // Hubs and more tokens than a launch of row_wgmma takes.
    "linear:fprop bf16 n=1100 b=32 ba(420,4) bias residual act=gelu",
    "linear:dgrad f16 n=1540 b=64 ba(256,2) y=first",
    "linear:fprop f16 n=256 b=64 ba(400,4)",
};

void choose_kernel(std::string_view line) {
  ASSERT_TRUE(set_cuda_kernel(line == kOfGates ? "four_rows_wgmma" : "").ok());
}

TEST_F(LinearCuda, TheseProblemsAreDoneByEveryKernel) {
  std::set<std::string> chosen;
  for (const char* line : kProblems) {
    choose_kernel(line);
    const auto kernel = make(line).kernel();
    ASSERT_TRUE(kernel.ok()) << kernel.status().message();
    chosen.insert(*kernel);
  }
  const auto card = cuda::card_of(kCard);
  ASSERT_TRUE(card.ok()) << card.status().message();
  for (const Family& family : families()) {
    if (!family.runs(*card)) continue;
    EXPECT_TRUE(chosen.contains(std::string(family.name))) << family.name;
  }
}

TEST_F(LinearCuda, TwoRunsGiveTheSameBits) {
  for (const char* line : kProblems) {
    choose_kernel(line);
    LinearData data = make(line);
    ASSERT_TRUE(data.run().ok());
    const auto first = data.output_bits();
    for (int run = 0; run < 20; ++run) {
      ASSERT_TRUE(data.run().ok());
      ASSERT_TRUE(data.output_bits() == first) << line;
    }
  }
}

// What is captured is the work, not its results: those are the bits of a call, which TwoStreamsAtOnce compares with a
// reference.
TEST_F(LinearCuda, AGraphReplaysWithOtherInputs) {
  for (const char* line : kProblems) {
    choose_kernel(line);
    LinearData data = make(line);
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
    Bytes before;
    for (int replay = 0; replay < 3; ++replay) {
      ASSERT_TRUE(data.refill(static_cast<uint64_t>(replay)).ok());
      ASSERT_TRUE(data.run().ok());
      const auto of_call = data.output_bits();
      data.poison();
      ASSERT_TRUE(data.upload_outputs().ok());
      ASSERT_EQ(cudaGraphLaunch(exec, stream), cudaSuccess);
      ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
      ASSERT_TRUE(data.download_outputs().ok());
      ASSERT_TRUE(data.output_bits() == of_call) << line;
      EXPECT_EQ(data.overrun(), "") << line;
      EXPECT_FALSE(of_call == before) << line << ": other inputs give other results";
      before = of_call;
    }
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
    cudaStreamDestroy(stream);
  }
}

TEST_F(LinearCuda, TwoStreamsAtOnce) {
  std::vector<LinearData> data;
  std::vector<cudaStream_t> streams(2);
  for (const char* line : kProblems) {
    choose_kernel(line);
    data.push_back(make(line));
  }
  for (cudaStream_t& stream : streams) {
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  }
  for (LinearData& d : data) {
    d.poison();
    ASSERT_TRUE(d.upload_outputs().ok());
  }
  for (int round = 0; round < 20; ++round) {
    for (size_t i = 0; i < data.size(); ++i) {
      choose_kernel(kProblems[i]);
      data[i].set_stream(streams[i % 2]);
      ASSERT_TRUE(data[i].run_again(data[i].weights_on_device()).ok());
    }
  }
  for (LinearData& d : data) expect_right(d);
  for (cudaStream_t stream : streams) cudaStreamDestroy(stream);
}

enum class Follow { waits, closely, chained };

// The last y of a chain of products y = x W^T. Each one reads the result of the one before, and all share a workspace.
std::vector<uint16_t> chain(int32_t block, int64_t n, Follow follow) {
  // Many tokens of few features; and more tokens of 1024 x 1024, for which small blocks have the kernel `stream_x`.
  const std::string graph = n > 2000 ? concat("random(", 1024 / block, block == 32 ? ",0.25)" : ",0.15)")
                            : n > stream_w::kMostTokens ? "ba(16,3)"
                                                        : "ba(100,3)";
  const Layout layout = *Layout::from_graph(graph, {.block_size = block}, 7);
  const int64_t features = layout.out_features();
  const auto place = [](const void* from, size_t bytes) {
    auto memory = *cuda::allocate(kCard, bytes);
    EXPECT_TRUE(cuda::copy_to_device(kCard, memory.get(), from, bytes).ok());
    return memory;
  };
  // Plus and minus 1/8 (b = 8): results neither grow nor vanish.
  std::vector<uint16_t> values(static_cast<size_t>(layout.blocks() * block * block)),
      x(static_cast<size_t>(n * features));
  uint32_t random = 1;
  const auto sign = [&random] { return static_cast<uint16_t>((random = random * 1664525 + 1013904223) >> 31 << 15); };
  for (uint16_t& w : values) w = (block == 8 ? 0x3e00 : 0x3d80) | sign();
  for (uint16_t& v : x) v = 0x3f80 | sign();
  const auto index = place(layout.index().data(), layout.index().size_bytes()),
             w = place(values.data(), 2 * values.size());
  const std::vector<std::shared_ptr<void>> buffers = {place(x.data(), 2 * x.size()), place(x.data(), 2 * x.size()),
                                                      place(x.data(), 2 * x.size())};
  const auto view = *LayoutView::on_device({static_cast<const int32_t*>(index.get()), layout.index().size()},
                                           {block, features, features, layout.blocks()}, kCard);
  const size_t bytes = linear_fprop_workspace_size({view, DType::bf16, n}, kCard);
  const auto workspace = *cuda::allocate(kCard, bytes + 1);
  for (size_t i = 0; i < 30; ++i) {
    const Product product{.dtype = DType::bf16,
                          .layout = view,
                          .x = {buffers[i % 3].get(), n, features, features, 1},
                          .y = {buffers[(i + 1) % 3].get(), n, features, features, 1},
                          .residual = {},
                          .w = w.get(),
                          .x_is_last = follow == Follow::chained && i > 0};
    const Status status = cuda_product(product, {workspace.get(), bytes}, {});
    EXPECT_TRUE(status.ok()) << status.message();
    if (follow != Follow::waits) continue;
    EXPECT_TRUE(cuda::synchronise(kCard).ok());
  }
  EXPECT_TRUE(cuda::copy_to_host(kCard, x.data(), buffers[0].get(), 2 * x.size()).ok());
  return x;
}

// Kernels that begin before the kernel in front has ended must not read what that one has yet to write.
TEST_F(LinearCuda, CallsThatFollowCloselyWaitForEachOther) {
  for (const int32_t block : {8, 16, 32, 64, 128}) {
    for (const int64_t n : {1, 8, 32, 64, 256, 2000, 2100}) {
      const auto expected = chain(block, n, Follow::waits);
      for (int run = 0; run < 10; ++run) {
        ASSERT_EQ(chain(block, n, Follow::closely), expected) << "b=" << block << " n=" << n;
        ASSERT_EQ(chain(block, n, Follow::chained), expected) << "b=" << block << " n=" << n;
      }
    }
  }
}

// Each kernel has its own code for gelu and silu: with few tokens, and with many.
TEST_F(LinearCuda, InfGoesThroughActivations) {
  constexpr int32_t kBlock = 64;
  const Layout layout = *Layout::from_graph("dense(1,1)", {.block_size = kBlock});
  const auto index = *cuda::allocate(kCard, layout.index().size_bytes());
  ASSERT_TRUE(cuda::copy_to_device(kCard, index.get(), layout.index().data(), layout.index().size_bytes()).ok());
  const auto view = *LayoutView::on_device({static_cast<const int32_t*>(index.get()), layout.index().size()},
                                           {kBlock, kBlock, kBlock, 1}, kCard);
  const std::vector<uint16_t> ones(kBlock * kBlock, 0x3f80);
  const auto w = *cuda::allocate(kCard, 2 * ones.size());
  ASSERT_TRUE(cuda::copy_to_device(kCard, w.get(), ones.data(), 2 * ones.size()).ok());
  for (const int64_t n : {8, 600}) {
    constexpr uint16_t kInf = 0x7f80;
    std::vector<uint16_t> x(static_cast<size_t>(n * kBlock), kInf);
    const std::vector<uint16_t> poison(x.size(), 0xffff);
    const auto from = *cuda::allocate(kCard, 2 * x.size()), to = *cuda::allocate(kCard, 2 * x.size());
    ASSERT_TRUE(cuda::copy_to_device(kCard, from.get(), x.data(), 2 * x.size()).ok());
    ASSERT_TRUE(cuda::copy_to_device(kCard, to.get(), poison.data(), 2 * x.size()).ok());
    const size_t bytes = linear_fprop_workspace_size({view, DType::bf16, n}, kCard);
    const auto workspace = *cuda::allocate(kCard, bytes + 1);
    for (const Activation activation : {Activation::relu, Activation::gelu, Activation::silu, Activation::gelu_tanh}) {
      const Status status = linear_fprop(view, ConstTensor(from.get(), DType::bf16, {n, kBlock}, kCard),
                                         ConstTensor(w.get(), DType::bf16, {1, kBlock, kBlock}, kCard),
                                         {.bias = {}, .residual = {}, .activation = activation},
                                         Tensor(to.get(), DType::bf16, {n, kBlock}, kCard), {workspace.get(), bytes});
      ASSERT_TRUE(status.ok()) << status.message();
      ASSERT_TRUE(cuda::copy_to_host(kCard, x.data(), to.get(), 2 * x.size()).ok());
      for (const uint16_t y : x) ASSERT_EQ(y, kInf) << "n=" << n << " activation " << static_cast<int>(activation);
    }
  }
}

TEST_F(LinearCuda, ErrorsNameTheDevice) {
  LinearData data = make("linear:fprop f32 n=4 b=8 random(4,0.5)");
  const Status status = cuda_prepare({DeviceType::cuda, 63});
  EXPECT_EQ(status.code(), StatusCode::invalid_argument);
  EXPECT_NE(status.message().find("there is no cuda:63"), std::string::npos) << status.message();
  EXPECT_FALSE(set_cuda_kernel("fastest").ok());
}

// Every other card gives the results of the first card, while the first is the current one.
TEST_F(LinearCuda, EveryCardGivesTheSameBits) {
  int count = 0;
  ASSERT_EQ(cudaGetDeviceCount(&count), cudaSuccess);
  if (count < 2) GTEST_SKIP() << "there is one card";
  for (const char* line : kProblems) {
    std::vector<char> first;
    for (int32_t card = 0; card < count; ++card) {
      LinearCase c = *parse_linear_case(line);
      c.device = {DeviceType::cuda, card};
      LinearData data = *LinearData::make(c);
      const Status status = data.run();
      ASSERT_TRUE(status.ok()) << status.message();
      const Tensor& y = data.output();
      std::vector<char> got(static_cast<size_t>(y.shape[0] * y.stride[0] * size_of(y.dtype)));
      std::memcpy(got.data(), y.data, got.size());
      if (card == 0) first = got;
      EXPECT_EQ(got, first) << line << " on card " << card;
    }
  }
}

TEST(ManyTerms, StepsWalkThePairsOneBehindTheOther) {
  constexpr int kTokens = 64;
  std::mt19937 random(1);
  for (int list = 0; list < 200; ++list) {
    wgrad_wgmma::TermSteps<wgrad_wgmma::kTermsOfLaunch> steps{};
    std::vector<std::pair<int, int>> places;  // pair, token
    const int terms =
        list == 0 ? wgrad_wgmma::kTermsOfLaunch : static_cast<int>(random() % wgrad_wgmma::kTermsOfLaunch) + 1;
    for (int term = 0; term < terms; ++term) {
      const int n = static_cast<int>(random() % 300) + 1;
      for (int token = 0; token < n; token += kTokens) places.emplace_back(term, token);
      steps.ends[steps.terms++] = static_cast<int>(places.size());
    }
    ASSERT_EQ(steps.all(), static_cast<int>(places.size()));
    for (size_t first = 0; first < places.size(); ++first) {
      wgrad_wgmma::StepPlace<kTokens> at(steps, static_cast<int>(first));
      for (size_t step = first; step < places.size(); ++step, at.advance(steps)) {
        ASSERT_EQ(std::pair(at.term, at.token), places[step]) << "list " << list << " from " << first << " at " << step;
      }
    }
  }
}

}  // namespace
}  // namespace blocksparse::gemm
