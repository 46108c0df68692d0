// The layer norm against its equations in f64, on the CPU and on a card, and what its edge refuses.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "blocksparse/blocksparse.h"
#include "blocksparse/norm.h"
#include "core/convert.h"
#include "core/random.h"
#include "cuda/memory.h"
#include "ops/norm/norm.h"

namespace blocksparse {

using namespace norm;  // NOLINT(google-build-using-namespace)

namespace {

constexpr double kEpsilon = 1e-6;
constexpr Device kCard{DeviceType::cuda, 0};

struct Case {
  int64_t n, groups, features;
  DType dtype;
  bool factor = false, term = false, relu = false, odd = false;  // odd: rows begin at odd elements
};

std::string line_of(const Case& c) {
  return std::to_string(c.n) + " x " + std::to_string(c.groups) + " x " + std::to_string(c.features) + " " +
         std::string(name_of(c.dtype)) + (c.factor ? " factor" : "") + (c.term ? " term" : "") +
         (c.relu ? " relu" : "") + (c.odd ? " odd" : "");
}

constexpr std::ptrdiff_t kGuard = 256;  // bytes behind a tensor, which nobody may write

// A tensor on the host, and its copy where the case runs. It is NaN until something is written, and so is the guard
// behind it.
struct Buffer {
  DType dtype = DType::f32;
  std::vector<char> bytes;
  std::shared_ptr<void> memory;
  Tensor tensor;

  Buffer() = default;
  Buffer(DType dtype, std::initializer_list<int64_t> shape, Device device, bool odd) : dtype(dtype) {
    int64_t count = 1;
    for (const int64_t size : shape) count *= size;
    const auto size = static_cast<size_t>(size_of(dtype)), shift = odd ? size : 0;
    bytes.assign(static_cast<size_t>(count) * size + kGuard, static_cast<char>(-1));
    if (device.type == DeviceType::cuda) memory = *cuda::allocate(device, bytes.size() + size);
    else memory = std::shared_ptr<void>(new char[bytes.size() + size], [](void* p) { delete[] static_cast<char*>(p); });
    tensor = Tensor(static_cast<char*>(memory.get()) + shift, dtype, shape, device);
    send();
  }
  double at(int64_t i) const { return load_element(bytes.data(), i, dtype); }
  int64_t count() const { return (static_cast<int64_t>(bytes.size()) - kGuard) / size_of(dtype); }
  void send() const {
    if (tensor.device.type == DeviceType::cpu) std::copy(bytes.begin(), bytes.end(), static_cast<char*>(tensor.data));
    else ASSERT_TRUE(cuda::copy_to_device(tensor.device, tensor.data, bytes.data(), bytes.size()).ok());
  }
  void fetch(const std::string& name) {
    if (tensor.device.type == DeviceType::cpu) {
      std::copy_n(static_cast<const char*>(tensor.data), bytes.size(), bytes.begin());
    } else {
      ASSERT_TRUE(cuda::copy_to_host(tensor.device, bytes.data(), tensor.data, bytes.size()).ok());
    }
    EXPECT_EQ(std::count(bytes.end() - kGuard, bytes.end(), static_cast<char>(-1)), kGuard)
        << "written behind " << name;
  }
};

// The rounding of a result of that dtype, and of a few operations on numbers up to `size`.
double bound_of(DType dtype, const Case& c, double expected, double size) {
  const auto roundoff = [](DType of) {
    switch (of) {
      case DType::f64: return 0x1p-53;
      case DType::f32: return 0x1p-24;
      case DType::f16: return 0x1p-11;
      case DType::bf16: return 0x1p-8;
    }
    return 1.0;
  };
  const double sums = roundoff(sum_dtype(c.dtype)) * (32 + static_cast<double>(c.features) / 16);
  return roundoff(dtype) * (std::abs(expected) + 1e-4) + sums * (size + 1);
}

// Both passes of a case, and the results that they should give.
class Norm {
 public:
  Norm(const Case& c, Device device) : c_(c) {
    Random rng(7);
    const DType sums = sum_dtype(c.dtype);
    const auto add = [&](const char* name, DType dtype, std::initializer_list<int64_t> shape, bool input) {
      Buffer& b = b_[name] = Buffer(dtype, shape, device, c.odd);
      for (int64_t i = 0; input && i < b.count(); ++i) store_element(b.bytes.data(), i, dtype, 2 * rng.uniform() - 0.7);
      b.send();
    };
    for (const char* name : {"x", "factor", "term", "dy"}) add(name, c.dtype, {c.n, c.groups, c.features}, true);
    for (const char* name : {"y", "dx", "dfactor", "dterm"}) add(name, c.dtype, {c.n, c.groups, c.features}, false);
    for (const char* name : {"gain", "shift"}) add(name, sums, {c.groups, c.features}, true);
    for (const char* name : {"dgain", "dshift"}) add(name, sums, {c.groups, c.features}, false);
    add("stats", sums, {c.n, c.groups, 2}, false);
  }

