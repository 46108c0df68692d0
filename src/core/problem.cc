#include "core/problem.h"

#include <charconv>

#include "blocksparse/dtype.h"
#include "core/text.h"

namespace blocksparse {

Result<int64_t> parse_integer(std::string_view key, std::string_view value) {
  int64_t number = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
  if (error != std::errc() || end != value.data() + value.size()) {
    return invalid("[problem] ", key, "=", value, ": needs a whole number");
  }
  return number;
}

Result<ProblemLine> parse_problem_line(std::string_view line) {
  ProblemLine problem;
  size_t at = 0;
  int depth = 0;
  std::string word;
  auto take_word = [&]() -> Status {
    if (word.empty()) return {};
    if (problem.op.empty()) {
      const size_t colon = word.find(':');
      if (colon == std::string::npos) return invalid("[problem] \"", line, "\" needs to begin like linear:fprop");
      problem.op = word.substr(0, colon);
      problem.pass = word.substr(colon + 1);
    } else if (parse_dtype(word)) {
      problem.dtype = word;
    } else if (word.find('(') != std::string::npos) {
      problem.graph = word;
    } else {
      const size_t equals = word.find('=');
      const std::string key = word.substr(0, equals);
      for (const ProblemLine::Option& other : problem.options) {
        if (other.key == key) return invalid("[problem] \"", line, "\" has ", key, " twice");
      }
      problem.options.push_back({key, equals == std::string::npos ? "" : word.substr(equals + 1)});
    }
    word.clear();
    return {};
  };
  for (; at < line.size(); ++at) {
    const char c = line[at];
    depth += (c == '(') - (c == ')');
    if ((c == ' ' || c == '\t') && depth == 0) {
      BS_RETURN_IF_ERROR(take_word());
    } else if (c != ' ' && c != '\t') {
      word.push_back(c);
    }
  }
  BS_RETURN_IF_ERROR(take_word());
  if (depth != 0) return invalid("[problem] \"", line, "\" has an open parenthesis");
  if (problem.op.empty()) return invalid("[problem] the line is empty");
  return problem;
}

}  // namespace blocksparse
