// Gated linear units against their equations in f64, on the CPU and on a card, and what their edge refuses. Products
// that end in one belong to the linear op's problems (`glu=`): the awkward ones are here, others are random.
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "blocksparse/blocksparse.h"
#include "core/convert.h"
#include "core/random.h"
#include "cuda/memory.h"
#include "gemm/cuda/families.h"
#include "gemm/reference.h"
#include "ops/glu/glu.h"
#include "ops/linear/problem.h"

namespace blocksparse {

using namespace glu;  // NOLINT(google-build-using-namespace)

namespace {

constexpr Device kCard{DeviceType::cuda, 0};
constexpr Activation kActivations[] = {Activation::none, Activation::relu, Activation::gelu, Activation::silu,
                                       Activation::gelu_tanh};

struct Case {
  int64_t n, hidden;
  DType dtype;
  Activation activation = Activation::silu;
  int64_t pad = 0, offset = 0;  // elements between tokens, and in front of the first

  std::string line() const {
    return std::to_string(n) + " x " + std::to_string(hidden) + " " + std::string(name_of(dtype)) + " act " +
           std::to_string(static_cast<int>(activation)) + " pad " + std::to_string(pad) + " offset " +
           std::to_string(offset);
  }
};

// Memory of a matrix with poison around it, and its copy where the case runs.
struct Buffer {
  static constexpr char kPoison = static_cast<char>(0xff);  // NaN in every type

  DType dtype;
  int64_t n, features, token, offset;
  std::vector<char> bytes;
  std::shared_ptr<void> memory;
  Device device;