  void run() {
    const auto t = [&](const char* name) { return b_[name].tensor; };
    const Tensor factor = c_.factor ? t("factor") : Tensor(), term = c_.term ? t("term") : Tensor();
    Status status = layer_norm_forward({.x = t("x"),
                                        .gain = t("gain"),
                                        .shift = t("shift"),
                                        .factor = factor,
                                        .term = term,
                                        .relu = c_.relu,
                                        .epsilon = kEpsilon},
                                       {t("y"), t("stats")});
    ASSERT_TRUE(status.ok()) << status.message();
    status = layer_norm_backward({.x = t("x"),
                                  .gain = t("gain"),
                                  .shift = t("shift"),
                                  .factor = factor,
                                  .y = t("y"),
                                  .stats = t("stats"),
                                  .relu = c_.relu},
                                 t("dy"),
                                 {.x = t("dx"),
                                  .gain = t("dgain"),
                                  .shift = t("dshift"),
                                  .factor = c_.factor ? t("dfactor") : Tensor(),
                                  .term = c_.term ? t("dterm") : Tensor()});
    ASSERT_TRUE(status.ok()) << status.message();
    for (auto& [name, b] : b_) b.fetch(name);
  }

  void expect_right() const {
    const int64_t h = c_.features;
    std::vector<double> dgain(static_cast<size_t>(c_.groups * h)), dshift(dgain);
    for (int64_t row = 0; row < c_.n * c_.groups; ++row) {
      double mean = 0, variance = 0, first = 0, second = 0;
      for (int64_t i = 0; i < h; ++i) mean += at("x", row * h + i) / static_cast<double>(h);
      for (int64_t i = 0; i < h; ++i) variance += std::pow(at("x", row * h + i) - mean, 2) / static_cast<double>(h);
      const double scale = 1 / std::sqrt(variance + kEpsilon);
      std::vector<double> scaled, normed;
      for (int64_t i = 0; i < h; ++i) {
        const int64_t e = row * h + i, column = row % c_.groups * h + i;
        const double n = (at("x", e) - mean) * scale, affine = n * at("gain", column) + at("shift", column);
        const double factor = c_.factor ? at("factor", e) : 1;
        const double z = affine * factor + (c_.term ? at("term", e) : 0);
        near("y", e, c_.relu ? std::max(z, 0.0) : z, std::abs(z) + std::abs(affine));
        const double g = c_.relu && at("y", e) <= 0 ? 0 : at("dy", e);
        if (c_.term) near("dterm", e, g, 1);
        if (c_.factor) near("dfactor", e, g * affine, std::abs(affine) + 1);
        dgain[static_cast<size_t>(column)] += g * factor * n;
        dshift[static_cast<size_t>(column)] += g * factor;
        normed.push_back(n);
        scaled.push_back(g * factor * at("gain", column));
        first += scaled.back() / static_cast<double>(h);
        second += scaled.back() * n / static_cast<double>(h);
      }
      for (int64_t i = 0; i < h; ++i) {
        const auto k = static_cast<size_t>(i);
        near("dx", row * h + i, scale * (scaled[k] - first - normed[k] * second), scale * (3 + std::abs(normed[k])));
      }
    }
    for (size_t i = 0; i < dgain.size(); ++i) {
      near("dgain", static_cast<int64_t>(i), dgain[i], 4 * static_cast<double>(c_.n));
      near("dshift", static_cast<int64_t>(i), dshift[i], 4 * static_cast<double>(c_.n));
    }
  }
  std::vector<char> bits() const {
    std::vector<char> all;
    for (const char* name : {"y", "stats", "dx", "dgain", "dshift"}) {
      all.insert(all.end(), b_.at(name).bytes.begin(), b_.at(name).bytes.end());
    }
    return all;
  }

