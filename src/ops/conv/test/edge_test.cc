// What the convolution's edge refuses, and the sizes that a geometry gives.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "blocksparse/blocksparse.h"
#include "ops/conv/conv.h"

namespace blocksparse {
namespace {

ConstTensor channels_last(const void* data, int64_t n, int64_t c, int64_t h, int64_t w) {
  ConstTensor t(data, DType::f32, {n, c, h, w});
  t.stride = {h * w * c, 1, w * c, c};
  return t;
}

Tensor channels_last(void* data, int64_t n, int64_t c, int64_t h, int64_t w) {
  Tensor t(data, DType::f32, {n, c, h, w});
  t.stride = {h * w * c, 1, w * c, c};
  return t;
}

// A valid call that a test spoils in one place.
struct Call {
  Layout layout = *Layout::from_graph("dense(3,2)", {.block_size = 16, .out_features = 40, .in_features = 0});
  std::vector<float> memory = std::vector<float>(1 << 17, 1.0f);
  std::vector<char> scratch = std::vector<char>(1 << 20);
  std::vector<int32_t> order = std::vector<int32_t>(32);
  Convolution conv{.layout = layout,
                   .geometry = {.kernel = {3, 3, 1}, .padding_before = {1, 1, 0}, .padding_after = {1, 1, 0}}};
  ConstTensor x = channels_last(static_cast<const float*>(memory.data()), 2, 32, 6, 7);
  ConstTensor dy = channels_last(static_cast<const float*>(memory.data()) + 4096, 2, 40, 6, 7);
  ConstTensor w{memory.data() + 8192, DType::f32, {6, 9, 16, 16}};
  ConstTensor gates{memory.data() + 24576, DType::f32, {6}};
  Tensor y = channels_last(memory.data() + 32768, 2, 40, 6, 7);
  Tensor dx = channels_last(memory.data() + 40960, 2, 32, 6, 7);
  Tensor dw{memory.data() + 49152, DType::f32, {6, 9, 16, 16}};
  Tensor dgates{memory.data() + 65536, DType::f32, {6}};
  Epilogue epilogue;
  Workspace workspace{scratch.data(), scratch.size()};
  Stream stream;

