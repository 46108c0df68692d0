// Reads and writes the line of a convolution.
#include "ops/conv/problem.h"

#include <algorithm>

#include "core/problem.h"
#include "core/text.h"
#include "ops/conv/geometry.h"

namespace blocksparse::conv {

namespace {

constexpr std::string_view kActivations[] = {"none", "relu", "gelu", "silu", "gelu_tanh"};

// Parses "3", which is for all axes, or "1x2x3". `count` becomes how many numbers there were.
Result<SpatialSizes> parse_sizes(std::string_view key, std::string_view value, int32_t& count) {
  SpatialSizes sizes = {};
  count = 0;
  while (count < kMaxSizes) {
    const size_t end = std::min(value.find('x'), value.size());
    const auto number = parse_integer(key, value.substr(0, end));
    if (!number.ok()) return number.status();
    sizes[static_cast<size_t>(count++)] = *number;
    if (end == value.size()) break;
    value.remove_prefix(end + 1);
    if (count == kMaxSizes) return invalid("[problem] ", key, " has more than ", kMaxSizes, " numbers");
  }
  if (count == 1) sizes.fill(sizes[0]);
  return sizes;
}

// Which options were given.
struct Given {
  bool pad = false, after = false;
};

Status set_option(ConvCase& c, Given& given, const ProblemLine::Option& option) {
  const auto& [key, value] = option;
  const std::pair<std::string_view, int64_t*> numbers[] = {{"n", &c.n},           {"b", &c.block},
                                                           {"seed", &c.seed},     {"threads", &c.threads},
                                                           {"c", &c.in_channels}, {"k", &c.out_channels}};
  for (const auto& [name, target] : numbers) {
    if (key != name) continue;
    const auto number = parse_integer(key, value);
    if (!number.ok()) return number.status();
    *target = *number;
    return {};
  }
  ConvGeometry& g = c.geometry;
  const std::pair<std::string_view, SpatialSizes*> sizes[] = {{"hw", &c.size},
                                                              {"r", &g.kernel},
                                                              {"stride", &g.stride},
                                                              {"dil", &g.dilation},
                                                              {"pad", &g.padding_before},
                                                              {"after", &g.padding_after},
                                                              {"opad", &g.output_padding}};
  for (const auto& [name, target] : sizes) {
    if (key != name) continue;
    int32_t count = 0;
    const auto parsed = parse_sizes(key, value, count);
    if (!parsed.ok()) return parsed.status();
    *target = *parsed;
    if (key == "hw" && count > 1) g.rank = count;
    given.pad = given.pad || key == "pad";
    given.after = given.after || key == "after";
    return {};
  }
  const std::pair<std::string_view, bool*> flags[] = {
      {"t", &c.transposed},      {"transposed", &g.transposed}, {"order", &c.order},           {"bias", &c.bias},
      {"residual", &c.residual}, {"gates", &c.gates},           {"accumulate", &c.accumulate}, {"dgates", &c.dgates},
      {"tf32", &c.tf32}};
  for (const auto& [name, target] : flags) {
    if (key != name || !value.empty()) continue;
    *target = true;
    return {};
  }
  if (key == "first" && value.empty()) {
    c.channels_last = false;
    return {};
  }
  if (key == "dims") {
    const auto number = parse_integer(key, value);
    if (!number.ok()) return number.status();
    g.rank = static_cast<int32_t>(std::clamp<int64_t>(*number, -1, 9));
    return {};
  }
  if (key == "act") {
    const auto* found = std::find(std::begin(kActivations), std::end(kActivations), value);
    if (found == std::end(kActivations))
      return invalid("[problem] act=", value, ": needs none, relu, gelu, silu or gelu_tanh");
    c.activation = static_cast<Activation>(found - std::begin(kActivations));
    return {};
  }
  if (key == "dw") {
    c.dw_dtype = parse_dtype(value);
    return c.dw_dtype ? Status() : invalid("[problem] dw=", value, ": needs a dtype");
  }
  if (key == "values" && (value == "int" || value == "normal")) {
    c.integers = value == "int";
    return {};
  }
  if (key == "device" && (value == "cuda" || value == "cpu")) {
    c.device.type = value == "cuda" ? DeviceType::cuda : DeviceType::cpu;
    return {};
  }
  return invalid("[problem] \"", key, value.empty() ? "" : "=", value, "\" means nothing to the convolution");
}

// The padding with which stride 1 keeps the sizes.
SpatialSizes same_padding(const ConvGeometry& g) {
  SpatialSizes padding = {};
  for (size_t i = 0; i < kMaxSizes; ++i) padding[i] = (g.kernel[i] - 1) * g.dilation[i] / 2;
  return padding;
}

}  // namespace

Result<ConvCase> parse_conv_case(std::string_view line) {
  const auto words = parse_problem_line(line);
  if (!words.ok()) return words.status();
  if (words->op != "conv") return invalid("[problem] there is no op \"", words->op, "\"");
  ConvCase c;
  bool known = false;
  for (Pass pass : {Pass::fprop, Pass::dgrad, Pass::wgrad}) {
    if (words->pass != gemm::name_of(pass)) continue;
    c.pass = pass;
    known = true;
  }
  if (!known) return invalid("[problem] the convolution has no pass \"", words->pass, "\"");
  if (words->graph.empty()) return invalid("[problem] \"", line, "\" names no graph, such as random(8,0.1)");
  c.graph = words->graph;
  if (!words->dtype.empty()) c.dtype = *parse_dtype(words->dtype);
  c.geometry.kernel = {3, 3, 3};
  Given given;
  for (const ProblemLine::Option& option : words->options) BS_RETURN_IF_ERROR(set_option(c, given, option));
  if (c.n < 0 || c.threads < 0) return invalid("[problem] \"", line, "\": n and threads need to be 0 or more");
  if (!given.pad) c.geometry.padding_before = same_padding(c.geometry);
  if (!given.after) c.geometry.padding_after = c.geometry.padding_before;
  return c;
}

std::string to_string(const ConvCase& c) {
  const ConvGeometry& g = c.geometry;
  const auto sizes = [&](const SpatialSizes& values) {
    std::string text;
    for (int32_t i = 0; i < g.rank; ++i) text += concat(i == 0 ? "" : "x", values[static_cast<size_t>(i)]);
    return text;
  };
  std::string line =
      concat("conv:", gemm::name_of(c.pass), " ", blocksparse::name_of(c.dtype), " n=", c.n, " hw=", sizes(c.size),
             g.rank == 1 ? " dims=1" : "", " r=", sizes(g.kernel), " b=", c.block, " ", c.graph);
  auto each = [&](std::string_view key, const SpatialSizes& value, const SpatialSizes& usual) {
    if (!std::equal(value.begin(), value.begin() + g.rank, usual.begin())) line += concat(" ", key, "=", sizes(value));
  };
  auto number = [&](std::string_view key, int64_t value, int64_t usual) {
    if (value != usual) line += concat(" ", key, "=", value);
  };
  auto flag = [&](std::string_view key, bool value) {
    if (value) line += concat(" ", key);
  };
  each("stride", g.stride, {1, 1, 1});
  each("dil", g.dilation, {1, 1, 1});
  each("pad", g.padding_before, same_padding(g));
  each("after", g.padding_after, g.padding_before);
  flag("transposed", g.transposed);
  each("opad", g.output_padding, {});
  number("c", c.in_channels, 0);
  number("k", c.out_channels, 0);
  number("seed", c.seed, 0);
  number("threads", c.threads, 1);
  flag("t", c.transposed);
  flag("first", !c.channels_last);
  flag("order", c.order);
  flag("bias", c.bias);
  flag("residual", c.residual);
  if (c.activation != Activation::none) line += concat(" act=", kActivations[static_cast<int>(c.activation)]);
  flag("gates", c.gates);
  flag("accumulate", c.accumulate);
  if (c.dw_dtype) line += concat(" dw=", blocksparse::name_of(*c.dw_dtype));
  flag("dgates", c.dgates);
  flag("tf32", c.tf32);
  if (c.integers) line += " values=int";
  if (c.device.type == DeviceType::cuda) line += " device=cuda";
  return line;
}

}  // namespace blocksparse::conv
