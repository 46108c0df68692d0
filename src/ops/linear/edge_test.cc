// What the linear op's edge refuses, what it promises about determinism and sharing, and its one-line problems.
#include <gtest/gtest.h>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "blocksparse/blocksparse.h"
#include "core/ceil_div.h"
#include "core/checks.h"
#include "cpu/isa.h"
#include "ops/linear/problem.h"

namespace blocksparse::linear {
namespace {

// A valid call that a test spoils in one place.
struct Call {
  Layout layout = *Layout::from_graph("random(4,3,0.5)", {.block_size = 16, .out_features = 60, .in_features = 0}, 1);
  std::vector<float> memory = std::vector<float>(1 << 16, 1.0f);
  std::vector<char> scratch = std::vector<char>(1 << 20);
  ConstTensor x{memory.data(), DType::f32, {5, 48}};
  ConstTensor dy{memory.data() + 1024, DType::f32, {5, 60}};
  ConstTensor w{memory.data() + 2048, DType::f32, {layout.blocks(), 16, 16}};
  ConstTensor gates{memory.data() + 16384, DType::f32, {layout.blocks()}};
  Tensor y{memory.data() + 32768, DType::f32, {5, 60}};
  Tensor dx{memory.data() + 33792, DType::f32, {5, 48}};
  Tensor dw{memory.data() + 34816, DType::f32, {layout.blocks(), 16, 16}};
  Tensor dgates{memory.data() + 49152, DType::f32, {layout.blocks()}};
  Epilogue epilogue;
  Workspace workspace{scratch.data(), scratch.size()};
  Stream stream;