 private:
  double at(const char* name, int64_t i) const { return b_.at(name).at(i); }
  void near(const char* name, int64_t i, double expected, double size) const {
    const double bound = bound_of(b_.at(name).dtype, c_, expected, size);
    ASSERT_NEAR(at(name, i), expected, bound) << name << "[" << i << "] of " << line_of(c_);
  }

  Case c_;
  std::map<std::string, Buffer> b_;
};

constexpr Case kCases[] = {
    {.n = 0, .groups = 1, .features = 8, .dtype = DType::f32},
    {.n = 1, .groups = 1, .features = 1, .dtype = DType::f32, .factor = true, .term = true},
    {.n = 5, .groups = 1, .features = 48, .dtype = DType::f64, .factor = true, .term = true, .relu = true},
    {.n = 7, .groups = 4, .features = 37, .dtype = DType::f32, .term = true, .relu = true},
    {.n = 3, .groups = 1, .features = 1001, .dtype = DType::bf16, .factor = true},
    {.n = 33, .groups = 4, .features = 64, .dtype = DType::bf16},
    {.n = 40, .groups = 1, .features = 1120, .dtype = DType::bf16, .factor = true, .term = true, .relu = true},
    {.n = 9, .groups = 2, .features = 5600, .dtype = DType::f16, .term = true, .relu = true},
    {.n = 6, .groups = 4, .features = 5600, .dtype = DType::bf16},
    {.n = 3, .groups = 1, .features = 20000, .dtype = DType::bf16, .factor = true, .term = true, .relu = true},
    {.n = 2, .groups = 1, .features = 9000, .dtype = DType::f64, .relu = true},
    {.n = 1100, .groups = 2, .features = 72, .dtype = DType::bf16, .factor = true, .relu = true},
    {.n = 261, .groups = 1, .features = 18432, .dtype = DType::bf16, .factor = true, .term = true},
    {.n = 11, .groups = 1, .features = 9232, .dtype = DType::f16, .term = true, .relu = true},
    {.n = 2, .groups = 1, .features = 40000, .dtype = DType::bf16},
    {.n = 3, .groups = 1, .features = 12345, .dtype = DType::f32, .factor = true},
    {.n = 19, .groups = 1, .features = 96, .dtype = DType::f16, .factor = true, .relu = true, .odd = true},
};

void expect_right_on(Device device) {
  for (const Case& c : kCases) {
    SCOPED_TRACE(line_of(c));
    Norm norm(c, device);
    norm.run();
    norm.expect_right();
    const auto first = norm.bits();
    norm.run();
    EXPECT_EQ(first, norm.bits());
  }
}

TEST(Norm, MatchesItsEquations) { expect_right_on({}); }

TEST(NormCuda, MatchesItsEquations) {
  if (const Status status = cuda_status(); !status.ok()) GTEST_SKIP() << status.message();
  expect_right_on({DeviceType::cuda, 0});
}

// The norm of four gates with the cell, and the results that it should give.
class NormCell {
 public:
  explicit NormCell(const Case& c) : c_(c) {
    Random rng(8);
    const DType sums = sum_dtype(c.dtype);
    const auto add = [&](const char* name, DType dtype, std::initializer_list<int64_t> shape, bool input) {
      Buffer& b = b_[name] = Buffer(dtype, shape, kCard, c.odd);
      for (int64_t i = 0; input && i < b.count(); ++i) store_element(b.bytes.data(), i, dtype, 2 * rng.uniform() - 0.7);
      b.send();
    };
    add("z", c.dtype, {c.n, 4, c.features}, true);
    for (const char* name : {"gain", "shift"}) add(name, sums, {4, c.features}, true);
    add("c0", sums, {c.n, c.features}, true);
    for (const char* name : {"h", "h_end"}) add(name, c.dtype, {c.n, c.features}, false);
    for (const char* name : {"c", "c_end"}) add(name, sums, {c.n, c.features}, false);
    add("gates", c.dtype, {c.n, 4, c.features}, false);
    add("stats", sums, {c.n, 4, 2}, false);
  }
  void run(bool save) {
    const auto at = [&](const char* name) { return b_[name].tensor.data; };
    const CellForward f{.dtype = c_.dtype,
                        .n = c_.n,
                        .features = c_.features,
                        .epsilon = kEpsilon,
                        .z = at("z"),
                        .gain = at("gain"),
                        .shift = at("shift"),
                        .c_before = at("c0"),
                        .h = at("h"),
                        .c = at("c"),
                        .gates = save ? at("gates") : nullptr,
                        .stats = at("stats"),
                        .h_end = save ? at("h_end") : nullptr,
                        .c_end = save ? at("c_end") : nullptr};
    const Status status = cuda_cell_forward(f, kCard, {});
    ASSERT_TRUE(status.ok()) << status.message();
    for (auto& [name, b] : b_) b.fetch(name);
  }
  void expect_right() const {
    const int64_t h = c_.features;
    const auto logistic = [](double x) { return 1 / (1 + std::exp(-x)); };
    for (int64_t token = 0; token < c_.n; ++token) {
      double mean[4] = {}, scale[4];
      for (int64_t g = 0; g < 4; ++g) {
        const int64_t row = (token * 4 + g) * h;
        double variance = 0;
        for (int64_t i = 0; i < h; ++i) mean[g] += at("z", row + i) / static_cast<double>(h);
        for (int64_t i = 0; i < h; ++i) variance += std::pow(at("z", row + i) - mean[g], 2) / static_cast<double>(h);
        scale[g] = 1 / std::sqrt(variance + kEpsilon);
        near("stats", (token * 4 + g) * 2, mean[g], 1);
        near("stats", (token * 4 + g) * 2 + 1, scale[g], scale[g]);
      }
      for (int64_t i = 0; i < h; ++i) {
        double unit[4];
        for (int64_t g = 0; g < 4; ++g) {
          const int64_t column = g * h + i, e = token * 4 * h + column;
          unit[g] = (at("z", e) - mean[g]) * scale[g] * at("gain", column) + at("shift", column);
          unit[g] = g == 2 ? std::tanh(unit[g]) : logistic(unit[g]);
          near("gates", e, unit[g], 8);
        }
        const double cell = unit[1] * at("c0", token * h + i) + unit[0] * unit[2];
        for (const char* name : {"c", "c_end"}) near(name, token * h + i, cell, 8);
        for (const char* name : {"h", "h_end"}) near(name, token * h + i, unit[3] * std::tanh(cell), 8);
      }
    }
  }
  std::vector<char> bits(std::initializer_list<const char*> names) const {
    std::vector<char> all;
    for (const char* name : names) all.insert(all.end(), b_.at(name).bytes.begin(), b_.at(name).bytes.end());
    return all;
  }

