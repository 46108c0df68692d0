#include "ops/lstm/problem.h"

#include <algorithm>
#include <cmath>
#include <functional>

#include "blocksparse/blocksparse.h"
#include "core/convert.h"
#include "core/problem.h"
#include "core/random.h"
#include "core/text.h"
#include "gemm/problem_data.h"
#include "ops/lstm/lstm.h"

namespace blocksparse::lstm {

namespace {

using gemm::kPoison;

// The words of a case, for reading and writing.
struct Words {
  std::vector<std::pair<std::string_view, int64_t LstmCase::*>> numbers = {
      {"t", &LstmCase::t},
      {"n", &LstmCase::n},
      {"b", &LstmCase::block},
      {"seed", &LstmCase::seed},
      {"threads", &LstmCase::threads},
  };
  std::vector<std::pair<std::string_view, bool LstmCase::*>> flags = {
      {"h0", &LstmCase::h0},           {"c0", &LstmCase::c0},
      {"lengths", &LstmCase::lengths}, {"sorted", &LstmCase::sorted},
      {"keep", &LstmCase::keep},       {"final", &LstmCase::final},
      {"dh0", &LstmCase::dh0},         {"dc0", &LstmCase::dc0},
      {"dw", &LstmCase::dw},           {"accumulate", &LstmCase::accumulate},
      {"wide", &LstmCase::wide},       {"odd", &LstmCase::odd},
  };
};

Status set_option(LstmCase& c, const ProblemLine::Option& option) {
  const Words words;
  if (option.key == "device" && (option.value == "cuda" || option.value == "cpu")) {
    c.device.type = option.value == "cuda" ? DeviceType::cuda : DeviceType::cpu;
    return {};
  }
  for (const auto& [name, member] : words.numbers) {
    if (option.key != name) continue;
    const auto number = parse_integer(option.key, option.value);
    if (!number.ok()) return number.status();
    c.*member = *number;
    return {};
  }
  for (const auto& [name, member] : words.flags) {
    if (option.key != name || !option.value.empty()) continue;
    c.*member = true;
    return {};
  }
  return invalid("[problem] \"", option.key, "\" means nothing to the lstm op");
}

double uniform(Random& rng) { return 2 * rng.uniform() - 1; }

}  // namespace

Result<LstmCase> parse_lstm_case(std::string_view line) {
  const auto words = parse_problem_line(line);
  if (!words.ok()) return words.status();
  if (words->op != "lstm" || (words->pass != "forward" && words->pass != "backward")) {
    return invalid("[problem] \"", line, "\" needs to begin with lstm:forward or lstm:backward");
  }
  LstmCase c;
  c.backward = words->pass == "backward";
  c.graph = words->graph;
  if (!words->dtype.empty()) c.dtype = *parse_dtype(words->dtype);
  for (const ProblemLine::Option& option : words->options) BS_RETURN_IF_ERROR(set_option(c, option));
  return c;
}

std::string to_string(const LstmCase& c) {
  std::string line = concat("lstm:", c.backward ? "backward" : "forward", " ", name_of(c.dtype), " ", c.graph);
  const Words words;
  for (const auto& [name, member] : words.numbers) line += concat(" ", name, "=", c.*member);
  for (const auto& [name, member] : words.flags) line += c.*member ? concat(" ", name) : "";
  if (c.device.type == DeviceType::cuda) line += " device=cuda";
  return line;
}

Tensor LstmData::Buffer::tensor() {
  Tensor t;
  if (shape.empty()) return t;
  t = Tensor(data(), dtype, {elements});
  if (device != nullptr) {
    t.data = static_cast<char*>(device.get()) + shift + kGuard;
    t.device = {DeviceType::cuda, 0};
  }
  t.rank = static_cast<int32_t>(shape.size());
  int64_t step = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    t.shape[i] = shape[i];
    t.stride[i] = step;
    step *= shape[i];
  }
  return t;
}

LstmData::Buffer& LstmData::add(const char* name, bool wanted, DType dtype, std::vector<int64_t> shape, bool output) {
  Buffer& b = buffers_[name];
  b.dtype = dtype;
  b.output = output;
  b.summed = std::string_view(name) == "dw";
  if (!wanted) return b;
  b.shape = std::move(shape);
  b.elements = 1;
  for (const int64_t size : b.shape) b.elements *= size;
  b.bytes.assign(static_cast<size_t>(b.elements * size_of(dtype) + 2 * kGuard), kPoison);
  return b;
}

Result<LstmData> LstmData::make(const LstmCase& c) {
  auto layout = Layout::from_graph(c.graph, {.block_size = static_cast<int32_t>(c.block)}, c.seed);
  if (!layout.ok()) return layout.status();
  if (layout->out_features() == layout->in_features()) layout = layout->stack(kGates);
  if (!layout.ok()) return layout.status();
  LstmData data(c, *layout);
  data.make_data();
  data.view_ = data.layout_;
  if (c.device.type == DeviceType::cuda) BS_RETURN_IF_ERROR(data.move_to_device());
  return data;
}

