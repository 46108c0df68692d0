// The deep-update op against plain ops step by step and against differences, with lengths; and what its edge refuses.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "blocksparse/blocksparse.h"
#include "core/convert.h"
#include "core/test_memory.h"

namespace blocksparse {
namespace {

constexpr int kGates = 4;

template <class S>
constexpr DType kDType = sizeof(S) == 8 ? DType::f64 : DType::f32;

template <class S>
Tensor tensor(std::vector<S>& data, std::initializer_list<int64_t> shape) {
  int64_t elements = 1;
  for (const int64_t size : shape) elements *= size;
  data.resize(static_cast<size_t>(elements));
  return {data.data(), kDType<S>, shape};
}

// A network with all its tensors and their gradients.
template <class S>
struct Net {
  int64_t steps, n, hidden;
  std::vector<Layout> layouts;
  std::vector<std::vector<S>> w, gain, shift, dw, dgain, dshift;
  std::vector<S> factor, term, h0, c0, y, h, c, dfactor, dterm, dh0, dc0, of_y, of_h, of_c;
  std::vector<int64_t> lengths;
  std::vector<DeepUpdateMatrix> matrices;
  std::vector<DeepUpdateMatrixGrads> grads;
  Stream stream;

  Net(int64_t steps, int64_t n, int inner, int32_t block, int nodes, bool transposed = false)
      : steps(steps), n(n), hidden(block * nodes) {
    std::mt19937 random(7);
    const auto fill = [&](std::vector<S>& data, std::initializer_list<int64_t> shape, double scale, double middle = 0) {
      std::normal_distribution<double> normal(middle, scale);
      const Tensor t = tensor(data, shape);
      for (S& v : data) v = static_cast<S>(normal(random));
      return t;
    };
    const auto count = static_cast<size_t>(inner) + 1;
    for (auto* part : {&w, &gain, &shift, &dw, &dgain, &dshift}) part->resize(count);
    const std::string graph = "random(" + std::to_string(nodes) + "," + std::to_string(nodes) + ",0.5)";
    for (size_t j = 0; j < count; ++j) {
      Layout layout = *Layout::from_graph(graph, {.block_size = block}, j);
      if (j + 1 == count) layout = *layout.stack(kGates);
      else if (transposed) layout = layout.t();
      layouts.push_back(std::move(layout));
    }
    for (size_t j = 0; j < count; ++j) {
      const int64_t blocks = layouts[j].blocks(), b = block, features = (j + 1 == count ? kGates : 1) * hidden;
      matrices.push_back({layouts[j], fill(w[j], {blocks, b, b}, 0.3), fill(gain[j], {features}, 0.2, 1),
                          fill(shift[j], {features}, 0.2)});
      grads.push_back({tensor(dw[j], {blocks, b, b}), tensor(dgain[j], {features}), tensor(dshift[j], {features})});
    }
    fill(factor, {steps, n, hidden}, 0.5, 1);
    fill(term, {steps, n, hidden}, 0.5);
    fill(h0, {n, hidden}, 0.5), fill(c0, {n, hidden}, 0.5);
    fill(of_y, {steps, n, hidden}, 1), fill(of_h, {n, hidden}, 1), fill(of_c, {n, hidden}, 1);
  }

