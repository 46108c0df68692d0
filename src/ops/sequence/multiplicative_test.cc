// The multiplicative LSTM against differences, with lengths and threads; and what its edge refuses.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "blocksparse/blocksparse.h"
#include "core/convert.h"
#include "core/test_memory.h"

namespace blocksparse {
namespace {

struct Net {
  int64_t steps, n, hidden;
  Layout layout_m, layout;
  std::vector<double> w_m, w, factor, pre, h0, c0, y, h, c, of_y, of_h, of_c, dw_m, dw, dfactor, dpre, dh0, dc0;
  std::vector<int64_t> lengths;
  Stream stream;

  Net(int64_t steps, int64_t n, int32_t block, int nodes)
      : steps(steps),
        n(n),
        hidden(block * nodes),
        layout_m(Layout::from_graph(graph(nodes), {.block_size = block}, 1)->t()),
        layout(*Layout::from_graph(graph(nodes), {.block_size = block}, 2)->stack(4)) {
    std::mt19937 random(7);
    std::normal_distribution<double> normal(0, 0.5);
    const int64_t area = int64_t{block} * block, one = n * hidden;
    const auto fill = [&](std::vector<double>& data, int64_t count) {
      data.resize(static_cast<size_t>(count));
      for (double& v : data) v = normal(random);
    };
    fill(w_m, layout_m.blocks() * area), fill(w, layout.blocks() * area);
    fill(factor, steps * one), fill(pre, 4 * steps * one), fill(of_y, steps * one);
    for (auto* state : {&h0, &c0, &of_h, &of_c}) fill(*state, one);
    dw_m = w_m, dw = w, dfactor = factor, dpre = pre, y = factor;
    for (auto* state : {&h, &c, &dh0, &dc0}) *state = h0;
  }
  static std::string graph(int nodes) {
    return "random(" + std::to_string(nodes) + "," + std::to_string(nodes) + ",0.5)";
  }