  Buffer(const Case& c, int64_t features, Device device)
      : dtype(c.dtype), n(c.n), features(features), token(features + c.pad), offset(c.offset), device(device) {
    bytes.assign(static_cast<size_t>((offset + n * token + 8) * size_of(dtype)), kPoison);
    if (device.type == DeviceType::cuda) memory = *cuda::allocate(device, bytes.size());
  }
  int64_t at(int64_t t, int64_t feature) const { return offset + t * token + feature; }
  double get(int64_t t, int64_t feature) const { return load_element(bytes.data(), at(t, feature), dtype); }
  void set(int64_t t, int64_t feature, double value) { store_element(bytes.data(), at(t, feature), dtype, value); }
  Tensor tensor() {
    char* data = memory == nullptr ? bytes.data() : static_cast<char*>(memory.get());
    Tensor made(data + offset * size_of(dtype), dtype, {n, features}, device);
    made.stride[0] = token;
    return made;
  }
  void send() const {
    if (memory == nullptr) return;
    ASSERT_TRUE(cuda::copy_to_device(device, memory.get(), bytes.data(), bytes.size()).ok());
  }
  void fetch() {
    if (memory == nullptr) return;
    ASSERT_TRUE(cuda::copy_to_host(device, bytes.data(), memory.get(), bytes.size()).ok());
  }
  // Whether anything outside of the matrix was written.
  bool overrun() const {
    std::vector<bool> inside(bytes.size(), false);
    const auto size = static_cast<size_t>(size_of(dtype));
    for (int64_t t = 0; t < n; ++t) {
      for (int64_t f = 0; f < features; ++f) {
        for (size_t b = 0; b < size; ++b) inside[static_cast<size_t>(at(t, f)) * size + b] = true;
      }
    }
    for (size_t i = 0; i < bytes.size(); ++i) {
      if (!inside[i] && bytes[i] != kPoison) return true;
    }
    return false;
  }
};

// About normal.
double normal(Random& rng) {
  double sum = -6;
  for (int i = 0; i < 12; ++i) sum += rng.uniform();
  return sum;
}

double roundoff(DType of) {
  switch (of) {
    case DType::f64: return 0x1p-53;
    case DType::f32: return 0x1p-24;
    case DType::f16: return 0x1p-11;
    case DType::bf16: return 0x1p-8;
  }
  return 1;
}

// How far results may be off: by the rounding of the result, and by some rounding of the arithmetic, which for f of up
// to `size` is 8 ulp.
void expect_near(double got, double expected, double size, DType dtype, const std::string& where) {
  const double bound = roundoff(dtype) * std::abs(expected) * 1.01 + 16 * roundoff(sum_dtype(dtype)) * size + 0x1p-25;
  const bool f64 = dtype == DType::f64;
  const double allowed = f64 ? 16 * roundoff(dtype) * (size + std::abs(expected)) : bound;
  ASSERT_LE(std::abs(got - expected), allowed) << where << ": " << got << " for " << expected;
}

void run(const Case& c, Device device) {
  SCOPED_TRACE(c.line());
  const int64_t features = interleaved_features(c.hidden);
  Buffer z(c, features, device), y(c, c.hidden, device), dy(c, c.hidden, device), dz(c, features, device);
  Random rng(static_cast<uint64_t>(c.n * 31 + c.hidden));
  for (int64_t t = 0; t < c.n; ++t) {
    for (int64_t h = 0; h < c.hidden; ++h) {  // the rest of the last eight stays NaN
      z.set(t, gate_of(h), 2 * normal(rng));
      z.set(t, gate_of(h) + kInterleaved, normal(rng));
      dy.set(t, h, normal(rng));
    }
  }
  z.send(), dy.send(), y.send(), dz.send();
  const Stream stream{.threads = 2};
  ASSERT_TRUE(glu_forward(z.tensor(), c.activation, y.tensor(), stream).ok());
  ASSERT_TRUE(glu_backward(z.tensor(), dy.tensor(), c.activation, dz.tensor(), stream).ok());
  y.fetch(), dz.fetch();
  EXPECT_FALSE(y.overrun());
  EXPECT_FALSE(dz.overrun());

  // The equations, computed from f64 copies.
  Case exact = c;
  exact.dtype = DType::f64, exact.pad = exact.offset = 0;
  Buffer z64(exact, features, {}), y64(exact, c.hidden, {}), dy64(exact, c.hidden, {}), dz64(exact, features, {});
  for (int64_t t = 0; t < c.n; ++t) {
    for (int64_t f = 0; f < features; ++f) z64.set(t, f, z.get(t, f));
    for (int64_t h = 0; h < c.hidden; ++h) dy64.set(t, h, dy.get(t, h));
  }
  const auto data = [](Buffer& b) { return b.tensor().data; };
  reference_forward({DType::f64, c.activation, c.n, c.hidden, data(z64), data(y64), features, c.hidden});
  reference_backward(
      {DType::f64, c.activation, c.n, c.hidden, data(z64), data(dy64), data(dz64), features, c.hidden, features});
  for (int64_t t = 0; t < c.n; ++t) {
    for (int64_t h = 0; h < c.hidden; ++h) {
      const double gate = z.get(t, gate_of(h)), up = z.get(t, gate_of(h) + kInterleaved), d = dy.get(t, h);
      const double large = std::max(1.0, std::abs(gate));
      expect_near(y.get(t, h), y64.get(t, h), large * std::abs(up), c.dtype, "y");
      expect_near(dz.get(t, gate_of(h)), dz64.get(t, gate_of(h)), large * std::abs(up * d), c.dtype, "dgate");
      expect_near(dz.get(t, gate_of(h) + 8), dz64.get(t, gate_of(h) + 8), large * std::abs(d), c.dtype, "dup");
    }
    for (int64_t h = c.hidden; h < features / 2; ++h) {
      EXPECT_EQ(dz.get(t, gate_of(h)), 0);
      EXPECT_EQ(dz.get(t, gate_of(h) + kInterleaved), 0);
    }
  }
}

std::vector<Case> cases() {
  std::vector<Case> list;
  for (const DType dtype : {DType::f32, DType::f64, DType::bf16, DType::f16}) {
    for (const Activation activation : kActivations) list.push_back({5, 203, dtype, activation});
    for (const int64_t hidden : {1, 7, 8, 9, 64, 1000, 4100}) list.push_back({3, hidden, dtype});
    for (const int64_t n : {0, 1, 7, 300}) list.push_back({n, 40, dtype});
    list.push_back({4, 96, dtype, Activation::gelu, 3, 1});
    list.push_back({4, 96, dtype, Activation::gelu_tanh, 8, 0});
    list.push_back({2, 31, dtype, Activation::relu, 16, 8});
  }
  return list;
}

TEST(Glu, IsItsEquations) {
  for (const std::string& isa : cpu_isas()) {
    ASSERT_TRUE(set_cpu_isa(isa).ok());
    SCOPED_TRACE(isa);
    for (const Case& c : cases()) run(c, {});
  }
  ASSERT_TRUE(set_cpu_isa("").ok());
}

TEST(GluCuda, IsItsEquations) {
  if (!cuda_status().ok()) GTEST_SKIP() << cuda_status().message();
  for (const Case& c : cases()) run(c, kCard);
  run({70000, 16, DType::bf16}, kCard);
}

// The reference's derivative is that of its function.
TEST(Glu, SlopesAreThoseOfDifferences) {
  constexpr double kStep = 1e-5;
  for (const Activation activation : kActivations) {
    for (const double gate : {-7.3, -2.0, -0.4, 0.3, 1.7, 6.1}) {
      double z[16] = {}, y = 0, dy = 1, dz[16];
      z[0] = gate, z[8] = 1.5;
      reference_backward({DType::f64, activation, 1, 1, z, &dy, dz, 16, 1, 16});
      double beside[2];
      for (const int side : {0, 1}) {
        z[0] = gate + (side == 0 ? -kStep : kStep);
        reference_forward({DType::f64, activation, 1, 1, z, &y, 16, 1});
        beside[side] = y;
      }
      EXPECT_NEAR(dz[0], (beside[1] - beside[0]) / (2 * kStep), 1e-8);
      z[0] = gate;
      reference_forward({DType::f64, activation, 1, 1, z, &y, 16, 1});
      EXPECT_NEAR(dz[8] * 1.5, y, 1e-12);
    }
  }
}

// Products that end in a gated linear unit: every block size, ragged hidden features, empty and cut rows, one and many
// tokens, and the other options of a call.
std::vector<std::string> products() {
  std::vector<std::string> lines;
  struct Shape {
    int b, rows, columns, hidden;
  };
  constexpr Shape kShapes[] = {{8, 10, 7, 37},  {16, 9, 5, 72}, {16, 7, 3, 50},   {32, 6, 4, 96},  {32, 5, 3, 77},
                               {64, 4, 3, 128}, {64, 3, 3, 89}, {128, 2, 2, 128}, {128, 3, 2, 190}};
  constexpr std::string_view kMore[] = {" bias act=silu",
                                        " gates act=gelu",
                                        " act=relu values=int",
                                        " x=first act=silu",
                                        " bias pad=3 offset=1 act=gelu_tanh",
                                        " pad=8 gates bias act=silu",
                                        " empty_row=1 act=silu",
                                        " t bias act=silu",
                                        " act=gelu threads=3",
                                        ""};
  size_t turn = 0;
  for (const Shape& s : kShapes) {
    for (const int n : {1, 3, 8, 16, 33, 65, 130, 400, 1030}) {
      for (const char* dtype : {"f32", "bf16"}) {
        const std::string other = turn % 3 == 0 ? (dtype[0] == 'f' ? "f64" : "f16") : dtype;
        std::string more(kMore[turn % std::size(kMore)]);
        if (other != "f32" && other != "f64" && more.find("values=int") != std::string::npos) more = " act=relu";
        const bool turned = more.find(" t ") != std::string::npos;
        const std::string features = std::to_string(interleaved_features(s.hidden));
        const std::string grid = turned ? std::to_string(s.columns) + "," + std::to_string(s.rows)
                                        : std::to_string(s.rows) + "," + std::to_string(s.columns);
        lines.push_back("linear:fprop " + other + " n=" + std::to_string(n) + " b=" + std::to_string(s.b) + " random(" +
                        grid + ",0.6) seed=" + std::to_string(turn) + (turned ? " in=" : " out=") + features + more +
                        " glu=" + std::to_string(s.hidden));
        ++turn;
      }
    }
  }
  lines.push_back("linear:fprop f32 n=70 b=16 random(40,60,0.05) full_row=3 bias act=silu glu=320");
  lines.push_back("linear:fprop bf16 n=33 b=16 random(40,60,0.05) full_row=3 bias act=silu glu=313");
  lines.push_back("linear:fprop f32 n=1 b=32 random(20,70,0.03) full_row=0 bias act=silu glu=320");
  lines.push_back("linear:fprop bf16 n=600 b=64 random(8,8,0.3) empty_row=2 act=silu glu=256 odd=5");
  lines.push_back("linear:fprop f32 n=40 b=32 random(8,8,0.3) gates act=relu glu=128 odd=5");
  return lines;
}

void run_product(const std::string& line) {
  SCOPED_TRACE(line);
  const auto c = linear::parse_linear_case(line);
  ASSERT_TRUE(c.ok()) << c.status().message();
  EXPECT_EQ(linear::parse_linear_case(to_string(*c))->hidden, c->hidden);
  auto data = linear::LinearData::make(*c);
  ASSERT_TRUE(data.ok()) << data.status().message();
  const Status status = data->run();
  ASSERT_TRUE(status.ok()) << status.message();
  const auto error = data->compare();
  EXPECT_LE(error.worst, 1) << error.where;
  EXPECT_EQ(data->overrun(), "");
}

TEST(Glu, ProductsAreTheReference) {
  for (const std::string& isa : cpu_isas()) {
    ASSERT_TRUE(set_cpu_isa(isa).ok());
    SCOPED_TRACE(isa);
    for (const std::string& line : products()) run_product(line);
  }
  ASSERT_TRUE(set_cpu_isa("").ok());
}

// Runs each line by the chosen family, and by every family that takes it.
void run_on_card(const std::vector<std::string>& lines) {
  for (const std::string& line : lines) run_product(line + " device=cuda");
  for (const std::string& kernel : cuda_kernels()) {
    ASSERT_TRUE(set_cuda_kernel(kernel).ok());
    SCOPED_TRACE(kernel);
    for (const std::string& line : lines) {
      const auto data = linear::LinearData::make(*linear::parse_linear_case(line + " device=cuda"));
      ASSERT_TRUE(data.ok()) << data.status().message();
      if (data->kernel().ok()) run_product(line + " device=cuda");
    }
  }
  ASSERT_TRUE(set_cuda_kernel("").ok());
}

TEST(GluCuda, ProductsAreTheReference) {
  if (!cuda_status().ok()) GTEST_SKIP() << cuda_status().message();
  run_on_card(products());
}

// A part of the products, because sanitizers take long.
TEST(GluCuda, SomeProductsAreTheReference) {
  if (!cuda_status().ok()) GTEST_SKIP() << cuda_status().message();
  const std::vector<std::string> all = products();
  std::vector<std::string> some;
  for (size_t i = 0; i < all.size(); i += 11) some.push_back(all[i]);
  run_on_card(some);
}

// The families that get products of 16 bits and can end in a gated linear unit.
TEST(GluSelectCuda, GoesToFamiliesThatEndInOne) {
  const cuda::Card h100{.arch = 90, .multiprocessors = 132, .sm90a = true}, a100{.arch = 80, .multiprocessors = 108};
  const auto problem = [](int32_t block, int64_t n) {
    const LayoutView view{
        .block_size = block, .out_features = 28672, .in_features = 4096, .blocks = 28672 / block * (4096 / block) / 10};
    return gemm::as_glu(gemm::cuda_problem(gemm::Pass::fprop, view, DType::bf16, n));
  };
  const auto chosen = [&](int32_t block, int64_t n, const cuda::Card& card) {
    return gemm::choose_family(problem(block, n), card).name;
  };
  for (const int32_t block : {16, 32, 64, 128}) {
    EXPECT_EQ(chosen(block, 16, h100), "stream_w");
    EXPECT_EQ(chosen(block, 4096, h100), "wgmma");
    EXPECT_EQ(chosen(block, 4096, a100), "stream_w");
    for (const int64_t n : {1, 64, 65, 300, 1024, 1025, 4096}) {
      for (const cuda::Card& card : {h100, a100}) {
        const gemm::Family& family = gemm::choose_family(problem(block, n), card);
        EXPECT_GE(gemm::cuda_workspace_bytes(problem(block, n)),
                  static_cast<size_t>(family.workspace_bytes(problem(block, n))));
      }
    }
  }
  gemm::CudaProblem dense = problem(32, 4096);
  dense.blocks *= 9;  // which wgmma would fill up
  EXPECT_EQ(gemm::choose_family(dense, h100).name, "wgmma");
  for (const std::string_view name :
       {"w_in_smem", "four_rows_wgmma", "row_wgmma", "stream_x", "tiled_f32", "stream_w_f32"}) {
    EXPECT_FALSE(gemm::find_family(name)->supports(problem(32, 256))) << name;
  }
  EXPECT_FALSE(gemm::find_family("generic")->supports(problem(8, 256))) << "a row of blocks is eight of one kind";
}

// ---- What is refused -----------------------------------------------------------------------------------------------

void expect_refused(const Status& status, const std::string& text) {
  EXPECT_EQ(status.code(), StatusCode::invalid_argument);
  EXPECT_NE(status.message().find(text), std::string::npos) << status.message();
}

TEST(Glu, WrongCallsAreRefused) {
  std::vector<float> memory(4096, 1.0f);
  const ConstTensor z(memory.data(), DType::f32, {3, 32});
  const Tensor y(memory.data() + 512, DType::f32, {3, 16});
  ASSERT_TRUE(glu_forward(z, Activation::silu, y).ok());
  expect_refused(glu_forward(ConstTensor(memory.data(), DType::f32, {3, 48}), Activation::silu, y),
                 "[glu_forward] z is [3, 48], needs 32 features, gate and up of 16 hidden ones");
  expect_refused(glu_forward({}, Activation::silu, y), "z is not given");
  expect_refused(glu_forward(z, Activation::silu, {}), "needs");
  expect_refused(glu_forward(z, static_cast<Activation>(7), y), "activation is 7");
  expect_refused(glu_forward(z, Activation::silu, Tensor(memory.data() + 512, DType::f32, {2, 16})),
                 "both need the same number of tokens");
  expect_refused(glu_forward(z, Activation::silu, Tensor(memory.data() + 512, DType::bf16, {3, 16})), "y is bf16");
  expect_refused(glu_forward(z, Activation::silu, Tensor(memory.data() + 8, DType::f32, {3, 16})), "overlap");
  Tensor first(memory.data() + 512, DType::f32, {3, 16});
  first.stride[0] = 1, first.stride[1] = 3;
  expect_refused(glu_forward(z, Activation::silu, first), "needs features side by side");
  const Tensor dz(memory.data() + 1024, DType::f32, {3, 32});
  ASSERT_TRUE(glu_backward(z, y, Activation::silu, dz).ok());
  expect_refused(glu_backward(z, y, Activation::silu, Tensor(memory.data() + 1024, DType::f32, {2, 32})), "dz is");
  expect_refused(glu_backward(z, {}, Activation::silu, dz), "needs");

  const Layout layout = *Layout::from_graph("dense(2,2)", {.block_size = 16});
  const ConstTensor w(memory.data() + 2048, DType::f32, {4, 16, 16});
  std::vector<char> scratch(1 << 16);
  const Workspace workspace{scratch.data(), scratch.size()};
  const auto product = [&](const Epilogue& epilogue, const Tensor& to, Workspace space) {
    return linear_glu_fprop(layout, z, w, epilogue, to, space);
  };
  ASSERT_TRUE(product({}, y, workspace).ok());
  ASSERT_LE(linear_glu_fprop_workspace_size({layout, DType::f32, 3}), scratch.size());
  expect_refused(product({}, Tensor(memory.data() + 512, DType::f32, {3, 32}), workspace),
                 "the layout's 32 outputs are no gate and up of 32 hidden features");
  expect_refused(product({.bias = {}, .residual = y, .activation = Activation::silu}, y, workspace),
                 "residual is given, needs none");
  expect_refused(product({}, first, workspace), "needs features side by side");
  const Layout small = *Layout::from_graph("dense(4,4)", {.block_size = 8});
  const ConstTensor w8(memory.data() + 2048, DType::f32, {16, 8, 8});
  EXPECT_GT(linear_glu_fprop_workspace_size({small, DType::f32, 3}), 3u * 32 * 4 - 1);  // z is made there
  expect_refused(linear_glu_fprop(small, z, w8, {}, y, {}), "workspace");
}

}  // namespace
}  // namespace blocksparse