  Call() { std::iota(order.begin(), order.end(), 0); }
  Status fprop() const { return conv_fprop(conv, x, {w, gates}, epilogue, y, workspace, stream); }
  Status dgrad() const { return conv_dgrad(conv, dy, {w, gates}, dx, workspace, stream); }
  Status wgrad() const { return conv_wgrad(conv, x, dy, {w, gates}, Accumulate::no, {dw, dgates}, workspace, stream); }
  ConvProblem problem() const { return {.conv = conv, .n = 2, .size = {6, 7}}; }
};

void expect_error(const Status& status, std::string_view text, StatusCode code = StatusCode::invalid_argument) {
  EXPECT_EQ(status.code(), code) << status.message();
  EXPECT_NE(status.message().find(text), std::string::npos) << status.message();
}

TEST(ConvEdge, TheCallItselfIsRight) {
  Call call;
  call.conv.channel_order = call.order;
  EXPECT_TRUE(call.fprop().ok()) << call.fprop().message();
  EXPECT_TRUE(call.dgrad().ok()) << call.dgrad().message();
  EXPECT_TRUE(call.wgrad().ok()) << call.wgrad().message();
}

TEST(ConvEdge, OutputSizes) {
  const auto size = [](ConvGeometry g, SpatialSizes in) { return (*conv_output_size(g, in))[0]; };
  EXPECT_EQ(size({.rank = 1, .kernel = {3}}, {5}), 3);
  EXPECT_EQ(size({.rank = 1, .kernel = {3}, .stride = {2}, .padding_before = {1}, .padding_after = {1}}, {8}), 4);
  EXPECT_EQ(size({.rank = 1, .kernel = {2}, .dilation = {8}, .padding_before = {8}}, {20}), 20);
  EXPECT_EQ(size({.rank = 1,
                  .transposed = true,
                  .kernel = {3},
                  .stride = {2},
                  .padding_before = {1},
                  .padding_after = {1},
                  .output_padding = {1}},
                 {7}),
            14);
  // The dilation may allow more than the stride.
  EXPECT_EQ(size({.rank = 1, .transposed = true, .kernel = {3}, .dilation = {3}, .output_padding = {2}}, {7}), 15);
}

TEST(ConvEdge, Geometry) {
  const auto refuses = [](const ConvGeometry& g, std::string_view text) {
    Call c;
    c.conv.geometry = g;
    expect_error(c.fprop(), text);
    expect_error(c.dgrad(), text);
    expect_error(c.wgrad(), text);
    EXPECT_EQ(conv_fprop_workspace_size(c.problem()), 0u);
    expect_error(conv_output_size(g, {6, 7, 1}).status(), text);
  };
  refuses({.rank = 0}, "the geometry has rank 0, needs 1 to 3");
  refuses({.rank = 4}, "the geometry has rank 4, needs 1 to 3");
  refuses({.kernel = {0, 3}}, "kernel is [0, 3], needs 1 to");
  refuses({.kernel = {3, 3}, .stride = {1, 0}}, "stride is [1, 0], needs 1 to");
  refuses({.kernel = {3, 3}, .dilation = {-1, 1}}, "dilation is [-1, 1], needs 1 to");
  refuses({.kernel = {3, 3}, .padding_before = {1, -1}}, "padding_before is [1, -1], needs 0 to");
  refuses({.kernel = {3, 3}, .padding_after = {-2, 1}}, "padding_after is [-2, 1], needs 0 to");
  refuses({.kernel = {3, 3}, .output_padding = {1, 0}}, "which a transposed convolution alone has");
  refuses({.transposed = true, .kernel = {3, 3}, .stride = {2, 2}, .output_padding = {2, 0}},
          "output_padding is [2, 0], needs to be less than stride [2, 2] or dilation [1, 1]");
  refuses({.kernel = {9, 3}, .padding_before = {1, 1}, .padding_after = {1, 1}},
          "kernel [9, 3] with dilation [1, 1] covers 9 pixels, more than the 8 of an image of [6, 7] with its padding");
  refuses({.transposed = true, .kernel = {1, 1}, .padding_before = {6, 0}, .padding_after = {6, 0}},
          "would give one of size -6");
  refuses({.kernel = {int64_t{1} << 40, 1}}, "kernel is [1099511627776, 1], needs 1 to 2147483647");
  refuses({.kernel = {1 << 16, 1 << 16}}, "taps");
}

TEST(ConvEdge, Shapes) {
  Call c;
  c.x = channels_last(static_cast<const float*>(c.memory.data()), 2, 31, 6, 7);
  expect_error(c.fprop(), "[conv_fprop] x is [2, 31, 6, 7], needs [n, 32] and 2 sizes");
  expect_error(c.wgrad(), "[conv_wgrad] x is [2, 31, 6, 7], needs [n, 32] and 2 sizes");
  c = Call();
  c.x = ConstTensor(c.memory.data(), DType::f32, {2, 32, 6});
  expect_error(c.fprop(), "x is [2, 32, 6], needs [n, 32] and 2 sizes");
  c = Call();
  c.y = channels_last(c.memory.data() + 32768, 2, 40, 6, 6);
  expect_error(c.fprop(), "y is [2, 40, 6, 6], x of [2, 32, 6, 7] needs n = 2 and sizes [6, 7]");
  c = Call();
  c.dy = channels_last(static_cast<const float*>(c.memory.data()), 1, 40, 6, 7);
  expect_error(c.dgrad(), "dy is [1, 40, 6, 7], dx of [2, 32, 6, 7] needs n = 2 and sizes [6, 7]");
  expect_error(c.wgrad(), "dy is [1, 40, 6, 7], x of [2, 32, 6, 7] needs n = 2 and sizes [6, 7]");
  c = Call();
  c.w = ConstTensor(c.w.data, DType::f32, {6, 3, 16, 16});
  expect_error(c.fprop(), "w is [6, 3, 16, 16], needs [6, 9, 16, 16]");
  c = Call();
  c.w = ConstTensor(c.w.data, DType::f32, {5, 9, 16, 16});
  expect_error(c.dgrad(), "w is [5, 9, 16, 16], needs [6, 9, 16, 16]");
  c = Call();
  c.dw = Tensor(c.dw.data, DType::f32, {6, 16, 16});
  expect_error(c.wgrad(), "dw is [6, 16, 16], needs [6, 9, 16, 16]");
  c = Call();
  c.gates = ConstTensor(c.gates.data, DType::f32, {54});
  expect_error(c.fprop(), "gates is [54], needs [6]");
  c = Call();
  c.epilogue.bias = ConstTensor(c.memory.data(), DType::f32, {48});
  expect_error(c.fprop(), "bias is [48], needs [40]");
  c = Call();
  c.epilogue.residual = channels_last(static_cast<const float*>(c.memory.data()), 2, 40, 7, 6);
  expect_error(c.fprop(), "residual is [2, 40, 7, 6], needs the shape of y, [2, 40, 6, 7]");
  c.epilogue.residual = channels_last(static_cast<const float*>(c.memory.data()), 1, 40, 6, 7);
  expect_error(c.fprop(), "residual is [1, 40, 6, 7], needs the shape of y, [2, 40, 6, 7]");
  c = Call();
  c.epilogue.activation = static_cast<Activation>(9);
  expect_error(c.fprop(), "activation is 9");
  c = Call();
  c.x.rank = 0;
  expect_error(c.fprop(), "x has 0 dimensions");
  expect_error(c.wgrad(), "x has 0 dimensions");
  c = Call();
  c.w = {};
  expect_error(c.fprop(), "w is not given");
  expect_error(c.wgrad(), "dgates needs w, which is not given");
  c = Call();
  c.x.shape[2] = 0;
  c.x.stride = {0, 1, 224, 32};
  expect_error(c.fprop(), "an image of [0, 7], sizes need to be 1 to");
}

TEST(ConvEdge, MemoryFormats) {
  Call c;
  c.y = Tensor(c.y.data, DType::f32, {2, 40, 6, 7});
  expect_error(c.fprop(), "y of [2, 40, 6, 7] has strides [1680, 42, 7, 1], which are not channels-last");
  c.x = ConstTensor(c.x.data, DType::f32, {2, 32, 6, 7});
  EXPECT_TRUE(c.fprop().ok()) << c.fprop().message();
  expect_error(c.wgrad(), "dy of [2, 40, 6, 7] has strides [1680, 1, 280, 40], which are not contiguous");
  c = Call();
  c.x.stride = {2048, 1, 224, 32};
  expect_error(c.fprop(), "x of [2, 32, 6, 7] has strides [2048, 1, 224, 32], needs to be dense and channels-last");
  c = Call();
  c.epilogue.residual = ConstTensor(c.memory.data(), DType::f32, {2, 40, 6, 7});
  expect_error(c.fprop(), "residual of [2, 40, 6, 7] has strides [1680, 42, 7, 1], which are not channels-last");
  // One pixel is of both orders.
  c = Call();
  c.conv.geometry = {.kernel = {6, 7}};
  c.w = ConstTensor(c.memory.data(), DType::f32, {6, 42, 16, 16});
  c.y = Tensor(c.memory.data() + (1 << 16) + 1024, DType::f32, {2, 40, 1, 1});
  EXPECT_TRUE(c.fprop().ok()) << c.fprop().message();
}

TEST(ConvEdge, DtypesAndOverlap) {
  Call c;
  c.w.dtype = DType::bf16;
  expect_error(c.fprop(), "w is bf16, needs f32");
  c = Call();
  c.y.dtype = DType::f64;
  expect_error(c.fprop(), "y is f64, needs f32");
  c = Call();
  c.dw.dtype = DType::bf16;
  expect_error(c.wgrad(), "dw is bf16, needs f32");
  c = Call();
  c.y.data = c.memory.data() + 100;
  expect_error(c.fprop(), "y overlaps x");
  c = Call();
  c.epilogue.bias = ConstTensor(static_cast<const float*>(c.y.data) - 39, DType::f32, {40});
  expect_error(c.fprop(), "y overlaps bias");
  c = Call();
  c.dw.data = c.memory.data() + 8192;
  expect_error(c.wgrad(), "dw overlaps w");
  c = Call();
  c.dgates.data = c.dw.data;
  expect_error(c.wgrad(), "dw overlaps dgates");
  c = Call();
  c.dgates.data = const_cast<void*>(c.dy.data);
  expect_error(c.wgrad(), "dgates overlaps dy");
  c = Call();
  c.conv.channel_order = {static_cast<const int32_t*>(c.dw.data), 32};
  expect_error(c.wgrad(), "dw overlaps channel_order");
  c = Call();
  c.workspace.bytes = 16;
  expect_error(c.fprop(), "workspace has 16 bytes, needs");
  expect_error(c.wgrad(), "workspace has 16 bytes, needs");
}

TEST(ConvEdge, ChannelOrder) {
  Call c;
  c.conv.channel_order = c.order;
  c.order[3] = 32;
  expect_error(c.fprop(), "channel_order[3] is 32, needs 0 to 31");
  c.order[3] = -1;
  expect_error(c.dgrad(), "channel_order[3] is -1, needs 0 to 31");
  c.order[3] = 7;
  expect_error(c.wgrad(), "channel_order holds channel 7 twice");
  c.conv.channel_order = std::span(c.order).first(31);
  expect_error(c.fprop(), "[conv_fprop] channel_order is [31], needs [32], the channels of x");
  expect_error(c.dgrad(), "[conv_dgrad] channel_order is [31], needs [32], the channels of dx");
  expect_error(c.wgrad(), "[conv_wgrad] channel_order is [31], needs [32], the channels of x");
  EXPECT_EQ(conv_fprop_workspace_size(c.problem()), 0u);
}

TEST(ConvEdge, LayoutAndDevice) {
  Call c;
  c.conv.layout = {};
  expect_error(c.fprop(), "[conv_fprop] layout is null");
  EXPECT_EQ(conv_fprop_workspace_size(c.problem()), 0u);
  c = Call();
  c.conv.layout = c.layout = *Layout::from_graph("dense(32,32)", {.block_size = 16});
  c.conv.geometry = {.kernel = {46340, 46340}};
  expect_error(c.fprop(), "[conv_fprop] 1024 blocks of 2147395600 taps are too many");
  c = Call();
  c.x.device.type = DeviceType::cuda;
  EXPECT_FALSE(c.fprop().ok());
  const auto refuses = [](auto Call::* tensor, Status (Call::*pass)() const, std::string_view text) {
    Call other;
    (other.*tensor).device = {DeviceType::cuda, 1};
    expect_error((other.*pass)(), text);
  };
  refuses(&Call::y, &Call::fprop, "y is on cuda:1, needs the CPU");
  refuses(&Call::w, &Call::fprop, "w is on cuda:1, needs the CPU");
  refuses(&Call::gates, &Call::dgrad, "gates is on cuda:1, needs the CPU");
  refuses(&Call::dw, &Call::wgrad, "dw is on cuda:1, needs the CPU");
  refuses(&Call::dgates, &Call::wgrad, "dgates is on cuda:1, needs the CPU");
  c = Call();
  c.epilogue.bias = ConstTensor(c.memory.data(), DType::f32, {40}, {DeviceType::cuda, 1});
  expect_error(c.fprop(), "bias is on cuda:1, needs the CPU");
  c.epilogue = {};
  c.epilogue.residual = channels_last(static_cast<const float*>(c.memory.data()), 2, 40, 6, 7);
  c.epilogue.residual.device = {DeviceType::cuda, 1};
  expect_error(c.fprop(), "residual is on cuda:1, needs the CPU");
}

// The queries say what the passes need, no more, and nothing of what is refused.
TEST(ConvEdge, WorkspaceIsWhatTheQuerySays) {
  for (const bool with_order : {false, true}) {
    Call c;
    if (with_order) c.conv.channel_order = c.order;
    const auto needs = [&](size_t bytes, auto pass) {
      ASSERT_GT(bytes, 0u);
      c.workspace.bytes = bytes;
      EXPECT_TRUE((c.*pass)().ok()) << (c.*pass)().message();
      c.workspace.bytes = bytes - 1;
      expect_error((c.*pass)(), "bytes, needs " + std::to_string(bytes));
    };
    needs(conv_fprop_workspace_size(c.problem()), &Call::fprop);
    needs(conv_dgrad_workspace_size(c.problem()), &Call::dgrad);
    needs(conv_wgrad_workspace_size(c.problem()), &Call::wgrad);
  }
  const Call c;
  const auto refuses = [&](auto spoil, Device device = {}) {
    ConvProblem problem = c.problem();
    spoil(problem);
    EXPECT_EQ(conv_fprop_workspace_size(problem, device), 0u);
    EXPECT_EQ(conv_dgrad_workspace_size(problem, device), 0u);
    EXPECT_EQ(conv_wgrad_workspace_size(problem, device), 0u);
  };
  refuses([](ConvProblem&) {}, {DeviceType::cuda, 0});
  refuses([](ConvProblem& p) { p.dtype = static_cast<DType>(9); });
  refuses([](ConvProblem& p) { p.n = -1; });
  refuses([](ConvProblem& p) { p.n = 0; });
  refuses([](ConvProblem& p) { p.n = int64_t{1} << 60; });
  refuses([](ConvProblem& p) { p.size = {6, 0}; });
  refuses([](ConvProblem& p) { p.conv.geometry.kernel = {9, 3}; });
}

// One channel, or one pixel, is of both memory formats: it counts as channels-last, and y may be of either.
TEST(ConvEdge, WorkspaceForATensorOfBothMemoryFormats) {
  const auto check = [](const char* graph, const ConvGeometry& geometry, int64_t channels, int64_t n, int64_t size) {
    const Layout layout = *Layout::from_graph(graph, {.block_size = 8, .out_features = 0, .in_features = channels});
    ConvProblem problem{.conv = {.layout = layout, .geometry = geometry}, .n = n, .size = {size, size}};
    for (const auto query : {conv_fprop_workspace_size, conv_dgrad_workspace_size, conv_wgrad_workspace_size}) {
      problem.channels_last = false;
      const size_t contiguous = query(problem, {});
      problem.channels_last = true;
      const size_t channels_last = query(problem, {});
      EXPECT_LE(contiguous, channels_last) << graph << " n = " << n << ", size " << size;
      const ConstTensor x(nullptr, DType::f32, {n, channels, size, size});
      EXPECT_EQ(conv::workspace_size_like(problem.conv, x, query), channels_last);
      const ConstTensor other(nullptr, DType::f32, {n, channels + 1, size, size});
      EXPECT_EQ(conv::workspace_size_like(problem.conv, other, query), 0u);
    }
  };
  for (const int64_t n : {1, 2, 50}) {
    for (const int64_t size : {1, 5, 30}) {
      for (const int64_t kernel : {1, 3}) {
        check("dense(1,1)", {.kernel = {kernel, kernel}, .padding_before = {1, 1}}, 1, n, size);
        check("dense(40,1)", {.kernel = {kernel, kernel}, .padding_before = {1, 1}, .padding_after = {1, 1}}, 1, n,
              size);
        check("dense(40,1)", {.transposed = true, .kernel = {kernel, kernel}}, 1, n, size);
      }
    }
    check("dense(4,40)", {.transposed = true, .kernel = {3, 3}}, 320, n, 1);
    check("dense(40,4)", {.kernel = {1, 1}, .padding_before = {2, 2}}, 32, n, 1);
  }
}

}  // namespace
}  // namespace blocksparse
