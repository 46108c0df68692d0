// The LSTM op on a card against its reference, and what else it promises.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <random>

#include "blocksparse/blocksparse.h"
#include "core/random.h"
#include "ops/lstm/problem.h"
#include "ops/lstm/test/awkward.h"

namespace blocksparse::lstm {
namespace {

class LstmCuda : public testing::Test {
 protected:
  void SetUp() override {
    if (const Status status = cuda_status(); !status.ok()) GTEST_SKIP() << status.message();
  }
};

LstmData make(std::string line) {
  auto data = LstmData::make(*parse_lstm_case(line + " device=cuda"));
  EXPECT_TRUE(data.ok()) << data.status().message();
  return *std::move(data);
}

void expect_right(LstmData& data) {
  const auto error = data.compare();
  EXPECT_LE(error.worst, 1) << error.where;
  EXPECT_EQ(data.overrun(), "");
}

void expect_right(const std::string& line) {
  SCOPED_TRACE(line);
  LstmData data = make(line);
  const Status status = data.run();
  ASSERT_TRUE(status.ok()) << status.message();
  expect_right(data);
}

// Few tokens around the kernels' sizes, units that fill cards, all block sizes, hubs.
constexpr std::string_view kProblems[] = {
    // All steps in one launch: 16, 32 and 64 sequences, one to four strips of 32 units a thread block, weights that do
    // not fit into shared memory, gates of unequal layouts, wider blocks.
    "lstm:forward bf16 t=9 n=16 b=32 random(140,140,0.01) h0 c0 keep final",
    "lstm:forward f16 t=12 n=5 b=32 random(20,20,0.3) lengths keep final",
    "lstm:forward bf16 t=5 n=32 b=32 random(100,100,0.02) h0 c0 keep final",
    "lstm:forward bf16 t=4 n=20 b=64 random(140,140,0.005) c0 sorted final",
    "lstm:forward f16 t=3 n=64 b=32 random(140,140,0.008) h0 c0 lengths keep final",
    "lstm:forward bf16 t=4 n=50 b=128 random(4,4,0.5) h0 c0 keep final",
    "lstm:forward bf16 t=4 n=12 b=32 random(400,400,0.002) h0 final",
    "lstm:forward bf16 t=6 n=20 b=32 random(40,10,0.2) h0 c0 keep final",
    "lstm:forward bf16 t=6 n=40 b=64 dense(3,3) h0 c0 keep final",
    "lstm:forward bf16 t=2 n=16 b=32 random(44,44,0.6) h0 c0 keep final",
    // Steps that are launched one by one.
    "lstm:forward bf16 t=9 n=16 b=32 random(16,16,0.3) h0 c0 keep final",
    "lstm:forward f16 t=6 n=64 b=16 ba(60,4) h0 c0 lengths keep final",
    "lstm:forward bf16 t=5 n=33 b=8 ba(100,4) c0 final",
    "lstm:forward bf16 t=4 n=64 b=64 random(9,9,0.3) h0 sorted final",
    "lstm:forward f16 t=4 n=7 b=128 random(3,3,0.6) h0 c0 keep",
    "lstm:forward bf16 t=3 n=300 b=32 random(9,9,0.3) h0 c0 keep final",
    "lstm:forward f32 t=5 n=30 b=32 random(9,9,0.3) h0 c0 lengths keep final",
    "lstm:forward bf16 t=1 n=20 b=32 random(40,10,0.2) h0 c0 keep final",
    "lstm:forward bf16 t=5 n=12 b=16 random(9,9,0.4) h0 c0 keep final odd",
    "lstm:backward bf16 t=9 n=16 b=32 random(16,16,0.3) h0 c0 final dh0 dc0 dw wide",
    "lstm:backward f16 t=6 n=64 b=16 ba(60,4) h0 c0 lengths final dh0 dc0 dw accumulate wide",
    "lstm:backward bf16 t=5 n=33 b=8 ba(100,4) c0 final dw",
    "lstm:backward bf16 t=4 n=64 b=64 random(9,9,0.3) h0 sorted final dh0 dw wide",
    "lstm:backward f16 t=4 n=7 b=128 random(3,3,0.6) h0 c0 dc0",
    "lstm:backward bf16 t=5 n=300 b=32 random(9,9,0.3) h0 c0 final dh0 dc0 dw wide",
    "lstm:backward f32 t=5 n=30 b=32 random(9,9,0.3) h0 c0 lengths final dh0 dc0 dw",
    "lstm:backward bf16 t=5 n=12 b=16 random(9,9,0.4) h0 c0 final dh0 dc0 dw odd",
};

class LstmSweepCuda : public LstmCuda, public testing::WithParamInterface<std::string_view> {};

TEST_P(LstmSweepCuda, MatchesTheReference) { expect_right(std::string(GetParam())); }

INSTANTIATE_TEST_SUITE_P(Awkward, LstmSweepCuda, testing::ValuesIn(kAwkward));
INSTANTIATE_TEST_SUITE_P(OnCards, LstmSweepCuda, testing::ValuesIn(std::begin(kProblems), std::end(kProblems)));

TEST_F(LstmCuda, RandomProblems) {
  const char* more = std::getenv("BLOCKSPARSE_FUZZ");
  const int64_t count = more != nullptr ? std::atoll(more) : 60;
  Random rng{more != nullptr ? std::random_device{}() : 2026};
  constexpr DType kDtypes[] = {DType::f32, DType::f64, DType::bf16, DType::f16, DType::bf16};
  for (int64_t i = 0; i < count && !testing::Test::HasFailure(); ++i) {
    LstmCase c;
    c.seed = i;
    c.block = int64_t{8} << rng.below(5);
    const int64_t units = 1 + rng.below(std::max<int64_t>(1, 256 / c.block));
    const bool own = rng.below(5) == 0;
    c.graph = "random(" + std::to_string(own ? 4 * units : units) + "," + std::to_string(units) + ",0.4)";
    c.dtype = kDtypes[rng.below(5)];
    c.t = rng.below(8);
    c.n = rng.below(3) == 0 ? rng.below(20) : rng.below(70);
    for (bool* flag : {&c.backward, &c.h0, &c.c0, &c.lengths, &c.sorted, &c.keep, &c.final, &c.dh0, &c.dc0, &c.dw,
                       &c.accumulate, &c.wide}) {
      *flag = rng.below(2) == 0;
    }
    c.odd = rng.below(6) == 0;
    expect_right(to_string(c));
  }
}

TEST_F(LstmCuda, TwoRunsGiveTheSameBits) {
  for (const std::string_view line : kProblems) {
    LstmData data = make(std::string(line));
    ASSERT_TRUE(data.run().ok());
    const auto first = data.bits();
    for (int run = 0; run < 10; ++run) {
      ASSERT_TRUE(data.run().ok());
      ASSERT_EQ(first, data.bits()) << line;
    }
  }
}

TEST_F(LstmCuda, AGraphReplaysWithOtherInputs) {
  ASSERT_TRUE(cuda_prepare({DeviceType::cuda, 0}).ok());
  for (const std::string_view line : kProblems) {
    SCOPED_TRACE(line);
    LstmData data = make(std::string(line));
    cudaStream_t stream = nullptr;
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    ASSERT_TRUE(data.upload().ok());
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
    const Status status = data.launch(stream);
    ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    ASSERT_TRUE(status.ok()) << status.message();
    ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
    for (uint64_t replay = 0; replay < 3; ++replay) {
      if (data.is_forward()) {
        ASSERT_TRUE(data.refill(replay).ok());
      }
      ASSERT_TRUE(data.upload().ok());
      ASSERT_EQ(cudaGraphLaunch(exec, stream), cudaSuccess);
      ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
      ASSERT_TRUE(data.download().ok());
      expect_right(data);
    }
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
    cudaStreamDestroy(stream);
  }
}

// Calls on two streams, in flight at one time.
TEST_F(LstmCuda, TwoStreamsAtOnce) {
  std::vector<LstmData> data;
  std::vector<cudaStream_t> streams(2);
  for (const std::string_view line : kProblems) data.push_back(make(std::string(line)));
  for (cudaStream_t& stream : streams) {
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  }
  for (LstmData& d : data) ASSERT_TRUE(d.upload().ok());
  for (int round = 0; round < 10; ++round) {
    for (size_t i = 0; i < data.size(); ++i) {
      if (round > 0 && data[i].adds()) continue;
      ASSERT_TRUE(data[i].launch(streams[i % 2]).ok());
    }
  }
  for (cudaStream_t stream : streams) {
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    cudaStreamDestroy(stream);
  }
  for (LstmData& d : data) {
    ASSERT_TRUE(d.download().ok());
    expect_right(d);
  }
}

}  // namespace
}  // namespace blocksparse::lstm
