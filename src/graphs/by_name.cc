#include <charconv>
#include <cmath>
#include <optional>
#include <string_view>
#include <vector>

#include "blocksparse/graphs.h"
#include "graphs/checks.h"

namespace blocksparse::graphs {

namespace {

std::string_view trim(std::string_view text) {
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
  return text;
}

struct Argument {
  std::string_view name;  // empty for a positional one
  double value;
};

struct Call {
  std::string_view text;  // all of it, for messages
  std::string_view graph;
  std::vector<Argument> arguments;

  size_t positional() const {
    size_t count = 0;
    for (const Argument& a : arguments) count += a.name.empty();
    return count;
  }
};

Result<Call> parse_call(std::string_view text) {
  const std::string_view whole = trim(text);
  const size_t open = whole.find('(');
  if (open == std::string_view::npos || whole.back() != ')') {
    return invalid("[graph] \"", text, "\" is no graph name, needs a form like \"ba(384,8)\"");
  }
  Call call{.text = whole, .graph = trim(whole.substr(0, open)), .arguments = {}};
  std::string_view rest = whole.substr(open + 1, whole.size() - open - 2);
  while (!trim(rest).empty()) {
    const size_t comma = std::min(rest.find(','), rest.size());
    std::string_view item = trim(rest.substr(0, comma));
    rest.remove_prefix(std::min(comma + 1, rest.size()));
    std::string_view name;
    if (const size_t equals = item.find('='); equals != std::string_view::npos) {
      name = trim(item.substr(0, equals));
      item = trim(item.substr(equals + 1));
    }
    double value = 0;
    const auto [end, error] = std::from_chars(item.data(), item.data() + item.size(), value);
    if (error != std::errc() || end != item.data() + item.size() || !std::isfinite(value)) {
      return invalid("[graph] in \"", text, "\", \"", item, "\" is no number");
    }
    if (name.empty() && !call.arguments.empty() && !call.arguments.back().name.empty()) {
      return invalid("[graph] in \"", text, "\", ", item, " follows a named argument and needs a name");
    }
    call.arguments.push_back({name, value});
  }
  return call;
}

// Hands out the arguments of a call one after another and remembers the first mistake.
class Reader {
 public:
  Reader(const Call& call, std::string_view usage) : call_(call), usage_(usage) {}

  std::optional<double> number_or_none(std::string_view name) {
    const size_t position = next_++;
    for (size_t i = 0; i < call_.arguments.size(); ++i) {
      const Argument& a = call_.arguments[i];
      if (a.name.empty() ? i == position : a.name == name) {
        ++used_;
        return a.value;
      }
    }
    return std::nullopt;
  }
  double number(std::string_view name) {
    const auto value = number_or_none(name);
    if (!value) missing_ = true;
    return value.value_or(0);
  }
  int64_t integer(std::string_view name) { return whole(name, number(name)); }
  int64_t integer(std::string_view name, int64_t otherwise) {
    const auto value = number_or_none(name);
    return value ? whole(name, *value) : otherwise;
  }

  Status finish() const {
    if (!whole_.ok()) return whole_;
    if (missing_ || used_ != call_.arguments.size()) {
      return invalid("[graph] \"", call_.text, "\" does not fit ", usage_);
    }
    return {};
  }

 private:
  int64_t whole(std::string_view name, double value) {
    if (value != std::floor(value) || std::abs(value) > 0x1p53) {
      whole_ = invalid("[graph] in \"", call_.text, "\", ", name, " is ", value, ", needs a whole number");
      return 0;
    }
    return static_cast<int64_t>(value);
  }