  static ConstTensor tensor(const std::vector<double>& data, std::initializer_list<int64_t> shape) {
    return {data.data(), DType::f64, shape};
  }
  static Tensor tensor(std::vector<double>& data, std::initializer_list<int64_t> shape) {
    return {data.data(), DType::f64, shape};
  }
  MultiplicativeProblem problem() const {
    return {.layout_m = layout_m, .layout = layout, .dtype = DType::f64, .steps = steps, .n = n};
  }
  MultiplicativeInputs inputs() const {
    const int64_t b = layout.block_size();
    return {.layout_m = layout_m,
            .layout = layout,
            .w_m = tensor(w_m, {layout_m.blocks(), b, b}),
            .w = tensor(w, {layout.blocks(), b, b}),
            .factor = tensor(factor, {steps, n, hidden}),
            .pre = tensor(pre, {steps, n, 4, hidden}),
            .h0 = tensor(h0, {n, hidden}),
            .c0 = tensor(c0, {n, hidden}),
            .lengths = lengths.empty() ? nullptr : lengths.data()};
  }
  MultiplicativeOutputs outputs(Workspace saved) {
    return {tensor(y, {steps, n, hidden}), tensor(h, {n, hidden}), tensor(c, {n, hidden}), saved};
  }
  void forward(Workspace saved = {}) {
    const Memory scratch(multiplicative_forward_workspace_size(problem()));
    const Status status = multiplicative_forward(inputs(), outputs(saved), scratch.space, stream);
    ASSERT_TRUE(status.ok()) << status.message();
  }
  void backward() {
    const int64_t b = layout.block_size();
    const Memory saved(multiplicative_saved_size(problem()));
    forward(saved.space);
    const Memory scratch(multiplicative_backward_workspace_size(problem()));
    const ConstTensor of_outputs = tensor(std::as_const(of_y), {steps, n, hidden});
    const Status status =
        multiplicative_backward(inputs(), {tensor(y, {steps, n, hidden}), saved.space},
                                {of_outputs, tensor(of_h, {n, hidden}), tensor(of_c, {n, hidden})},
                                {tensor(dw_m, {layout_m.blocks(), b, b}), tensor(dw, {layout.blocks(), b, b}),
                                 tensor(dfactor, {steps, n, hidden}), tensor(dpre, {steps, n, 4, hidden}),
                                 tensor(dh0, {n, hidden}), tensor(dc0, {n, hidden})},
                                scratch.space, stream);
    ASSERT_TRUE(status.ok()) << status.message();
  }
  // The loss whose gradients are of_y, of_h and of_c.
  double loss() {
    forward();
    double sum = 0;
    for (size_t i = 0; i < y.size(); ++i) sum += y[i] * of_y[i];
    for (size_t i = 0; i < h.size(); ++i) sum += h[i] * of_h[i] + c[i] * of_c[i];
    return sum;
  }
};

void check_gradients(Net net) {
  net.backward();
  std::mt19937 random(3);
  const auto check = [&](const char* name, std::vector<double>& of, const std::vector<double>& gradient) {
    for (int i = 0; i < 12; ++i) {
      const size_t at = random() % of.size();
      const double before = of[at], step = 1e-5;
      of[at] = before + step;
      const double above = net.loss();
      of[at] = before - step;
      const double below = net.loss();
      of[at] = before;
      const double expected = (above - below) / (2 * step);
      EXPECT_NEAR(gradient[at], expected, 1e-6 * (1 + std::abs(expected))) << name << "[" << at << "]";
    }
  };
  check("factor", net.factor, net.dfactor);
  check("pre", net.pre, net.dpre);
  check("h0", net.h0, net.dh0);
  check("c0", net.c0, net.dc0);
  check("w_m", net.w_m, net.dw_m);
  check("w", net.w, net.dw);
}

TEST(Multiplicative, GradientsAreDifferences) { check_gradients(Net(3, 5, 8, 5)); }

TEST(Multiplicative, GradientsOfSequencesOfSeveralLengths) {
  Net net(4, 5, 8, 5);
  net.lengths = {4, 0, 2, 1, 3};
  check_gradients(std::move(net));
}

TEST(Multiplicative, BitsDoNotDependOnThreadsOrOnWhatIsSaved) {
  Net net(3, 67, 32, 9);
  net.stream.threads = 1;
  net.backward();
  const std::vector<double> y = net.y, dw = net.dw, dw_m = net.dw_m;
  net.stream.threads = 3;
  net.backward();
  EXPECT_EQ(net.y, y);
  EXPECT_EQ(net.dw, dw);
  EXPECT_EQ(net.dw_m, dw_m);
  net.y.assign(net.y.size(), 0);
  net.forward();
  EXPECT_EQ(net.y, y);
}

// With bf16 the state c is f32, and so is everything that is kept of it.
TEST(Multiplicative, TheStateOfNarrowActivationsIsWide) {
  Net net(4, 5, 8, 5);
  net.lengths = {4, 0, 2, 1, 3};
  net.backward();
  const int64_t steps = net.steps, n = net.n, hidden = net.hidden, one = n * hidden;
  constexpr DType kNarrow = DType::bf16, kWide = DType::f32;
  std::vector<std::vector<char>> parts;
  const auto keep = [&](const std::vector<double>& of, DType dtype, std::initializer_list<int64_t> shape) {
    std::vector<char>& bytes = parts.emplace_back(of.size() * static_cast<size_t>(size_of(dtype)));
    for (size_t i = 0; i < of.size(); ++i) store_element(bytes.data(), static_cast<int64_t>(i), dtype, of[i]);
    return Tensor(bytes.data(), dtype, shape);
  };
  const int64_t blocks_m = net.layout_m.blocks(), blocks = net.layout.blocks();
  const MultiplicativeInputs in{.layout_m = net.layout_m,
                                .layout = net.layout,
                                .w_m = keep(net.w_m, kNarrow, {blocks_m, 8, 8}),
                                .w = keep(net.w, kNarrow, {blocks, 8, 8}),
                                .factor = keep(net.factor, kNarrow, {steps, n, hidden}),
                                .pre = keep(net.pre, kNarrow, {steps, n, 4, hidden}),
                                .h0 = keep(net.h0, kNarrow, {n, hidden}),
                                .c0 = keep(net.c0, kWide, {n, hidden}),
                                .lengths = net.lengths.data()};
  const Tensor y = keep(net.factor, kNarrow, {steps, n, hidden}), h = keep(net.of_h, kNarrow, {n, hidden}),
               c = keep(net.of_c, kWide, {n, hidden});
  const MultiplicativeProblem problem{
      .layout_m = net.layout_m, .layout = net.layout, .dtype = kNarrow, .steps = steps, .n = n};
  const Memory scratch(size_t{1} << 22), saved(multiplicative_saved_size(problem));
  ASSERT_TRUE(multiplicative_forward(in, {y, h, c, {}}, scratch.space).ok());
  const auto bytes_of = [](const Tensor& t, int64_t elements) {
    const auto* bytes = static_cast<const char*>(t.data);
    return std::vector<char>(bytes, bytes + elements * size_of(t.dtype));
  };
  const auto of_y = bytes_of(y, steps * one), of_c = bytes_of(c, one);
  ASSERT_TRUE(multiplicative_forward(in, {y, h, c, saved.space}, scratch.space).ok());
  EXPECT_EQ(bytes_of(y, steps * one), of_y);
  EXPECT_EQ(bytes_of(c, one), of_c);
  for (int64_t i = 0; i < one; ++i) {
    EXPECT_NEAR(load_element(c.data, i, kWide), net.c[static_cast<size_t>(i)], 0.1) << i;
  }
  const auto row_of = [&](const Tensor& t) {  // of the sequence without steps
    const auto all = bytes_of(t, one);
    const auto row = static_cast<std::ptrdiff_t>(hidden * size_of(t.dtype));
    return std::vector<char>(all.begin() + row, all.begin() + 2 * row);
  };
  EXPECT_EQ(row_of(c), row_of(keep(net.c0, kWide, {n, hidden})));
  EXPECT_EQ(row_of(h), row_of(keep(net.h0, kNarrow, {n, hidden})));

  const Tensor dh = keep(net.of_h, kNarrow, {n, hidden}), dc = keep(net.of_c, kWide, {n, hidden});
  const Tensor dh0 = keep(net.h0, kNarrow, {n, hidden}), dc0 = keep(net.c0, kWide, {n, hidden});
  const Tensor dpre = keep(net.pre, kNarrow, {steps, n, 4, hidden});
  ASSERT_TRUE(multiplicative_backward(in, {y, saved.space}, {keep(net.of_y, kNarrow, {steps, n, hidden}), dh, dc},
                                      {keep(net.w_m, kNarrow, {blocks_m, 8, 8}), keep(net.w, kNarrow, {blocks, 8, 8}),
                                       keep(net.factor, kNarrow, {steps, n, hidden}), dpre, dh0, dc0},
                                      scratch.space)
                  .ok());
  EXPECT_EQ(row_of(dh0), row_of(dh));
  EXPECT_EQ(row_of(dc0), row_of(dc));
  for (int64_t i = 0; i < one; ++i) {
    const double expected = net.dc0[static_cast<size_t>(i)];
    EXPECT_NEAR(load_element(dc0.data, i, kWide), expected, 0.1 * (1 + std::abs(expected))) << i;
  }
}

TEST(Multiplicative, NothingToDo) {
  Net net(0, 3, 8, 3);
  net.backward();
  EXPECT_EQ(net.h, net.h0);
  EXPECT_EQ(net.c, net.c0);
  EXPECT_EQ(net.dh0, net.of_h);
  EXPECT_EQ(net.dw, std::vector<double>(net.w.size(), 0));
  Net(3, 0, 8, 3).backward();
}

TEST(Multiplicative, WorkspaceOfWhatIsRefused) {
  const Net net(3, 2, 16, 3);
  const auto refuses = [&](auto spoil, Device device = {}) {
    MultiplicativeProblem problem = net.problem();
    spoil(problem);
    EXPECT_EQ(multiplicative_saved_size(problem, device), 0u);
    EXPECT_EQ(multiplicative_forward_workspace_size(problem, device), 0u);
    EXPECT_EQ(multiplicative_backward_workspace_size(problem, device), 0u);
  };
  EXPECT_GT(multiplicative_saved_size(net.problem()), 0u);
  refuses([](auto&) {}, {DeviceType::cuda, 0});
  refuses([](auto& p) { p.layout = p.layout_m; });
  refuses([](auto& p) { p.layout_m = {}; });
  refuses([](auto& p) { p.dtype = static_cast<DType>(9); });
  refuses([](auto& p) { p.n = -1; });
  refuses([](auto& p) { p.steps = p.n = int64_t{1} << 40; });
}

TEST(Multiplicative, Refuses) {
  Net net(3, 2, 16, 3);
  const Memory scratch(1 << 20), saved(1 << 20);
  const auto refused = [&](const std::string& text,
                           const std::function<void(MultiplicativeInputs&, MultiplicativeOutputs&)>& spoil,
                           size_t bytes = 1 << 20) {
    MultiplicativeInputs in = net.inputs();
    MultiplicativeOutputs out = net.outputs(saved.space);
    spoil(in, out);
    const Status status = multiplicative_forward(in, out, {scratch.space.data, bytes});
    EXPECT_EQ(status.code(), StatusCode::invalid_argument) << text;
    EXPECT_NE(status.message().find(text), std::string::npos) << status.message();
  };
  refused("factor is not given", [](auto& in, auto&) { in.factor = {}; });
  refused("layout is 48 x 48, needs 192 x 48", [](auto& in, auto&) { in.layout = in.layout_m; });
  refused("layout_m is 192 x 48, needs 48 x 48", [](auto& in, auto&) { in.layout_m = in.layout; });
  refused("layout_m is null", [](auto& in, auto&) { in.layout_m.index = nullptr; });
  refused("w_m is not given", [](auto& in, auto&) { in.w_m = {}; });
  refused("pre is [3, 2, 48], needs [3, 2, 4, 48]", [](auto& in, auto&) { in.pre = in.factor; });
  refused("y overlaps factor", [&](auto&, auto& out) { out.y = Net::tensor(net.factor, {3, 2, 48}); });
  refused("saved is null, but has 64 bytes", [](auto&, auto& out) { out.saved = {nullptr, 64}; });
  refused("saved has 64 bytes, needs", [](auto&, auto& out) { out.saved.bytes = 64; });
  const size_t needed = multiplicative_forward_workspace_size(net.problem());
  refused("bytes, needs " + std::to_string(needed), [](auto&, auto&) {}, needed - 1);
  net.lengths = {4, 1};
  refused("[multiplicative_forward] lengths[0] is 4, needs 0 to 3", [](auto&, auto&) {});
}

TEST(Multiplicative, BackwardRefuses) {
  Net net(3, 2, 16, 3);
  const Memory scratch(1 << 20), saved(1 << 20);
  const int64_t b = 16, blocks = net.layout.blocks();
  const auto refused = [&](const std::string& text, size_t saved_bytes, size_t bytes, int64_t blocks_of_dw) {
    const Status status = multiplicative_backward(
        net.inputs(), {Net::tensor(net.y, {3, 2, 48}), {saved.space.data, saved_bytes}}, {},
        {Net::tensor(net.dw_m, {net.layout_m.blocks(), b, b}), Net::tensor(net.dw, {blocks_of_dw, b, b}),
         Net::tensor(net.dfactor, {3, 2, 48}), Net::tensor(net.dpre, {3, 2, 4, 48}), Net::tensor(net.dh0, {2, 48}),
         Net::tensor(net.dc0, {2, 48})},
        {scratch.space.data, bytes});
    EXPECT_EQ(status.code(), StatusCode::invalid_argument) << text;
    EXPECT_NE(status.message().find(text), std::string::npos) << status.message();
  };
  const size_t needed = multiplicative_saved_size(net.problem());
  const size_t workspace = multiplicative_backward_workspace_size(net.problem());
  refused("saved has " + std::to_string(needed - 1) + " bytes, needs ", needed - 1, workspace, blocks);
  refused("workspace has " + std::to_string(workspace - 1) + " bytes, needs ", needed, workspace - 1, blocks);
  refused("[multiplicative_backward] dw is ", needed, workspace, blocks - 1);
}

}  // namespace
}  // namespace blocksparse