 private:
  double at(const char* name, int64_t i) const { return b_.at(name).at(i); }
  void near(const char* name, int64_t i, double expected, double size) const {
    const double bound = bound_of(b_.at(name).dtype, c_, expected, size);
    ASSERT_NEAR(at(name, i), expected, bound) << name << "[" << i << "] of " << line_of(c_);
  }

  Case c_;
  std::map<std::string, Buffer> b_;
};

constexpr Case kCells[] = {
    {.n = 0, .groups = 4, .features = 8, .dtype = DType::f32},
    {.n = 5, .groups = 4, .features = 40, .dtype = DType::f64},
    {.n = 3, .groups = 4, .features = 1001, .dtype = DType::f32},
    {.n = 9, .groups = 4, .features = 37, .dtype = DType::bf16},
    {.n = 6, .groups = 4, .features = 64, .dtype = DType::f16, .odd = true},
    {.n = 1, .groups = 4, .features = 8, .dtype = DType::bf16},
    {.n = 300, .groups = 4, .features = 1120, .dtype = DType::f16},
    {.n = 257, .groups = 4, .features = 5600, .dtype = DType::bf16},
    {.n = 71, .groups = 4, .features = 18432, .dtype = DType::bf16},
    {.n = 130, .groups = 4, .features = 9600, .dtype = DType::f16},
    {.n = 3, .groups = 4, .features = 40000, .dtype = DType::bf16},
    {.n = 2, .groups = 4, .features = 60000, .dtype = DType::bf16},
};

TEST(NormCellCuda, MatchesItsEquations) {
  if (const Status status = cuda_status(); !status.ok()) GTEST_SKIP() << status.message();
  for (const Case& c : kCells) {
    SCOPED_TRACE(line_of(c));
    NormCell cell(c);
    cell.run(true);
    cell.expect_right();
    const auto first = cell.bits({"h", "c", "gates", "stats"}), made = cell.bits({"h", "c"});
    cell.run(true);
    EXPECT_EQ(first, cell.bits({"h", "c", "gates", "stats"}));
    cell.run(false);
    EXPECT_EQ(made, cell.bits({"h", "c"}));
  }
}

void expect_error(const Status& status, std::string_view text) {
  EXPECT_EQ(status.code(), StatusCode::invalid_argument) << status.message();
  EXPECT_NE(status.message().find(text), std::string::npos) << status.message();
}

TEST(Norm, Edge) {
  std::vector<float> memory(200, 1.0f);
  const auto at = [&](size_t offset, std::initializer_list<int64_t> shape) {
    return Tensor(memory.data() + offset, DType::f32, shape);
  };
  const LayerNormInputs in{.x = at(0, {2, 1, 8}), .gain = at(16, {1, 8}), .shift = at(24, {1, 8})};
  const LayerNormOutputs out{at(32, {2, 1, 8}), at(48, {2, 1, 2})};
  EXPECT_TRUE(layer_norm_forward(in, out).ok());
  LayerNormInputs wrong = in;
  wrong.x = at(0, {2, 8});
  expect_error(layer_norm_forward(wrong, out), "[layer_norm_forward] x is [2, 8], needs [n, groups, H]");
  wrong = in;
  wrong.gain = {};
  expect_error(layer_norm_forward(wrong, out), "gain is not given");
  wrong = in;
  wrong.gain.dtype = DType::bf16;
  expect_error(layer_norm_forward(wrong, out), "gain is bf16, needs f32");
  wrong = in;
  wrong.term = at(64, {2, 8});
  expect_error(layer_norm_forward(wrong, out), "term is [2, 8], needs [2, 1, 8]");
  wrong = in;
  wrong.epsilon = 0;
  expect_error(layer_norm_forward(wrong, out), "epsilon is 0, needs a positive number");
  wrong.epsilon = INFINITY;
  expect_error(layer_norm_forward(wrong, out), "epsilon is inf, needs a positive number");
  wrong = in;
  wrong.x = at(0, {int64_t{1} << 31, 1024, 8});
  expect_error(layer_norm_forward(wrong, out), "x is [2147483648, 1024, 8], too large");
  expect_error(layer_norm_forward(in, {at(8, {2, 1, 8}), out.stats}), "y overlaps x");
  const LayerNormSaved saved{.x = in.x, .gain = in.gain, .shift = {}, .factor = {}, .y = {}, .stats = out.stats};
  const Tensor dy = at(64, {2, 1, 8}), dx = at(80, {2, 1, 8});
  EXPECT_TRUE(layer_norm_backward(saved, dy, {.x = dx}).ok());
  expect_error(layer_norm_backward(saved, dy, {}), "[layer_norm_backward] dx is not given");
  EXPECT_TRUE(layer_norm_backward(saved, dy, {.gain = at(96, {1, 8}), .shift = at(104, {1, 8})}).ok());
  expect_error(layer_norm_backward(saved, dy, {.x = dx, .gain = at(96, {1, 8})}), "dshift is not given");
  expect_error(layer_norm_backward(saved, dy, {.x = dx, .shift = at(96, {1, 8})}), "dgain is not given");
  expect_error(layer_norm_backward(saved, dy, {.x = dx, .factor = at(104, {2, 1, 8})}), "shift is not given");
  LayerNormSaved with_shift = saved;
  with_shift.shift = in.shift;
  expect_error(layer_norm_backward(with_shift, dy, {.x = dx, .factor = at(104, {2, 1, 8})}), "factor is not given");
  LayerNormSaved with_relu = saved;
  with_relu.relu = true;
  expect_error(layer_norm_backward(with_relu, dy, {.x = dx}), "y is not given");
}

}  // namespace
}  // namespace blocksparse
