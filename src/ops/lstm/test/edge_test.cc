// What the LSTM op's edge refuses, and stacked layouts.
#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <vector>

#include "blocksparse/blocksparse.h"
#include "ops/lstm/cuda/w_in_smem/plan.h"

namespace blocksparse {
namespace {

constexpr int64_t kSteps = 3, kTokens = 5, kHidden = 32, kBlock = 16;

// A valid call that a test spoils in one place.
struct Call {
  Layout layout = *Layout::from_graph("random(2,2,0.8)", {.block_size = kBlock}, 1)->stack(4);
  std::vector<float> memory = std::vector<float>(1 << 16, 0.1f);
  std::vector<char> scratch = std::vector<char>(1 << 20);
  std::vector<int64_t> lengths = {3, 0, 2, 1, 3};
  size_t used = 0;
  LstmInputs in{take({kSteps, kTokens, 4, kHidden}), take({layout.blocks(), kBlock, kBlock}), take({kTokens, kHidden}),
                take({kTokens, kHidden}), lengths.data()};
  LstmOutputs out{take({kSteps, kTokens, kHidden}), take({kTokens, kHidden}), take({kTokens, kHidden}),
                  take({kSteps, kTokens, 4, kHidden}), take({kSteps, kTokens, kHidden})};
  LstmSaved saved{in.w, in.h0, in.c0, lengths.data(), out.y, out.gates, out.cells};
  LstmOutputGrads of{take({kSteps, kTokens, kHidden}), take({kTokens, kHidden}), take({kTokens, kHidden})};
  LstmGrads grads{take({kSteps, kTokens, 4, kHidden}), take({layout.blocks(), kBlock, kBlock}),
                  take({kTokens, kHidden}), take({kTokens, kHidden})};
  Workspace workspace{scratch.data(), scratch.size()};
  Stream stream;

