// Reads and writes the line of a linear problem.
#include "ops/linear/problem.h"

#include "core/problem.h"
#include "core/text.h"

namespace blocksparse::linear {

namespace {

Result<Order> parse_order(std::string_view key, std::string_view value) {
  if (value == "first") return Order::features_first;
  if (value == "last") return Order::features_last;
  return invalid("[problem] ", key, "=", value, ": needs first or last");
}

Result<Activation> parse_activation(std::string_view value) {
  if (value == "none") return Activation::none;
  if (value == "relu") return Activation::relu;
  if (value == "gelu") return Activation::gelu;
  if (value == "silu") return Activation::silu;
  if (value == "gelu_tanh") return Activation::gelu_tanh;
  return invalid("[problem] act=", value, ": needs none, relu, gelu, silu or gelu_tanh");
}

std::string_view name_of(Activation a) {
  constexpr std::string_view names[] = {"none", "relu", "gelu", "silu", "gelu_tanh"};
  return names[static_cast<int>(a)];
}

Status set_option(LinearCase& c, const ProblemLine::Option& option) {
  const auto& [key, value] = option;
  const std::pair<std::string_view, int64_t*> numbers[] = {{"n", &c.n},
                                                           {"b", &c.block},
                                                           {"seed", &c.seed},
                                                           {"threads", &c.threads},
                                                           {"out", &c.out_features},
                                                           {"in", &c.in_features},
                                                           {"empty_row", &c.empty_row},
                                                           {"empty_col", &c.empty_col},
                                                           {"full_row", &c.full_row},
                                                           {"full_col", &c.full_col},
                                                           {"stack", &c.stack},
                                                           {"pad", &c.pad},
                                                           {"rpad", &c.residual_pad},
                                                           {"odd", &c.odd},
                                                           {"offset", &c.offset},
                                                           {"w_offset", &c.w_offset},
                                                           {"pairs", &c.pairs},
                                                           {"glu", &c.hidden}};
  for (const auto& [name, target] : numbers) {
    if (key != name) continue;
    const auto number = parse_integer(key, value);
    if (!number.ok()) return number.status();
    *target = *number;
    return {};
  }
  const std::pair<std::string_view, bool*> flags[] = {
      {"t", &c.transposed},          {"bias", &c.bias},     {"residual", &c.residual}, {"gates", &c.gates},
      {"accumulate", &c.accumulate}, {"dgates", &c.dgates}, {"tf32", &c.tf32}};
  for (const auto& [name, target] : flags) {
    if (key != name || !value.empty()) continue;
    *target = true;
    return {};
  }
  const std::pair<std::string_view, Order*> orders[] = {{"x", &c.x_order}, {"y", &c.y_order}, {"r", &c.residual_order}};
  for (const auto& [name, target] : orders) {
    if (key != name) continue;
    const auto order = parse_order(key, value);
    if (!order.ok()) return order.status();
    *target = *order;
    return {};
  }
  if (key == "act") {
    const auto activation = parse_activation(value);
    if (!activation.ok()) return activation.status();
    c.activation = *activation;
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
  return invalid("[problem] \"", key, value.empty() ? "" : "=", value, "\" means nothing to the linear op");
}

}  // namespace

Result<LinearCase> parse_linear_case(std::string_view line) {
  const auto words = parse_problem_line(line);
  if (!words.ok()) return words.status();
  if (words->op != "linear") return invalid("[problem] there is no op \"", words->op, "\"");
  LinearCase c;
  bool known = false;
  for (Pass pass : {Pass::fprop, Pass::dgrad, Pass::wgrad}) {
    if (words->pass == name_of(pass)) {
      c.pass = pass;
      known = true;
    }
  }
  if (!known) return invalid("[problem] the linear op has no pass \"", words->pass, "\"");
  if (words->graph.empty()) return invalid("[problem] \"", line, "\" names no graph, such as random(128,0.1)");
  c.graph = words->graph;
  if (!words->dtype.empty()) c.dtype = *parse_dtype(words->dtype);
  for (const ProblemLine::Option& option : words->options) BS_RETURN_IF_ERROR(set_option(c, option));
  if (c.n < 0 || c.pairs < 0 || c.threads < 0 || c.pad < 0 || c.offset < 0 || c.w_offset < 0 || c.odd < 0 ||
      c.residual_pad < -1) {
    return invalid("[problem] \"", line, "\": n, pairs, threads, pad, offsets and odd need to be 0 or more");
  }
  if (c.pass != Pass::fprop && (c.bias || c.residual || c.activation != Activation::none)) {
    return invalid("[problem] \"", line, "\": bias, residual and act are of fprop alone");
  }
  if (c.hidden < 0 || (c.hidden > 0 && (c.pass != Pass::fprop || c.residual || c.y_order != Order::features_last))) {
    return invalid("[problem] \"", line, "\": glu is of fprop alone, of features-last y, without a residual");
  }
  if (c.pass != Pass::wgrad && (c.pairs != 1 || c.accumulate || c.dw_dtype || c.dgates)) {
    return invalid("[problem] \"", line, "\": pairs, accumulate, dw and dgates are of wgrad alone");
  }
  return c;
}

std::string to_string(const LinearCase& c) {
  std::string line =
      concat("linear:", name_of(c.pass), " ", blocksparse::name_of(c.dtype), " n=", c.n, " b=", c.block, " ", c.graph);
  auto number = [&](std::string_view key, int64_t value, int64_t usual) {
    if (value != usual) line += concat(" ", key, "=", value);
  };
  auto flag = [&](std::string_view key, bool value) {
    if (value) line += concat(" ", key);
  };
  auto order = [&](std::string_view key, Order value) {
    if (value == Order::features_first) line += concat(" ", key, "=first");
  };
  number("seed", c.seed, 0);
  number("threads", c.threads, 1);
  number("out", c.out_features, 0);
  number("in", c.in_features, 0);
  number("empty_row", c.empty_row, -1);
  number("empty_col", c.empty_col, -1);
  number("full_row", c.full_row, -1);
  number("full_col", c.full_col, -1);
  number("stack", c.stack, 1);
  flag("t", c.transposed);
  order("x", c.x_order);
  order("y", c.y_order);
  order("r", c.residual_order);
  number("pad", c.pad, 0);
  number("rpad", c.residual_pad, -1);
  number("offset", c.offset, 0);
  number("w_offset", c.w_offset, 0);
  flag("bias", c.bias);
  flag("residual", c.residual);
  if (c.activation != Activation::none) line += concat(" act=", name_of(c.activation));
  number("glu", c.hidden, 0);
  flag("gates", c.gates);
  number("pairs", c.pairs, 1);
  flag("accumulate", c.accumulate);
  if (c.dw_dtype) line += concat(" dw=", blocksparse::name_of(*c.dw_dtype));
  flag("dgates", c.dgates);
  flag("tf32", c.tf32);
  if (c.integers) line += " values=int";
  number("odd", c.odd, 0);
  if (c.device.type == DeviceType::cuda) line += " device=cuda";
  return line;
}

}  // namespace blocksparse::linear