  const Call& call_;
  std::string_view usage_;
  size_t next_ = 0, used_ = 0;
  bool missing_ = false;
  Status whole_;
};

// The leading (out[,in]) of patterns that need not be square; `others` positional arguments follow.
struct Sides {
  int64_t out, in;
};

Sides read_sides(Reader& read, const Call& call, size_t others) {
  const int64_t out = read.integer("out");
  const bool square = call.positional() <= 1 + others;
  bool named = false;
  for (const Argument& a : call.arguments) named = named || a.name == "in";
  return {out, square && !named ? out : read.integer("in", out)};
}

Result<BlockCoordinates> make_ba(const Call& call, int64_t seed) {
  Reader read(call, "ba(nodes,links[,extra=E | blocks=B])");
  const int64_t nodes = read.integer("nodes"), links = read.integer("links");
  int64_t extra = read.integer("extra", 0);
  const int64_t blocks = read.integer("blocks", -1);
  BS_RETURN_IF_ERROR(read.finish());
  if (blocks >= 0) {
    constexpr int64_t kMost = int64_t{1} << 31;
    const bool possible = links >= 1 && links < nodes && nodes < kMost && extra >= 0 && extra < kMost;
    if (!possible) return barabasi_albert(nodes, links, extra, seed);  // which says what is wrong
    const int64_t base = 2 * links * (nodes - links) + nodes + links * (links - 1) + 2 * extra;
    if (blocks < base || (blocks - base) % 2 != 0) {
      return invalid("[ba] blocks is ", blocks, ", \"", call.text, "\" can have ", base, " plus an even number");
    }
    extra += (blocks - base) / 2;
  }
  return barabasi_albert(nodes, links, extra, seed);
}

Result<BlockCoordinates> make(const Call& call, int64_t seed) {
  if (call.graph == "ba") return make_ba(call, seed);
  if (call.graph == "dense") {
    Reader read(call, "dense(out[,in])");
    const auto [out, in] = read_sides(read, call, 0);
    BS_RETURN_IF_ERROR(read.finish());
    return dense(out, in);
  }
  if (call.graph == "random") {
    Reader read(call, "random(out[,in],density)");
    const auto [out, in] = read_sides(read, call, 1);
    const double density = read.number("density");
    BS_RETURN_IF_ERROR(read.finish());
    return random(out, in, density, seed);
  }
  if (call.graph == "balanced") {
    Reader read(call, "balanced(out[,in],degree[,diagonal=1])");
    const auto [out, in] = read_sides(read, call, 1);
    const int64_t degree = read.integer("degree"), diagonal = read.integer("diagonal", 0);
    BS_RETURN_IF_ERROR(read.finish());
    if (diagonal != 0 && diagonal != 1) return invalid("[balanced] diagonal is ", diagonal, ", needs 0 or 1");
    return balanced_random(out, in, degree, seed, diagonal == 1);
  }
  if (call.graph == "ws") {
    Reader read(call, "ws(nodes,neighbours,rewire)");
    const int64_t nodes = read.integer("nodes"), neighbours = read.integer("neighbours");
    const double rewire = read.number("rewire");
    BS_RETURN_IF_ERROR(read.finish());
    return watts_strogatz(nodes, neighbours, rewire, seed);
  }
  if (call.graph == "ws2d") {
    Reader read(call, "ws2d(height,width,neighbours,rewire)");
    const int64_t height = read.integer("height"), width = read.integer("width");
    const int64_t neighbours = read.integer("neighbours");
    const double rewire = read.number("rewire");
    BS_RETURN_IF_ERROR(read.finish());
    return watts_strogatz_torus(height, width, neighbours, rewire, seed);
  }
  if (call.graph == "diagonal") {
    Reader read(call, "diagonal(nodes[,group])");
    const int64_t nodes = read.integer("nodes"), group = read.integer("group", 1);
    BS_RETURN_IF_ERROR(read.finish());
    return block_diagonal(nodes, group);
  }
  if (call.graph == "banded") {
    Reader read(call, "banded(nodes,width)");
    const int64_t nodes = read.integer("nodes"), width = read.integer("width");
    BS_RETURN_IF_ERROR(read.finish());
    return banded(nodes, width);
  }
  if (call.graph == "butterfly") {
    Reader read(call, "butterfly(nodes)");
    const int64_t nodes = read.integer("nodes");
    BS_RETURN_IF_ERROR(read.finish());
    return butterfly(nodes);
  }
  return invalid("[graph] there is no graph \"", call.graph,
                 "\"; there are dense, random, balanced, ws, ws2d, ba, diagonal, banded, butterfly");
}

}  // namespace

Result<BlockCoordinates> by_name(std::string_view name, int64_t seed) {
  BS_RETURN_IF_ERROR(check_seed("graph", seed));
  const auto call = parse_call(name);
  if (!call.ok()) return call.status();
  return make(*call, seed);
}

}  // namespace blocksparse::graphs