  Tensor take(std::initializer_list<int64_t> shape) {
    const Tensor t(memory.data() + used, DType::f32, shape);
    size_t elements = 1;
    for (const int64_t size : shape) elements *= static_cast<size_t>(size);
    used += elements;
    return t;
  }
  Status forward() const { return lstm_forward(layout, in, out, workspace, stream); }
  Status backward() const { return lstm_backward(layout, saved, of, Accumulate::no, grads, workspace, stream); }
};

void expect_error(const Status& status, std::string_view text, StatusCode code = StatusCode::invalid_argument) {
  EXPECT_EQ(status.code(), code) << status.message();
  EXPECT_NE(status.message().find(text), std::string::npos) << status.message();
}

TEST(LstmEdge, TheCallItselfIsRight) {
  const Call c;
  EXPECT_TRUE(c.forward().ok()) << c.forward().message();
  EXPECT_TRUE(c.backward().ok()) << c.backward().message();
}

TEST(LstmEdge, Layouts) {
  Call c;
  c.layout = *Layout::from_graph("random(2,2,0.8)", {.block_size = kBlock}, 1);
  expect_error(c.forward(), "[lstm_forward] layout is 32 x 32 in blocks of 16, needs 4 H x H");
  expect_error(c.backward(), "[lstm_backward] layout is 32 x 32");
  c.layout = *Layout::from_graph("random(8,2,0.5)", {.block_size = kBlock, .out_features = 120, .in_features = 30}, 1);
  expect_error(c.forward(), "layout is 120 x 30 in blocks of 16, needs 4 H x H with H a multiple");
  c = Call();
  c.layout = c.layout.t();
  expect_error(c.forward(), "layout is transposed");
  LayoutView none;
  expect_error(lstm_forward(none, c.in, c.out, c.workspace), "layout is null");
  c = Call();
  c.in.pre.device = {DeviceType::cuda, 0};
  if (cuda_status().ok()) expect_error(c.forward(), "[lstm_forward] the layout's tables are not on the device of pre");
  else expect_error(c.forward(), "[cuda] ", StatusCode::unavailable);
}

TEST(LstmEdge, Shapes) {
  Call c;
  c.in.pre = ConstTensor(c.in.pre.data, DType::f32, {kSteps, kTokens, 4 * kHidden});
  expect_error(c.forward(), "[lstm_forward] pre is [3, 5, 128], needs [steps, n, 4, 32]");
  c = Call();
  c.in.pre = ConstTensor(c.in.pre.data, DType::f32, {kSteps, kTokens, 3, kHidden});
  expect_error(c.forward(), "pre is [3, 5, 3, 32], needs [3, 5, 4, 32]");
  c = Call();
  c.in.pre = ConstTensor(c.in.pre.data, DType::f32, {int64_t{1} << 31, 1024, 4, kHidden});
  expect_error(c.forward(), "pre is [2147483648, 1024, 4, 32], too large");
  c = Call();
  c.in.w.shape[0] = 99;
  expect_error(c.forward(), "w is [99, 16, 16]");
  c = Call();
  c.in.h0.shape[0] = 4;
  expect_error(c.forward(), "h0 is [4, 32], needs [5, 32]");
  c = Call();
  c.out.y.stride[1] = 40;
  expect_error(c.forward(), "y of [3, 5, 32] has strides [160, 40, 1], needs to be contiguous");
  c = Call();
  c.out.gates = {};
  expect_error(c.forward(), "gates and cells are given both or neither");
  c = Call();
  c.in.w = {};
  expect_error(c.forward(), "w is not given");
  c = Call();
  c.saved.gates = {};
  expect_error(c.backward(), "[lstm_backward] gates is not given");
  c = Call();
  c.grads.pre = {};
  expect_error(c.backward(), "dpre is not given");
  c = Call();
  c.of.y.shape[0] = 2;
  expect_error(c.backward(), "dy is [2, 5, 32], needs [3, 5, 32]");
}

TEST(LstmEdge, Dtypes) {
  Call c;
  c.in.w.dtype = DType::bf16;
  expect_error(c.forward(), "w is bf16, needs f32");
  c = Call();
  c.in.c0.dtype = DType::bf16;
  expect_error(c.forward(), "c0 is bf16, needs f32");
  c = Call();
  c.grads.w.dtype = DType::bf16;
  expect_error(c.backward(), "dw is bf16, needs f32");
}

TEST(LstmEdge, LengthsWorkspaceOverlapThreads) {
  Call c;
  c.lengths[3] = 4;
  expect_error(c.forward(), "[lstm_forward] lengths[3] is 4, needs 0 to 3");
  expect_error(c.backward(), "[lstm_backward] lengths[3] is 4, needs 0 to 3");
  c.lengths[3] = -1;
  expect_error(c.forward(), "lengths[3] is -1, needs 0 to 3");
  c = Call();
  c.workspace.bytes = 100;
  expect_error(c.forward(), "workspace has 100 bytes, needs ");
  c = Call();
  c.out.y.data = c.memory.data();
  expect_error(c.forward(), "y overlaps pre, needs memory of its own");
  c = Call();
  c.grads.h0.data = c.grads.c0.data;
  expect_error(c.backward(), "dh0 overlaps dc0");
  c = Call();
  c.stream.threads = -2;
  expect_error(c.forward(), "threads is -2");
}

// A query returns what its pass needs, not more, and 0 for what is refused.
TEST(LstmEdge, WorkspaceIsWhatTheQuerySays) {
  Call c;
  const auto needs = [&](size_t bytes, auto pass) {
    ASSERT_GT(bytes, 0u);
    c.workspace.bytes = bytes;
    EXPECT_TRUE((c.*pass)().ok()) << (c.*pass)().message();
    c.workspace.bytes = bytes - 1;
    expect_error((c.*pass)(), "bytes, needs " + std::to_string(bytes));
  };
  const LstmProblem problem{.layout = c.layout, .dtype = DType::f32, .steps = kSteps, .n = kTokens};
  needs(lstm_forward_workspace_size(problem), &Call::forward);
  needs(lstm_backward_workspace_size(problem), &Call::backward);
  const auto refuses = [&](auto spoil, Device device = {}) {
    LstmProblem spoilt = problem;
    spoil(spoilt);
    EXPECT_EQ(lstm_forward_workspace_size(spoilt, device), 0u);
    EXPECT_EQ(lstm_backward_workspace_size(spoilt, device), 0u);
  };
  refuses([](LstmProblem&) {}, {DeviceType::cuda, 0});
  refuses([](LstmProblem& p) { p.layout = {}; });
  refuses([](LstmProblem& p) { p.layout = p.layout.t(); });
  refuses([](LstmProblem& p) { p.dtype = static_cast<DType>(9); });
  refuses([](LstmProblem& p) { p.steps = -1; });
  refuses([](LstmProblem& p) { p.steps = p.n = int64_t{1} << 40; });
}

TEST(LstmEdge, NothingIsWrittenBeforeTheArgumentsAreRight) {
  Call c;
  c.lengths[4] = 17;
  const std::vector<float> before = c.memory;
  EXPECT_FALSE(c.forward().ok());
  EXPECT_FALSE(c.backward().ok());
  EXPECT_EQ(c.memory, before);
}

TEST(LstmSelectCuda, AllStepsAreOneLaunchWhereWeightsFitOnTheChip) {
  constexpr cuda::Card kH200 = {.arch = 90, .multiprocessors = 132, .sm90a = true};
  const LayoutView view{.block_size = 32, .out_features = 4 * 8192, .in_features = 8192, .blocks = 4 * 3277};
  const auto plan = [&](int64_t n, auto change, DType dtype = DType::bf16, int64_t steps = 64) {
    LayoutView other = view;
    change(other);
    return lstm::plan_w_in_smem(other, dtype, steps, n, kH200);
  };
  const auto same = [](LayoutView&) {};
  EXPECT_EQ(plan(16, same).warps(), 8) << "two strips on most of 128 SMs";
  EXPECT_EQ(plan(16, same).grid, 132);
  EXPECT_EQ(plan(16, same).tokens, 16);
  EXPECT_EQ(plan(17, same).tokens, 32);
  EXPECT_EQ(plan(64, same).warps(), 16);
  EXPECT_FALSE(plan(65, same).fits());
  EXPECT_FALSE(plan(0, same).fits());
  EXPECT_FALSE(plan(16, same, DType::f32).fits());
  EXPECT_FALSE(plan(16, same, DType::f16, 1).fits());
  EXPECT_FALSE(plan(16, [](LayoutView& v) { v.block_size = 16, v.blocks *= 4; }).fits());
  EXPECT_FALSE(plan(16, [](LayoutView& v) { v.cut_by_out = true; }).fits()) << "one row would be waited for";
  EXPECT_FALSE(plan(16, [](LayoutView& v) { v.blocks *= 2; }).fits()) << "W is larger than all shared memory";
  const auto wider = [](LayoutView& v) { v.out_features *= 2, v.in_features *= 2; };
  EXPECT_EQ(plan(16, wider).warps(), 16);
  EXPECT_FALSE(plan(64, wider).fits()) << "more warps than an SM has registers for";
  EXPECT_FALSE(lstm::plan_w_in_smem(view, DType::bf16, 64, 16, {.arch = 80, .multiprocessors = 108}).fits());
}

TEST(Layout, StackPutsCopiesBelowOneAnother) {
  const Layout one = *Layout::from_graph("random(3,5,0.4)", {.block_size = 8, .out_features = 0, .in_features = 37}, 2);
  const Layout three = *one.stack(3);
  EXPECT_EQ(three.out_features(), 72);
  EXPECT_EQ(three.in_features(), 37);
  EXPECT_EQ(three.blocks(), 3 * one.blocks());
  const auto columns = one.columns(), all = three.columns();
  for (size_t i = 0; i < all.size(); ++i) EXPECT_EQ(all[i], columns[i % columns.size()]);
  EXPECT_EQ(*one.stack(1), one);
  expect_error(one.stack(0).status(), "[layout] times is 0, needs 1 to ");
  expect_error(one.t().stack(2).status(), "transposed");
  const Layout ragged = *Layout::from_graph("random(3,5,0.4)", {.block_size = 8, .out_features = 23}, 2);
  expect_error(ragged.stack(2).status(), "out_features is 23, needs a multiple of 8 to be stacked");
}

}  // namespace
}  // namespace blocksparse