  DeepUpdateProblem problem() const { return {.matrices = matrices, .dtype = kDType<S>, .steps = steps, .n = n}; }
  DeepUpdateInputs inputs() {
    return {.matrices = matrices,
            .factor = tensor(factor, {steps, n, hidden}),
            .term = tensor(term, {steps, n, hidden}),
            .h0 = tensor(h0, {n, hidden}),
            .c0 = tensor(c0, {n, hidden}),
            .lengths = lengths.empty() ? nullptr : lengths.data()};
  }
  DeepUpdateOutputs outputs(Workspace saved) {
    return {tensor(y, {steps, n, hidden}), tensor(h, {n, hidden}), tensor(c, {n, hidden}), saved};
  }
  void forward(Workspace saved = {}) {
    const Memory scratch(deep_update_forward_workspace_size(problem()));
    const Status status = deep_update_forward(inputs(), outputs(saved), scratch.space, stream);
    ASSERT_TRUE(status.ok()) << status.message();
  }
  void backward() {
    const Memory saved(deep_update_saved_size(problem()));
    forward(saved.space);
    const Memory scratch(deep_update_backward_workspace_size(problem()));
    const Status status =
        deep_update_backward(inputs(), {tensor(y, {steps, n, hidden}), saved.space},
                             {tensor(of_y, {steps, n, hidden}), tensor(of_h, {n, hidden}), tensor(of_c, {n, hidden})},
                             {grads, tensor(dfactor, {steps, n, hidden}), tensor(dterm, {steps, n, hidden}),
                              tensor(dh0, {n, hidden}), tensor(dc0, {n, hidden})},
                             scratch.space, stream);
    ASSERT_TRUE(status.ok()) << status.message();
  }
  // The loss whose gradients are of_y, of_h and of_c.
  double loss() {
    forward();
    double sum = 0;
    for (size_t i = 0; i < y.size(); ++i) sum += static_cast<double>(y[i]) * of_y[i];
    for (size_t i = 0; i < h.size(); ++i) sum += static_cast<double>(h[i]) * of_h[i];
    for (size_t i = 0; i < c.size(); ++i) sum += static_cast<double>(c[i]) * of_c[i];
    return sum;
  }
};

// The steps by public ops, which the op promises to equal.
template <class S>
void step_by_step(Net<S>& net, std::vector<S>& y, std::vector<S>& c) {
  const int64_t n = net.n, hidden = net.hidden, last = static_cast<int64_t>(net.matrices.size()) - 1;
  const DType dtype = kDType<S>;
  const Layout none = *Layout::from_mask(std::vector<uint8_t>(static_cast<size_t>(kGates * hidden / 8 * (hidden / 8))),
                                         kGates * hidden / 8, hidden / 8, {.block_size = 8});
  std::vector<S> h = net.h0, product, normed, stats(static_cast<size_t>(2 * kGates * n)), nothing;
  c = net.c0;
  y.resize(static_cast<size_t>(net.steps * n * hidden));
  const Memory scratch(size_t{1} << 22);
  for (int64_t t = 0; t < net.steps; ++t) {
    std::vector<S> u = h;
    for (int64_t j = 0; j <= last; ++j) {
      DeepUpdateMatrix& m = net.matrices[static_cast<size_t>(j)];
      const int64_t groups = j == last ? kGates : 1;
      const Tensor of_product = tensor(product, {n, groups * hidden});
      ASSERT_TRUE(linear_fprop(m.layout, tensor(u, {n, hidden}), m.w, {}, of_product, scratch.space).ok());
      const auto at = [&](std::vector<S>& all) {
        return ConstTensor(all.data() + t * n * hidden, dtype, {n, 1, hidden});
      };
      LayerNormInputs in{.x = tensor(product, {n, groups, hidden}),
                         .gain = ConstTensor(m.gain.data, dtype, {groups, hidden}),
                         .shift = ConstTensor(m.shift.data, dtype, {groups, hidden}),
                         .relu = j > 0 && j < last,
                         .epsilon = 1e-6};
      if (j == 0) in.factor = at(net.factor);
      if (j == 1) in.term = at(net.term);
      const Tensor out = tensor(normed, {n, groups, hidden});
      ASSERT_TRUE(layer_norm_forward(in, {out, Tensor(stats.data(), dtype, {n, groups, 2})}).ok());
      u = normed;
    }
    std::vector<S> next_c(c.size());
    S* made = y.data() + t * n * hidden;
    ASSERT_TRUE(
        lstm_forward(
            none,
            {tensor(u, {1, n, kGates, hidden}), ConstTensor(nullptr, dtype, {0, 8, 8}), {}, tensor(c, {n, hidden})},
            {.y = Tensor(made, dtype, {1, n, hidden}),
             .h = {},
             .c = tensor(next_c, {n, hidden}),
             .gates = {},
             .cells = {}},
            scratch.space)
            .ok());
    c = next_c;
    h.assign(made, made + n * hidden);
  }
}

TEST(DeepUpdate, IsItsStepsByPlainOps) {
  if (*cpu_isa() == "reference") GTEST_SKIP() << "its cell is rounded in another way than the plain one";
  for (const bool transposed : {false, true}) {
    Net<float> net(5, 7, 4, 16, 6, transposed);
    std::vector<float> y, c;
    step_by_step(net, y, c);
    net.forward();
    EXPECT_EQ(net.y, y);
    EXPECT_EQ(net.c, c);
    EXPECT_EQ(net.h, std::vector<float>(y.end() - net.n * net.hidden, y.end()));
    const Memory saved(deep_update_saved_size(net.problem()));
    net.y.assign(net.y.size(), 0);
    net.forward(saved.space);
    EXPECT_EQ(net.y, y);
    EXPECT_EQ(net.c, c);
  }
}

void check_gradients(Net<double>& net) {
  net.backward();
  std::mt19937 random(3);
  const auto check = [&](const char* name, std::vector<double>& of, std::vector<double> gradient, int times) {
    ASSERT_EQ(of.size(), gradient.size()) << name;
    for (int i = 0; i < times; ++i) {
      const size_t at = random() % of.size();
      const double before = of[at], step = 1e-5;
      of[at] = before + step;
      const double above = net.loss();
      of[at] = before - step;
      const double below = net.loss();
      of[at] = before;
      const double expected = (above - below) / (2 * step);
      EXPECT_NEAR(gradient[at], expected, 1e-5 * (1 + std::abs(expected))) << name << "[" << at << "]";
    }
  };
  check("factor", net.factor, net.dfactor, 8);
  check("term", net.term, net.dterm, 8);
  check("h0", net.h0, net.dh0, 8);
  check("c0", net.c0, net.dc0, 8);
  for (size_t j = 0; j < net.matrices.size(); ++j) {
    check("w", net.w[j], net.dw[j], 8);
    check("gain", net.gain[j], net.dgain[j], 4);
    check("shift", net.shift[j], net.dshift[j], 4);
  }
}

TEST(DeepUpdate, GradientsAreDifferences) {
  for (const bool transposed : {false, true}) {
    Net<double> net(3, 5, 3, 8, 5, transposed);
    check_gradients(net);
  }
}

TEST(DeepUpdate, GradientsOfSequencesOfSeveralLengths) {
  Net<double> net(4, 5, 2, 8, 5);
  net.lengths = {4, 0, 2, 1, 3};
  check_gradients(net);
}

TEST(DeepUpdate, ShorterSequencesAreThoseAlone) {
  Net<float> net(6, 3, 2, 16, 4);
  net.lengths = {6, 2, 0};
  net.forward();
  const std::vector<float> y = net.y, h = net.h, c = net.c;
  const size_t row = static_cast<size_t>(net.hidden);
  Net<float> alone = net;
  alone.lengths.clear();
  alone.matrices = net.matrices;
  alone.steps = 2;
  alone.factor.resize(2 * 3 * row), alone.term.resize(2 * 3 * row);
  alone.forward();
  const auto part = [&](const std::vector<float>& of, size_t first) {
    return std::vector<float>(of.begin() + static_cast<int64_t>(first * row),
                              of.begin() + static_cast<int64_t>((first + 1) * row));
  };
  EXPECT_EQ(part(h, 1), part(alone.h, 1));
  EXPECT_EQ(part(c, 1), part(alone.c, 1));
  EXPECT_EQ(part(h, 2), part(net.h0, 2));
  EXPECT_EQ(part(c, 2), part(net.c0, 2));
  for (size_t t = 2; t < 6; ++t) EXPECT_EQ(part(y, 3 * t + 1), std::vector<float>(row, 0)) << t;
}

TEST(DeepUpdate, BitsDoNotDependOnThreads) {
  Net<float> net(3, 67, 3, 32, 9);
  net.stream.threads = 1;
  net.backward();
  const Net<float> one = net;
  net.stream.threads = 3;
  net.backward();
  EXPECT_EQ(net.y, one.y);
  EXPECT_EQ(net.dw, one.dw);
  EXPECT_EQ(net.dgain, one.dgain);
  EXPECT_EQ(net.dh0, one.dh0);
}

TEST(DeepUpdate, NothingToDo) {
  Net<float> no_steps(0, 3, 2, 8, 3), no_tokens(3, 0, 2, 8, 3);
  no_steps.backward();
  EXPECT_EQ(no_steps.h, no_steps.h0);
  EXPECT_EQ(no_steps.c, no_steps.c0);
  EXPECT_EQ(no_steps.dh0, no_steps.of_h);
  EXPECT_EQ(no_steps.dw[0], std::vector<float>(no_steps.w[0].size(), 0));
  no_tokens.backward();
  EXPECT_EQ(no_tokens.dgain[0], std::vector<float>(24, 0));
}

TEST(DeepUpdate, WorkspaceOfWhatIsRefused) {
  Net<float> net(3, 2, 2, 16, 3);
  const auto refuses = [&](auto spoil, Device device = {}) {
    DeepUpdateProblem problem = net.problem();
    spoil(problem);
    EXPECT_EQ(deep_update_saved_size(problem, device), 0u);
    EXPECT_EQ(deep_update_forward_workspace_size(problem, device), 0u);
    EXPECT_EQ(deep_update_backward_workspace_size(problem, device), 0u);
  };
  EXPECT_GT(deep_update_saved_size(net.problem()), 0u);
  refuses([](auto&) {}, {DeviceType::cuda, 0});
  refuses([](auto& p) { p.matrices = {}; });
  refuses([](auto& p) { p.matrices = p.matrices.first(2); });
  refuses([](auto& p) { p.matrices = p.matrices.last(2); });
  refuses([](auto& p) { p.dtype = static_cast<DType>(9); });
  refuses([](auto& p) { p.n = -1; });
  refuses([](auto& p) { p.steps = p.n = int64_t{1} << 40; });
}

TEST(DeepUpdate, Refuses) {
  Net<float> net(3, 2, 2, 16, 3);
  const Memory scratch(1 << 20), saved(1 << 20);
  const auto refused = [&](const std::string& text,
                           const std::function<void(DeepUpdateInputs&, DeepUpdateOutputs&)>& spoil,
                           Workspace workspace) {
    std::vector<DeepUpdateMatrix> matrices = net.matrices;
    DeepUpdateInputs in = net.inputs();
    in.matrices = matrices;
    DeepUpdateOutputs out = net.outputs(saved.space);
    spoil(in, out);
    const Status status = deep_update_forward(in, out, workspace);
    EXPECT_EQ(status.code(), StatusCode::invalid_argument) << text;
    EXPECT_NE(status.message().find(text), std::string::npos) << status.message();
  };
  const auto spoilt = [&](DeepUpdateInputs& in, size_t j, auto change) {
    static std::vector<DeepUpdateMatrix> matrices;
    matrices.assign(in.matrices.begin(), in.matrices.end());
    change(matrices[j]);
    in.matrices = matrices;
  };
  refused("factor is not given", [](auto& in, auto&) { in.factor = {}; }, scratch.space);
  refused(
      "factor is [3, 2, 44], needs [steps, n, H] with H a multiple of 8",
      [&](auto& in, auto&) { in.factor = ConstTensor(net.factor.data(), DType::f32, {3, 2, 44}); }, scratch.space);
  refused(
      "there are 2 matrices, needs 3 to 64", [](auto& in, auto&) { in.matrices = in.matrices.first(2); },
      scratch.space);
  refused(
      "matrix 2] layout is 48 x 48, needs 192 x 48",
      [&](auto& in, auto&) { spoilt(in, 2, [&](auto& m) { m.layout = net.layouts[0]; }); }, scratch.space);
  refused(
      "matrix 1] layout is null", [&](auto& in, auto&) { spoilt(in, 1, [](auto& m) { m.layout.index = nullptr; }); },
      scratch.space);
  refused(
      "matrix 1] gain is not given", [&](auto& in, auto&) { spoilt(in, 1, [](auto& m) { m.gain = {}; }); },
      scratch.space);
  refused(
      "matrix 0] w is", [&](auto& in, auto&) { spoilt(in, 0, [&](auto& m) { m.w = net.matrices[1].gain; }); },
      scratch.space);
  refused("term is", [&](auto& in, auto&) { in.term = in.h0; }, scratch.space);
  refused("c0 is not given", [](auto& in, auto&) { in.c0 = {}; }, scratch.space);
  refused("epsilon is 0", [](auto& in, auto&) { in.epsilon = 0; }, scratch.space);
  refused("epsilon is inf", [](auto& in, auto&) { in.epsilon = INFINITY; }, scratch.space);
  refused(
      "factor is [2147483648, 1024, 48], too large",
      [&](auto& in, auto&) { in.factor = ConstTensor(net.factor.data(), DType::f32, {int64_t{1} << 31, 1024, 48}); },
      scratch.space);
  refused("y overlaps factor", [&](auto&, auto& out) { out.y = tensor(net.factor, {3, 2, 48}); }, scratch.space);
  refused("saved is null, but has 64 bytes", [](auto&, auto& out) { out.saved = {nullptr, 64}; }, scratch.space);
  refused("saved has 64 bytes, needs", [&](auto&, auto& out) { out.saved.bytes = 64; }, scratch.space);
  refused(
      "saved needs an alignment of 64",
      [&](auto&, auto& out) { out.saved.data = static_cast<char*>(out.saved.data) + 4; }, scratch.space);
  const size_t needed = deep_update_forward_workspace_size(net.problem());
  refused("bytes, needs " + std::to_string(needed), [](auto&, auto&) {}, Workspace{scratch.space.data, needed - 1});
  net.lengths = {4, 1};
  refused("[deep_update_forward] lengths[0] is 4, needs 0 to 3", [](auto&, auto&) {}, scratch.space);
}

TEST(DeepUpdate, BackwardRefuses) {
  Net<float> net(3, 2, 2, 16, 3);
  const Memory scratch(1 << 20), saved(1 << 20);
  const auto refused = [&](const std::string& text, size_t gradients, size_t saved_bytes, size_t bytes) {
    const Tensor state = tensor(net.dh0, {2, 48}), other = tensor(net.dc0, {2, 48});
    const Status status =
        deep_update_backward(net.inputs(), {tensor(net.y, {3, 2, 48}), {saved.space.data, saved_bytes}}, {},
                             {std::span(net.grads).first(gradients), tensor(net.dfactor, {3, 2, 48}),
                              tensor(net.dterm, {3, 2, 48}), state, other},
                             {scratch.space.data, bytes});
    EXPECT_EQ(status.code(), StatusCode::invalid_argument) << text;
    EXPECT_NE(status.message().find(text), std::string::npos) << status.message();
  };
  const size_t needed = deep_update_saved_size(net.problem());
  const size_t workspace = deep_update_backward_workspace_size(net.problem());
  refused("[deep_update_backward] there are gradients of 2 matrices, needs 3", 2, needed, workspace);
  refused("saved has " + std::to_string(needed - 1) + " bytes, needs ", 3, needed - 1, workspace);
  refused("workspace has " + std::to_string(workspace - 1) + " bytes, needs ", 3, needed, workspace - 1);
}

// With bf16 the state c is f32, and so is everything that is kept of it.
TEST(DeepUpdate, TheStateOfNarrowActivationsIsWide) {
  Net<double> net(4, 5, 2, 8, 5);
  net.lengths = {4, 0, 2, 1, 3};
  net.backward();
  const int64_t steps = net.steps, n = net.n, hidden = net.hidden, one = n * hidden;
  const auto as = [](const std::vector<double>& of, DType dtype) {
    std::vector<char> bytes(of.size() * static_cast<size_t>(size_of(dtype)));
    for (size_t i = 0; i < of.size(); ++i) store_element(bytes.data(), static_cast<int64_t>(i), dtype, of[i]);
    return bytes;
  };
  constexpr DType kNarrow = DType::bf16, kWide = DType::f32;
  std::vector<std::vector<char>> parts;
  std::vector<DeepUpdateMatrix> matrices;
  std::vector<DeepUpdateMatrixGrads> grads;
  const auto keep = [&](const std::vector<double>& of, DType dtype, std::initializer_list<int64_t> shape) {
    parts.push_back(as(of, dtype));
    return Tensor(parts.back().data(), dtype, shape);
  };
  for (size_t j = 0; j < net.matrices.size(); ++j) {
    const int64_t blocks = net.layouts[j].blocks(), features = static_cast<int64_t>(net.gain[j].size());
    matrices.push_back({net.layouts[j], keep(net.w[j], kNarrow, {blocks, 8, 8}), keep(net.gain[j], kWide, {features}),
                        keep(net.shift[j], kWide, {features})});
    grads.push_back({keep(net.w[j], kNarrow, {blocks, 8, 8}), keep(net.gain[j], kWide, {features}),
                     keep(net.shift[j], kWide, {features})});
  }
  const DeepUpdateInputs in{.matrices = matrices,
                            .factor = keep(net.factor, kNarrow, {steps, n, hidden}),
                            .term = keep(net.term, kNarrow, {steps, n, hidden}),
                            .h0 = keep(net.h0, kNarrow, {n, hidden}),
                            .c0 = keep(net.c0, kWide, {n, hidden}),
                            .lengths = net.lengths.data()};
  const Tensor y = keep(net.factor, kNarrow, {steps, n, hidden}), h = keep(net.of_h, kNarrow, {n, hidden}),
               c = keep(net.of_c, kWide, {n, hidden});
  const DeepUpdateProblem problem{.matrices = matrices, .dtype = kNarrow, .steps = steps, .n = n};
  const Memory scratch(size_t{1} << 22), saved(deep_update_saved_size(problem));
  ASSERT_TRUE(deep_update_forward(in, {y, h, c, {}}, scratch.space).ok());
  const auto bytes_of = [](const Tensor& t, int64_t elements) {
    const auto* bytes = static_cast<const char*>(t.data);
    return std::vector<char>(bytes, bytes + elements * size_of(t.dtype));
  };
  const auto of_y = bytes_of(y, steps * one), of_c = bytes_of(c, one);
  ASSERT_TRUE(deep_update_forward(in, {y, h, c, saved.space}, scratch.space).ok());
  EXPECT_EQ(bytes_of(y, steps * one), of_y);
  EXPECT_EQ(bytes_of(c, one), of_c);
  const auto row_of = [&](const Tensor& t) {  // of the sequence without steps
    const auto all = bytes_of(t, one);
    const auto row = static_cast<std::ptrdiff_t>(hidden * size_of(t.dtype));
    return std::vector<char>(all.begin() + row, all.begin() + 2 * row);
  };
  const auto element = [](const Tensor& t, int64_t i) { return load_element(t.data, i, t.dtype); };
  for (int64_t i = 0; i < one; ++i) EXPECT_NEAR(element(c, i), net.c[static_cast<size_t>(i)], 0.2) << i;
  EXPECT_EQ(row_of(c), row_of(keep(net.c0, kWide, {n, hidden})));
  EXPECT_EQ(row_of(h), row_of(keep(net.h0, kNarrow, {n, hidden})));

  const Tensor dc = keep(net.of_c, kWide, {n, hidden}), dh = keep(net.of_h, kNarrow, {n, hidden});
  const Tensor dh0 = keep(net.h0, kNarrow, {n, hidden}), dc0 = keep(net.c0, kWide, {n, hidden});
  ASSERT_TRUE(deep_update_backward(in, {y, saved.space}, {keep(net.of_y, kNarrow, {steps, n, hidden}), dh, dc},
                                   {grads, keep(net.factor, kNarrow, {steps, n, hidden}),
                                    keep(net.term, kNarrow, {steps, n, hidden}), dh0, dc0},
                                   scratch.space)
                  .ok());
  EXPECT_EQ(row_of(dh0), row_of(dh));
  EXPECT_EQ(row_of(dc0), row_of(dc));
}

}  // namespace
}  // namespace blocksparse
