#include "report.h"

#include <cstdio>

#include "core/text.h"

namespace blocksparse::bench {

std::string json_string(std::string_view text) {
  std::string out = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += static_cast<unsigned char>(c) < ' ' ? ' ' : c;
  }
  return out + "\"";
}

namespace {

// {"openblas": 12.3, ...}
template <class Value>
std::string object(const Row& row, Value&& value) {
  std::string text = "{";
  for (const auto& [library, timing] : row.vs) {
    const std::string name = library.substr(0, library.find(' '));
    text += concat(text.size() == 1 ? "" : ", ", json_string(name), ": ", value(library, timing));
  }
  return text + "}";
}

// , "key": {"openblas": "why", ...}
std::string texts(const char* key, const std::vector<std::pair<std::string, std::string>>& of) {
  std::string text;
  for (const auto& [name, value] : of) {
    text += concat(text.empty() ? "" : ", ", json_string(name), ": ", json_string(value));
  }
  return text.empty() ? "" : concat(", \"", key, "\": {", text, "}");
}

std::string quartiles(const Time& t) { return concat("[", t.first, ", ", t.third, "]"); }

std::string version_of(const std::string& library) {
  const size_t space = library.find(' ');
  return space == std::string::npos ? "" : library.substr(space + 1);
}

}  // namespace

void print_json(const Row& r, std::FILE* to) {
  std::string line = concat("{\"problem\": ", json_string(r.problem), ", \"device\": ", json_string(r.device),
                            ", \"out\": ", r.out, ", \"in\": ", r.in, ", \"density\": ", r.density,
                            ", \"threads\": ", r.threads, ", \"kernel\": ", json_string(r.kernel));
  if (!r.plan.empty()) line += concat(", \"plan\": ", json_string(r.plan));
  if (r.cold) line += concat(", \"us\": ", r.us.cold.median, ", \"us_quartiles\": ", quartiles(r.us.cold));
  if (r.hot) line += concat(", \"us_hot\": ", r.us.hot.median, ", \"us_hot_quartiles\": ", quartiles(r.us.hot));
  line += concat(", \"gflops\": ", r.gflops, ", \"peak_fraction\": ", r.peak_fraction,
                 ", \"roofline_fraction\": ", r.roofline_fraction, ", \"samples\": ", r.samples,
                 ", \"error\": ", r.error, ", \"bound\": ", json_string(r.bound));
  if (r.cold) line += ", \"vs\": " + object(r, [](auto&, const Timing& t) { return concat(t.cold.median); });
  if (r.hot) line += ", \"vs_hot\": " + object(r, [](auto&, const Timing& t) { return concat(t.hot.median); });
  line += ", \"versions\": " +
          object(r, [](const std::string& library, auto&) { return json_string(version_of(library)); });
  line += texts("without", r.without) + texts("notes", r.notes);
  std::fprintf(to, "%s}\n", line.c_str());
  std::fflush(to);
}

void print_text(const Row& r) {
  auto times = [&](const Timing& t, bool ratios) {
    auto one = [&](const char* name, const Time& time, const Time& ours) {
      return concat("  ", name, " ", time.median, " us [", time.first, ", ", time.third, "]",
                    ratios ? concat(" (", time.median / ours.median, "x)") : "");
    };
    return concat(r.cold ? one("cold", t.cold, r.us.cold) : "", r.hot ? one("hot", t.hot, r.us.hot) : "");
  };
  std::printf("%s\n  %-18s%s\n", r.problem.c_str(), concat("blocksparse ", r.kernel).c_str(),
              times(r.us, false).c_str());
  for (const auto& [library, timing] : r.vs) {
    std::printf("  %-18s%s\n", library.substr(0, 18).c_str(), times(timing, true).c_str());
  }
  for (const auto& [name, what] : r.notes) std::printf("  %s: %s\n", name.c_str(), what.c_str());
  for (const auto& [name, why] : r.without) std::printf("  without %s: %s\n", name.c_str(), why.c_str());
  std::printf(
      "  %s%.4g GFLOP/s on live blocks, %.0f %% of peak, %.0f %% of the roofline (%s), error %.2g of "
      "its bound\n",
      r.threads == 0 ? "" : concat(r.threads, r.threads == 1 ? " thread, " : " threads, ").c_str(), r.gflops,
      100 * r.peak_fraction, 100 * r.roofline_fraction, r.bound.c_str(), r.error);
  std::fflush(stdout);
}

}  // namespace blocksparse::bench
