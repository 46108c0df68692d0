// The choice of a CUDA kernel, for cards that are not here.
#include "choice.h"

#include <cstdio>

#include "core/text.h"
#include "cuda/card.h"
#include "ops/linear/problem.h"

namespace blocksparse::bench {

namespace {

struct Named {
  std::string_view name;
  cuda::Card card;
};
// Of H100 (SXM) and H200, and of A100.
constexpr Named kCards[] = {
    {"hopper", {.arch = 90, .multiprocessors = 132, .shared_bytes = 227 * 1024, .sm90a = true}},
    {"ampere", {.arch = 80, .multiprocessors = 108, .shared_bytes = 163 * 1024}},
};

}  // namespace

Status print_choice(const std::string& line, const Options& options) {
  const Named* named = nullptr;
  for (const Named& each : kCards) {
    if (each.name == options.choice) named = &each;
  }
  if (named == nullptr) return invalid("--choice ", options.choice, ": hopper or ampere");
  const auto c = linear::parse_linear_case(line);
  if (!c.ok()) return c.status();
  const auto layout = linear::layout_of(*c);
  if (!layout.ok()) return layout.status();
  const std::string family(linear::family_on(named->card, *c, *layout));
  const std::string problem = to_string(*c);
  if (options.json) {
    std::fprintf(options.sink, "{\"problem\": \"%s\", \"card\": \"%s\", \"kernel\": \"%s\"}\n", problem.c_str(),
                 options.choice.c_str(), family.c_str());
  } else {
    std::printf("%s: %s\n", problem.c_str(), family.c_str());
  }
  return {};
}

}  // namespace blocksparse::bench