void LstmData::make_data() {
  Random rng(static_cast<uint64_t>(case_.seed) + 7);
  const LstmCase& c = case_;
  const int64_t hidden = layout_.in_features(), b = c.block;
  const DType state = sum_dtype(c.dtype);
  auto fill = [&](Buffer& buffer, const std::function<double(int64_t)>& value) {
    for (int64_t i = 0; i < buffer.elements; ++i) store_element(buffer.data(), i, buffer.dtype, value(i));
  };
  auto random = [&](const char* name, bool wanted, DType dtype, std::vector<int64_t> shape) {
    fill(add(name, wanted, dtype, std::move(shape), false), [&](int64_t) { return uniform(rng); });
  };
  if (c.lengths || c.sorted) {
    for (int64_t i = 0; i < c.n; ++i) lengths_.push_back(i == 1 ? 0 : i == 2 ? c.t : rng.below(c.t + 1));
    if (c.sorted) std::sort(lengths_.rbegin(), lengths_.rend());
  }
  // Rows of |W| sum to about 1, so that errors do not grow exponentially.
  const double degree =
      static_cast<double>(layout_.blocks()) / static_cast<double>(std::max<int64_t>(1, layout_.out_blocks()));
  const double scale = 2 / std::max(1.0, degree * static_cast<double>(b));
  fill(add("w", true, c.dtype, {layout_.blocks(), b, b}, false), [&](int64_t) { return scale * uniform(rng); });
  random("h0", c.h0, c.dtype, {c.n, hidden});
  random("c0", c.c0, state, {c.n, hidden});
  random("pre", true, c.dtype, {c.t, c.n, kGates, hidden});
  add("y", true, c.dtype, {c.t, c.n, hidden}, true);
  add("gates", c.keep || c.backward, c.dtype, {c.t, c.n, kGates, hidden}, true);
  add("cells", c.keep || c.backward, state, {c.t, c.n, hidden}, true);
  add("h", c.final && !c.backward, c.dtype, {c.n, hidden}, true);
  add("c", c.final && !c.backward, state, {c.n, hidden}, true);
  if (!c.backward) return;
  Forward f;  // backward gets the results of the reference
  f.dtype = c.dtype;
  f.layout = layout_.view();
  f.steps = c.t;
  f.n = c.n;
  f.hidden = hidden;
  f.lengths = lengths_.empty() ? nullptr : lengths_.data();
  auto pointer = [&](const char* name) -> void* {
    return buffers_[name].shape.empty() ? nullptr : static_cast<void*>(buffers_[name].data());
  };
  f.w = pointer("w");
  f.h0 = pointer("h0");
  f.c0 = pointer("c0");
  f.pre = pointer("pre");
  f.y = pointer("y");
  f.gates = pointer("gates");
  f.cells = pointer("cells");
  reference_forward(f);
  for (const char* name : {"y", "gates", "cells"}) buffers_[name].output = false;
  random("dy", c.t % 2 == 1 || !c.final, c.dtype, {c.t, c.n, hidden});
  random("dh", c.final, c.dtype, {c.n, hidden});
  random("dc", c.final, state, {c.n, hidden});
  add("dpre", true, c.dtype, {c.t, c.n, kGates, hidden}, true);
  add("dh0", c.dh0, c.dtype, {c.n, hidden}, true);
  add("dc0", c.dc0, state, {c.n, hidden}, true);
  add("dw", c.dw, c.wide ? state : c.dtype, {layout_.blocks(), b, b}, true);
}

// The case in f64, where the reference writes what is expected.
LstmData::Buffers LstmData::make_wide() const {
  Buffers wide;
  for (const auto& [name, b] : buffers_) {
    Buffer& w = wide[name] = b;
    w.dtype = DType::f64;
    w.device = nullptr;
    w.bytes.assign(static_cast<size_t>(b.elements * 8 + 2 * kGuard), kPoison);
    for (int64_t i = 0; i < b.elements && !b.shape.empty(); ++i) {
      const double value = b.output ? (b.summed ? 0.5 * static_cast<double>(i % 3) : 0)
                                    : load_element(b.bytes.data() + kGuard, i, b.dtype);
      store_element(w.data(), i, DType::f64, value);
    }
  }
  return wide;
}

// The rounding errors of a step are those of stored values (z, h, gates) and of k sums. With this |W| they add up over
// the steps at most. dW also sums the products of all tokens.
double LstmData::bound(const Buffer& got, double largest) const {
  const double steps = static_cast<double>(case_.t) + 1, k = static_cast<double>(layout_.in_features());
  const double of_sums = gemm::sum_epsilon(case_.dtype, case_.device) * (k + 32);  // exp and tanh: a few ulp
  const double step = gemm::epsilon(case_.dtype) + of_sums;
  double scale = std::max(largest, 1.0);
  if (got.summed) scale = largest + static_cast<double>(case_.n) * steps;
  return step * steps * scale;
}

LstmData::Error LstmData::compare() {
  if (!expected_) {
    expected_ = make_wide();
    const std::string isa = *cpu_isa();
    Status status = set_cpu_isa("reference");
    const auto size = case_.backward ? lstm_backward_workspace_size : lstm_forward_workspace_size;
    std::vector<char> workspace(size({layout_, DType::f64, case_.t, case_.n}, {}));
    const int64_t* lengths = lengths_.empty() ? nullptr : lengths_.data();
    if (status.ok()) status = call(*expected_, layout_, lengths, {workspace.data(), workspace.size()}, nullptr);
    if (!status.ok() || !set_cpu_isa(isa).ok()) return {INFINITY, status.message()};
  }
  Error error;
  for (auto& [name, b] : buffers_) {
    if (!b.output || b.shape.empty()) continue;
    Buffer& want = expected_->at(name);
    double largest = 0;
    for (int64_t i = 0; i < b.elements; ++i)
      largest = std::max(largest, std::abs(load_element(want.data(), i, DType::f64)));
    const double most = bound(b, largest);
    for (int64_t i = 0; i < b.elements; ++i) {
      const double got = load_element(b.data(), i, b.dtype), expected = load_element(want.data(), i, DType::f64);
      const double ratio = got == expected ? 0 : std::abs(got - expected) / most;
      if (ratio <= error.worst) continue;
      error.worst = std::isnan(ratio) ? INFINITY : ratio;
      error.where = concat(name, "[", i, "] is ", got, ", expected ", expected, ", bound ", most);
    }
  }
  return error;
}

}  // namespace blocksparse::lstm
