// What the linear op's edge refuses.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "blocksparse/blocksparse.h"
#include "core/ceil_div.h"
#include "core/checks.h"
#include "ops/linear/test_call.h"

namespace blocksparse::linear {
namespace {

void expect_error(const Status& status, std::string_view text, StatusCode code = StatusCode::invalid_argument) {
  EXPECT_EQ(status.code(), code) << status.message();
  EXPECT_NE(status.message().find(text), std::string::npos) << status.message();
}

TEST(LinearEdge, TheCallItselfIsRight) {
  const Call call;
  EXPECT_TRUE(call.fprop().ok()) << call.fprop().message();
  EXPECT_TRUE(call.dgrad().ok()) << call.dgrad().message();
  EXPECT_TRUE(call.wgrad().ok()) << call.wgrad().message();
}

// A query returns what its pass needs, not more, and 0 for what is refused. There are enough tokens that every pass
// needs some.
TEST(LinearEdge, WorkspaceIsWhatTheQuerySays) {
  Call c;
  c.x = ConstTensor(c.memory.data(), DType::f32, {20, 48});
  c.dy = ConstTensor(c.memory.data() + 960, DType::f32, {20, 60});
  c.w.data = c.memory.data() + 4096;
  c.y = Tensor(c.memory.data() + 32768, DType::f32, {20, 60});
  c.dx = Tensor(c.memory.data() + 40000, DType::f32, {20, 48});
  c.dw.data = c.memory.data() + 45000;
  const auto needs = [&](size_t bytes, auto pass) {
    ASSERT_GT(bytes, 0u);
    c.workspace.bytes = bytes;
    EXPECT_TRUE((c.*pass)().ok()) << (c.*pass)().message();
    c.workspace.bytes = bytes - 1;
    expect_error((c.*pass)(), "bytes, needs " + std::to_string(bytes));
  };
  const LinearProblem problem{.layout = c.layout, .dtype = DType::f32, .n = 20};
  needs(linear_fprop_workspace_size(problem), &Call::fprop);
  needs(linear_dgrad_workspace_size(problem), &Call::dgrad);
  needs(linear_wgrad_workspace_size(problem), &Call::wgrad);
  // All pairs of wgrad count, not only the last one.
  const GradPair pairs[] = {{c.x, c.dy}, {c.x, c.dy}, {c.x, c.dy}};
  const size_t bytes = linear_wgrad_workspace_size({.layout = c.layout, .dtype = DType::f32, .n = 60});
  const auto wgrad = [&](size_t given) {
    return linear_wgrad(c.layout, pairs, {}, Accumulate::no, c.dw, {c.scratch.data(), given});
  };
  EXPECT_TRUE(wgrad(bytes).ok()) << wgrad(bytes).message();
  expect_error(wgrad(bytes - 1), "bytes, needs " + std::to_string(bytes));
  const auto refuses = [&](auto spoil, Device device = {}) {
    LinearProblem spoilt = problem;
    spoil(spoilt);
    EXPECT_EQ(linear_fprop_workspace_size(spoilt, device), 0u);
    EXPECT_EQ(linear_dgrad_workspace_size(spoilt, device), 0u);
    EXPECT_EQ(linear_wgrad_workspace_size(spoilt, device), 0u);
  };
  refuses([](LinearProblem&) {}, {DeviceType::cuda, 0});
  refuses([](LinearProblem& p) { p.layout = {}; });
  refuses([](LinearProblem& p) { p.dtype = static_cast<DType>(9); });
  refuses([](LinearProblem& p) { p.n = -1; });
}

// A card's kernels read records of 16 bytes, so workspace and tables must be aligned. A CPU's kernels read any address.
TEST(LinearEdge, PlacesOnACard) {
  const Device card{DeviceType::cuda, 0};
  alignas(64) std::array<char, 256> scratch{};
  const Workspace beyond{scratch.data() + 8, scratch.size() - 8};
  expect_error(check_workspace("op", beyond, 100, card),
               "[op] workspace's address is 8 beyond a multiple of 64, needs a multiple of 64");
  EXPECT_TRUE(check_workspace("op", beyond, 0, card).ok());
  EXPECT_TRUE(check_workspace("op", beyond, 100, Device{}).ok());

  const Call c;
  const LayoutView::Sizes sizes{16, 60, 48, c.layout.blocks()};
  const size_t length = c.layout.index().size();
  std::vector<int32_t> words(length + 4);
  const size_t to_line = (16 - reinterpret_cast<uintptr_t>(words.data()) % 16) % 16 / 4;
  const std::span<const int32_t> all(words);
  expect_error(LayoutView::on_device(all.subspan(to_line + 1, length), sizes, card).status(),
               "index's address is 4 beyond a multiple of 16, needs a multiple of 16");
  expect_error(LayoutView::on_device(all.subspan(to_line, length + 2), sizes, card).status(), "features need ");
  const auto view = LayoutView::on_device(all.subspan(to_line, length), sizes, card);
  ASSERT_TRUE(view.ok()) << view.status().message();
  if (const Status status = cuda_status(); !status.ok()) GTEST_SKIP() << status.message();

  ConstTensor x = c.x, dy = c.dy, w = c.w;
  Tensor y = c.y, dw = c.dw;
  x.device = dy.device = w.device = y.device = dw.device = card;
  const auto line = round_up(reinterpret_cast<uintptr_t>(c.scratch.data()), 64);
  const Workspace workspace{reinterpret_cast<void*>(line + 8), c.scratch.size() / 2};
  expect_error(linear_fprop(*view, x, w, {}, y, workspace),
               "workspace's address is 8 beyond a multiple of 64, needs a multiple of 64");
  const GradPair pair{x, dy};
  expect_error(linear_wgrad(*view, {&pair, 1}, {}, Accumulate::no, dw, workspace),
               "workspace's address is 8 beyond a multiple of 64, needs a multiple of 64");
}

TEST(LinearEdge, Shapes) {
  Call c;
  c.x = ConstTensor(c.memory.data(), DType::f32, {5, 50});
  expect_error(c.fprop(), "[linear_fprop] x is [5, 50], layout needs [N, 48]");
  c = Call();
  c.dy = ConstTensor(c.memory.data(), DType::f32, {5, 64});
  expect_error(c.dgrad(), "[linear_dgrad] dy is [5, 64], layout needs [N, 60]");
  expect_error(c.wgrad(), "[linear_wgrad] dy is [5, 64], layout needs [N, 60]");
  c = Call();
  c.y = Tensor(c.y.data, DType::f32, {6, 60});
  expect_error(c.fprop(), "[linear_fprop] y is [6, 60], 5 tokens of x need [5, 60]");
  c = Call();
  c.w = ConstTensor(c.w.data, DType::f32, {c.layout.blocks() + 1, 16, 16});
  expect_error(c.fprop(), "[linear_fprop] w is [7, 16, 16], needs [6, 16, 16]");
  c = Call();
  c.w = ConstTensor(c.w.data, DType::f32, {c.layout.blocks(), 256});
  expect_error(c.dgrad(), "w is [6, 256], needs [6, 16, 16]");
  c = Call();
  c.gates = ConstTensor(c.gates.data, DType::f32, {3});
  expect_error(c.wgrad(), "gates is [3], needs [6]");
  c = Call();
  c.epilogue.bias = ConstTensor(c.memory.data(), DType::f32, {64});
  expect_error(c.fprop(), "bias is [64], needs [60]");
  c = Call();
  c.epilogue.residual = ConstTensor(c.memory.data(), DType::f32, {4, 60});
  expect_error(c.fprop(), "residual is [4, 60], needs the shape of y, [5, 60]");
  c = Call();
  c.x = ConstTensor(c.memory.data(), DType::f32, {4, 48});
  expect_error(c.wgrad(), "x is [4, 48] and dy [5, 60], both need the same number of tokens");
  c = Call();
  c.x.shape[0] = -1;
  expect_error(c.fprop(), "x is [-1, 48], dimensions need to be 0 or more");
  c = Call();
  c.x.rank = 0;
  expect_error(c.fprop(), "x has 0 dimensions");
  c.x.rank = 6;
  expect_error(c.fprop(), "x has 6 dimensions, needs 1 to 5");
  c = Call();
  c.epilogue.bias = ConstTensor(c.memory.data(), DType::f32, {60});
  c.epilogue.bias.rank = 0;
  expect_error(c.fprop(), "bias has 0 dimensions");
  c.epilogue.bias.rank = -3;
  expect_error(c.fprop(), "bias has -3 dimensions");
  c = Call();
  c.epilogue.residual = ConstTensor(c.memory.data(), DType::f32, {1, 1, 1, 1, 5, 60});
  expect_error(c.fprop(), "residual has 6 dimensions");
  c = Call();
  c.gates.rank = 0;
  expect_error(c.fprop(), "gates has 0 dimensions");
  c = Call();
  c.x.stride[0] = int64_t{1} << 60;
  expect_error(c.fprop(), "too large");
  c = Call();
  c.x = ConstTensor(c.memory.data(), DType::f32, {int64_t{1} << 31, int64_t{1} << 31, 48});
  c.x.stride = {0, 0, 1};  // one row again and again
  expect_error(c.fprop(), "x is [2147483648, 2147483648, 48], too large");
}

TEST(LinearEdge, Dtypes) {
  Call c;
  c.w.dtype = DType::bf16;
  expect_error(c.fprop(), "w is bf16, needs f32");
  c = Call();
  c.y.dtype = DType::f64;
  expect_error(c.fprop(), "y is f64, needs f32");
  c = Call();
  c.dy.dtype = DType::f16;
  expect_error(c.wgrad(), "dy is f16, needs f32");
  c = Call();
  c.dw.dtype = DType::bf16;
  expect_error(c.wgrad(), "dw is bf16, needs f32");
  c = Call();
  c.gates.dtype = DType::f64;
  expect_error(c.fprop(), "gates is f64, needs f32");
  c = Call();
  c.x.dtype = static_cast<DType>(9);
  expect_error(c.fprop(), "x has the unknown dtype 9");
  c = Call();
  c.epilogue.activation = static_cast<Activation>(7);
  expect_error(c.fprop(), "activation is 7");
}

TEST(LinearEdge, Memory) {
  Call c;
  c.x.data = nullptr;
  expect_error(c.fprop(), "x is [5, 48] but its pointer is null");
  c = Call();
  c.w = {};
  expect_error(c.fprop(), "w is not given");
  c = Call();
  c.x.data = reinterpret_cast<const char*>(c.memory.data()) + 1;
  expect_error(c.fprop(), "x is not aligned to its elements of 4 bytes");
  c = Call();
  c.x.stride = {96, 2};
  expect_error(c.fprop(), "x of [5, 48] has strides [96, 2], needs contiguous features or contiguous tokens");
  c = Call();
  c.x.stride = {-48, 1};
  expect_error(c.fprop(), "strides [-48, 1], needs 0 or more");
  c = Call();
  c.y.stride = {10, 1};
  expect_error(c.fprop(), "y of [5, 60] has strides [10, 1], its elements overlap");
  c = Call();
  c.y.stride = {1, 4};
  expect_error(c.fprop(), "y of [5, 60] has strides [1, 4], its elements overlap");
  c = Call();
  c.y.stride = {1, 5};
  EXPECT_TRUE(c.fprop().ok()) << c.fprop().message();
  c = Call();  // the stride of a single feature says nothing
  c.layout = *Layout::from_graph("dense(4,1)", {.block_size = 16, .out_features = 60, .in_features = 1});
  c.w = ConstTensor(c.w.data, DType::f32, {4, 16, 16});
  c.gates = {};
  c.x = ConstTensor(c.memory.data(), DType::f32, {5, 1});
  c.x.stride = {3, 2};
  EXPECT_TRUE(c.fprop().ok()) << c.fprop().message();
  c = Call();
  c.w.stride = {256, 1, 16};
  expect_error(c.fprop(), "needs to be contiguous: [256, 16, 1]");
  c = Call();  // the stride of a dimension of 1 says nothing, nor do those of a tensor of no elements
  c.layout = *Layout::from_graph("dense(1,1)", {.block_size = 16});
  c.x = ConstTensor(c.memory.data(), DType::f32, {5, 16});
  c.y = Tensor(c.y.data, DType::f32, {5, 16});
  c.w = ConstTensor(c.w.data, DType::f32, {1, 16, 16});
  c.w.stride = {7, 16, 1};
  c.gates = ConstTensor(c.gates.data, DType::f32, {1});
  c.gates.stride = {9};
  EXPECT_TRUE(c.fprop().ok()) << c.fprop().message();
  c.layout = *Layout::from_graph("random(1,1,0)", {.block_size = 16});
  c.w = ConstTensor(c.w.data, DType::f32, {0, 16, 16});
  c.w.stride = {7, 3, 2};
  c.gates = {};
  EXPECT_TRUE(c.fprop().ok()) << c.fprop().message();
  c = Call();
  c.x = ConstTensor(c.memory.data(), DType::f32, {5, 2, 48});
  c.x.stride = {200, 48, 1};
  expect_error(c.fprop(), "leading dimensions that flatten to one");
  c = Call();
  c.workspace.bytes = 100;
  expect_error(c.fprop(), "workspace has 100 bytes, needs ");
  c.workspace = {};
  expect_error(c.dgrad(), "workspace has 0 bytes, needs ");
  expect_error(c.wgrad(), "workspace has 0 bytes, needs ");
  c = Call();
  c.dgates = Tensor(c.dgates.data, DType::f32, {c.layout.blocks()});
  c.w = {};
  expect_error(c.wgrad(), "dgates needs w, which is not given");
  c = Call();
  c.stream.threads = -1;
  expect_error(c.fprop(), "threads is -1");
  c = Call();
  c.stream.math = static_cast<Math>(2);
  expect_error(c.wgrad(), "math is 2, needs 0 (ieee) or 1 (tf32)");
  const Call good;
  expect_error(linear_fprop(LayoutView(), good.x, good.w, {}, good.y, good.workspace), "layout is null");
}

TEST(LinearEdge, Overlap) {
  Call c;
  c.y.data = c.memory.data() + 7;
  expect_error(c.fprop(), "y overlaps x, needs memory of its own");
  c = Call();
  c.y.data = const_cast<void*>(c.w.data);
  expect_error(c.fprop(), "y overlaps w");
  c = Call();
  c.dw.data = const_cast<void*>(c.x.data);
  expect_error(c.wgrad(), "dw overlaps x");
  c = Call();
  c.dgates.data = c.dw.data;
  expect_error(c.wgrad(), "dw overlaps dgates");
  c = Call();
  c.dgates.data = const_cast<void*>(c.gates.data);
  expect_error(c.wgrad(), "dgates overlaps gates");
  c = Call();
  c.gates.data = c.dw.data;
  expect_error(c.wgrad(), "dw overlaps gates");
  c = Call();
  c.epilogue.bias = ConstTensor(static_cast<const float*>(c.y.data) + 299, DType::f32, {60});
  expect_error(c.fprop(), "y overlaps bias");
  c.epilogue.bias = ConstTensor(static_cast<const float*>(c.y.data) - 59, DType::f32, {60});
  expect_error(c.fprop(), "y overlaps bias");
  c.epilogue = {};
  c.epilogue.residual = c.y;
  expect_error(c.fprop(), "y overlaps residual");
  c = Call();
  c.gates.data = c.y.data;
  expect_error(c.fprop(), "y overlaps gates");
  // Columns of one buffer do not overlap, though their address ranges do.
  c = Call();
  c.x.stride = {200, 1};
  c.y.data = c.memory.data() + 48;
  c.y.stride = {200, 1};
  EXPECT_TRUE(c.fprop().ok()) << c.fprop().message();
  c.y.data = c.memory.data() + 47;
  expect_error(c.fprop(), "y overlaps x");
  // They do not overlap either if they fill the rows of the buffer.
  c.x.stride = {108, 1};
  c.y.stride = {108, 1};
  c.y.data = c.memory.data() + 48;
  EXPECT_TRUE(c.fprop().ok()) << c.fprop().message();
}

TEST(LinearEdge, Devices) {
  Call c;
  c.x.device = {DeviceType::cuda, 0};
  c.y.device = c.x.device;
  if (cuda_status().ok()) expect_error(c.fprop(), "the layout's tables are not on the device of x");
  else expect_error(c.fprop(), "[cuda] ", StatusCode::unavailable);
  const auto refuses = [](ConstTensor Call::* spoilt, Status (Call::*pass)() const, std::string_view text) {
    Call other;
    (other.*spoilt).device = {DeviceType::cuda, 1};
    expect_error((other.*pass)(), text);
  };
  refuses(&Call::w, &Call::fprop, "w is on cuda:1, needs the CPU");
  refuses(&Call::gates, &Call::fprop, "gates is on cuda:1, needs the CPU");
  refuses(&Call::gates, &Call::wgrad, "gates is on cuda:1, needs the CPU");
  refuses(&Call::x, &Call::wgrad, "x is on cuda:1, needs the CPU");
  refuses(&Call::dy, &Call::wgrad, "dy is on cuda:1, needs the CPU");
  c = Call();
  c.y.device = {DeviceType::cuda, 1};
  expect_error(c.fprop(), "y is on cuda:1, needs the CPU");
  c = Call();
  c.dgates.device = {DeviceType::cuda, 1};
  expect_error(c.wgrad(), "dgates is on cuda:1, needs the CPU");
  c = Call();
  c.epilogue.bias = ConstTensor(c.memory.data(), DType::f32, {60}, {DeviceType::cuda, 1});
  expect_error(c.fprop(), "bias is on cuda:1, needs the CPU");
  c.epilogue = {};
  c.epilogue.residual = ConstTensor(c.memory.data(), DType::f32, {5, 60}, {DeviceType::cuda, 1});
  expect_error(c.fprop(), "residual is on cuda:1, needs the CPU");
}

TEST(LinearEdge, NothingIsWrittenOnError) {
  Call c;
  const std::vector<float> before = c.memory;
  c.gates = ConstTensor(c.gates.data, DType::f32, {3});
  EXPECT_FALSE(c.fprop().ok() || c.dgrad().ok() || c.wgrad().ok());
  EXPECT_EQ(c.memory, before);
}

TEST(LinearEdge, ManyLeadingDimensionsAreOne) {
  Call c;
  c.x = ConstTensor(c.memory.data(), DType::f32, {2, 1, 3, 48});
  c.y = Tensor(c.y.data, DType::f32, {3, 2, 60});
  EXPECT_TRUE(c.fprop().ok()) << c.fprop().message();
  c.x = ConstTensor(c.memory.data(), DType::f32, {48});
  c.y = Tensor(c.y.data, DType::f32, {60});
  EXPECT_TRUE(c.fprop().ok()) << c.fprop().message();
}

}  // namespace
}  // namespace blocksparse::linear
