// One-line problems, spoken by tests, benchmarks and messages alike:
//   linear:fprop bf16 n=64 b=32 ba(384,8) seed=1 bias act=relu
// This file splits a line; each op gives its words a meaning.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "blocksparse/status.h"

namespace blocksparse {

struct ProblemLine {
  std::string op, pass;  // "linear", "fprop"
  std::string dtype;     // "" if none was named
  std::string graph;     // the word with parentheses; "" if none
  struct Option {
    std::string key, value;  // value is "" for a bare word
  };
  std::vector<Option> options;
};

Result<ProblemLine> parse_problem_line(std::string_view line);

// A whole number, or the reason why `value` is none.
Result<int64_t> parse_integer(std::string_view key, std::string_view value);

}  // namespace blocksparse
