// What the linear op promises: what it reads, determinism, sharing. And its one-line problems.
#include <gtest/gtest.h>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "blocksparse/blocksparse.h"
#include "core/ceil_div.h"
#include "cpu/isa.h"
#include "ops/linear/problem.h"
#include "ops/linear/test_call.h"

namespace blocksparse::linear {
namespace {

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

// Ragged features in either order, with few blocks and with many: a read of the last whole block would reach beyond x
// or dy.
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