  Status fprop() const { return linear_fprop(layout, x, {w, gates}, epilogue, y, workspace, stream); }
  Status dgrad() const { return linear_dgrad(layout, dy, {w, gates}, dx, workspace, stream); }
  Status wgrad() const {
    const GradPair pair{x, dy};
    return linear_wgrad(layout, {&pair, 1}, {w, gates}, Accumulate::no, {dw, dgates}, workspace, stream);
  }
};

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

// The queries say what the passes need, no more, and nothing of what is refused. Tokens enough that all need some.
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
  // All pairs of wgrad count, not the last one alone.
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

// Kernels of a card read records of 16 bytes, those of a CPU what any address holds.
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
  // Columns of one buffer do not overlap, though their ranges do.
  c = Call();
  c.x.stride = {200, 1};
  c.y.data = c.memory.data() + 48;
  c.y.stride = {200, 1};
  EXPECT_TRUE(c.fprop().ok()) << c.fprop().message();
  c.y.data = c.memory.data() + 47;
  expect_error(c.fprop(), "y overlaps x");
  // Nor where they fill the rows of the buffer.
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

TEST(Linear, AClosedGateSkipsWhatItsBlockHolds) {
  Call c;
  auto* w = const_cast<float*>(static_cast<const float*>(c.w.data));
  auto* gates = const_cast<float*>(static_cast<const float*>(c.gates.data));
  std::fill(w + 2 * 256, w + 3 * 256, NAN);
  gates[2] = 0;
  for (const std::string& isa : cpu_isas()) {
    ASSERT_TRUE(set_cpu_isa(isa).ok());
    ASSERT_TRUE(c.fprop().ok() && c.dgrad().ok());
    const auto* y = static_cast<const float*>(c.y.data);
    const auto* dx = static_cast<const float*>(c.dx.data);
    EXPECT_TRUE(std::none_of(y, y + 300, [](float v) { return std::isnan(v); })) << isa;
    EXPECT_TRUE(std::none_of(dx, dx + 240, [](float v) { return std::isnan(v); })) << isa;
    gates[2] = 1;
    ASSERT_TRUE(c.fprop().ok());
    EXPECT_TRUE(std::any_of(y, y + 300, [](float v) { return std::isnan(v); })) << isa << ": an open one does not";
    gates[2] = 0;
  }
  ASSERT_TRUE(set_cpu_isa("").ok());
}

#if defined(__linux__)
// Memory with nothing mapped behind its last byte: a read beyond it ends the test.
class AtTheEnd {
 public:
  explicit AtTheEnd(size_t bytes) {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    size_ = round_up(bytes, page) + page;
    begin_ = static_cast<char*>(mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    EXPECT_NE(static_cast<void*>(begin_), MAP_FAILED);
    EXPECT_EQ(mprotect(begin_ + size_ - page, page, PROT_NONE), 0);
    data_ = begin_ + size_ - page - bytes;
  }
  ~AtTheEnd() { munmap(begin_, size_); }
  AtTheEnd(const AtTheEnd&) = delete;
  AtTheEnd& operator=(const AtTheEnd&) = delete;
  void* data() const { return data_; }

 private:
  char *begin_ = nullptr, *data_ = nullptr;
  size_t size_ = 0;
};

// Ragged features, in either order, with few blocks and with many: where whole blocks are read, the last of them would
// reach beyond x or dy.
TEST(Linear, NothingIsReadBeyondATensor) {
  const auto run = [](const BlockCoordinates& at, int32_t block, DType dtype, int64_t n, int64_t missing, bool first) {
    const int64_t b = block, out = at.out_blocks * b - missing, in = at.in_blocks * b - missing / 2;
    const Layout layout = *Layout::from_coordinates(at, {.block_size = block, .out_features = out, .in_features = in});
    const int64_t size = size_of(dtype), blocks = layout.blocks();
    const AtTheEnd of_x(static_cast<size_t>(n * in * size)), of_dy(static_cast<size_t>(n * out * size)),
        of_w(static_cast<size_t>(blocks * b * b * size)), of_dw(static_cast<size_t>(blocks * b * b * size));
    const auto matrix = [&](const AtTheEnd& memory, int64_t features) {
      Tensor t(memory.data(), dtype, {n, features});
      if (first) t.stride = {1, n};
      return t;
    };
    const Tensor x = matrix(of_x, in), dy = matrix(of_dy, out);
    const Tensor w(of_w.data(), dtype, {blocks, b, b}), dw(of_dw.data(), dtype, {blocks, b, b});
    std::vector<char> scratch(1 << 21);
    const Workspace workspace{scratch.data(), scratch.size()};
    const AtTheEnd of_y(static_cast<size_t>(n * out * size)), of_dx(static_cast<size_t>(n * in * size));
    EXPECT_TRUE(linear_fprop(layout, x, w, {}, matrix(of_y, out), workspace).ok());
    EXPECT_TRUE(linear_dgrad(layout, dy, w, matrix(of_dx, in), workspace).ok());
    const GradPair pair{x, dy};
    EXPECT_TRUE(linear_wgrad(layout, {&pair, 1}, {}, Accumulate::no, dw, workspace).ok());
  };
  const BlockCoordinates few{8, 6, {0, 7}, {0, 5}}, many = *graphs::dense(5, 6);
  for (const std::string& isa : cpu_isas()) {
    ASSERT_TRUE(set_cpu_isa(isa).ok());
    for (const DType dtype : {DType::f32, DType::bf16}) {
      for (const int64_t n : {1, 3, 5, 40}) {
        for (const bool first : {false, true}) {
          for (const int64_t missing : {1, 2, 5}) {
            run(few, 8, dtype, n, missing, first);
            run(few, 32, dtype, n, missing, first);
            run(many, 8, dtype, n, missing, first);
            run(many, 32, dtype, n, missing, first);
          }
        }
      }
    }
  }
  ASSERT_TRUE(set_cpu_isa("").ok());
}
#endif

std::vector<char> bytes_of(const Tensor& t) {
  int64_t count = size_of(t.dtype);
  for (int i = 0; i < t.rank; ++i) count *= t.shape[static_cast<size_t>(i)];
  const char* data = static_cast<const char*>(t.data);
  return {data, data + count};
}

TEST(Linear, BitsDependNeitherOnTheRunNorOnTheThreads) {
  for (const char* line :
       {"linear:fprop f32 n=100 b=8 ba(120,4) gates bias act=gelu", "linear:dgrad bf16 n=70 b=16 ba(80,4)",
        "linear:wgrad f32 n=1500 b=8 random(20,20,0.3) dgates", "linear:wgrad bf16 n=1500 b=8 random(20,20,0.3)",
        "linear:wgrad f32 n=600 b=8 random(60,60,1) in=477 accumulate"}) {
    LinearCase c = *parse_linear_case(line);
    std::vector<char> first;
    for (int64_t threads : {1, 2, 5, 1}) {
      c.threads = threads;
      auto data = LinearData::make(c);
      ASSERT_TRUE(data->run().ok());
      if (first.empty()) first = bytes_of(data->output());
      EXPECT_EQ(bytes_of(data->output()), first) << line << " threads=" << threads;
    }
  }
}

TEST(Linear, ThreadsMayShareALayout) {
  Call shared;
  std::vector<std::thread> users;
  std::vector<int> failures(4, 0);
  for (size_t i = 0; i < failures.size(); ++i) {
    users.emplace_back([&, i] {
      Call mine;
      mine.layout = shared.layout;
      for (int repeat = 0; repeat < 200; ++repeat) {
        failures[i] += !mine.fprop().ok() || !mine.dgrad().ok() || !mine.wgrad().ok();
      }
      failures[i] += bytes_of(mine.y) != [&] {
        Call alone;
        (void)alone.fprop();
        return bytes_of(alone.y);
      }();
    });
  }
  for (std::thread& user : users) user.join();
  EXPECT_EQ(failures, std::vector<int>(4, 0));
}

TEST(Problem, LinesAreReadAndWritten) {
  const char* full =
      "linear:wgrad bf16 n=33 b=16 random(4,6,0.5) seed=3 threads=2 out=60 in=90 empty_row=1 empty_col=2 t x=first "
      "y=first "
      "pad=3 offset=1 gates pairs=4 accumulate dw=f32 dgates tf32 values=int";
  EXPECT_EQ(to_string(*parse_linear_case(full)), full);
  EXPECT_EQ(to_string(*parse_linear_case("linear:fprop random( 8, 0.5 )  act=gelu bias")),
            "linear:fprop f32 n=64 b=32 random(8,0.5) bias act=gelu");
  for (const char* bad :
       {"", "linear", "linear:sideways f32 ba(4,2)", "conv:fprop f32 ba(4,2)", "linear:fprop f32",
        "linear:fprop ba(4,2", "linear:fprop ba(4,2) n=x", "linear:fprop ba(4,2) frobnicate",
        "linear:fprop ba(4,2) x=up", "linear:fprop ba(4,2) act=tanh", "linear:fprop ba(4,2) n=-1",
        "linear:dgrad ba(4,2) bias", "linear:wgrad ba(4,2) act=relu", "linear:dgrad ba(4,2) residual",
        "linear:fprop ba(4,2) pairs=2", "linear:dgrad ba(4,2) dgates", "linear:fprop ba(4,2) dw=f32"}) {
    EXPECT_FALSE(parse_linear_case(bad).ok()) << bad;
  }
}

}  // namespace
}  // namespace blocksparse::linear
