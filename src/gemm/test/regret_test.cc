// The choice of a family against measurements. For every problem of crossover/<card>.csv with times of two families or
// more, the chosen one takes at most 1.1 times as long as the best.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "gemm/cuda/families.h"
#include "ops/linear/problem.h"

namespace blocksparse::gemm {
namespace {

constexpr double kMostRegret = 1.1;

// Problems above that bound today, each with a reason. An entry that is no longer needed fails the test too.
struct Known {
  const char *file, *problem, *l2, *reason;
};
constexpr Known kKnown[] = {
    {"h100.csv", "linear:wgrad bf16 n=1024 b=32 ba(384,8)", "hot", "wgrad_stream, as for a third of the features"},
    {"h100.csv", "linear:wgrad bf16 n=1024 b=32 ba(384,8)", "cold", "wgrad_stream, as for a third of the features"},
    {"h200.csv", "linear:fprop bf16 n=512 b=8 random(512,0.02)", "hot",
     "stream_x gains at .05, an H100 loses 5 % here"},
    {"h200.csv", "linear:fprop bf16 n=512 b=8 random(512,0.02)", "cold",
     "stream_x gains at .05, an H100 loses 5 % here"},
};

// The fields of a line. Fields with commas stand in quotation marks.
std::vector<std::string> fields_of(const std::string& line) {
  std::vector<std::string> fields(1);
  bool quoted = false;
  for (char c : line) {
    if (c == '"') quoted = !quoted;
    else if (c == ',' && !quoted) fields.emplace_back();
    else fields.back() += c;
  }
  return fields;
}

struct Times {
  std::string problem, l2;
  std::map<std::string, double> us;  // of families
};

std::vector<Times> read_times(const std::string& file) {
  std::ifstream in(std::string(BS_CROSSOVER) + "/" + file);
  EXPECT_TRUE(in) << file;
  std::string line;
  std::getline(in, line);
  EXPECT_EQ(line, "problem,family,us,commit,date,l2,source");
  std::map<std::pair<std::string, std::string>, Times> all;
  while (std::getline(in, line)) {
    const auto f = fields_of(line);
    if (f.size() != 7) {
      ADD_FAILURE() << file << ": " << line;
      continue;
    }
    EXPECT_NE(find_family(f[1]), nullptr) << line;
    Times& times = all[{f[0], f[5]}];
    times.problem = f[0], times.l2 = f[5];
    times.us[f[1]] = std::stod(f[2]);
  }
  std::vector<Times> list;
  for (auto& [key, times] : all) list.push_back(std::move(times));
  return list;
}

std::string family_of_line(const cuda::Card& card, const std::string& line) {
  const auto c = linear::parse_linear_case(line);
  EXPECT_TRUE(c.ok()) << line;
  static std::map<std::string, Layout> layouts;  // many lines share a graph
  const std::string key = c->graph + " " + std::to_string(c->block) + " " + std::to_string(c->seed);
  auto known = layouts.find(key);
  if (known == layouts.end()) known = layouts.emplace(key, *linear::layout_of(*c)).first;
  return std::string(linear::family_on(card, *c, known->second.view()));
}

void expect_little_regret(const std::string& file, const cuda::Card& card) {
  struct Regret {
    double ratio;
    std::string text;
  };
  std::vector<Regret> regrets;
  int alone = 0;
  std::vector<const Known*> used;
  for (const Times& times : read_times(file)) {
    if (times.us.size() < 2) {
      ++alone;
      continue;
    }
    const std::string family = family_of_line(card, times.problem);
    const auto chosen = times.us.find(family);
    if (chosen == times.us.end()) {
      ADD_FAILURE() << file << ": " << family << " is chosen, but was not timed: " << times.problem;
      continue;
    }
    const auto best = std::min_element(times.us.begin(), times.us.end(),
                                       [](const auto& a, const auto& b) { return a.second < b.second; });
    const double ratio = chosen->second / best->second;
    char text[256];
    std::snprintf(text, sizeof(text), "%.2f  %s %.1f us, %s %.1f us, %s  %s", ratio, family.c_str(), chosen->second,
                  best->first.c_str(), best->second, times.l2.c_str(), times.problem.c_str());
    regrets.push_back({ratio, text});
    if (ratio <= kMostRegret) continue;
    const auto known = std::find_if(std::begin(kKnown), std::end(kKnown), [&](const Known& k) {
      return k.file == file && k.problem == times.problem && k.l2 == times.l2;
    });
    if (known == std::end(kKnown)) ADD_FAILURE() << text;
    else used.push_back(&*known);
  }
  for (const Known& known : kKnown) {
    if (known.file != file) continue;
    EXPECT_TRUE(std::find(used.begin(), used.end(), &known) != used.end()) << known.problem << " is no longer above";
  }
  std::sort(regrets.begin(), regrets.end(), [](const Regret& a, const Regret& b) { return a.ratio > b.ratio; });
  std::printf("%s: %zu problems, and %d of which one family alone was timed. The worst:\n", file.c_str(),
              regrets.size(), alone);
  for (size_t i = 0; i < std::min<size_t>(10, regrets.size()); ++i) std::printf("  %s\n", regrets[i].text.c_str());
}

constexpr cuda::Card kHopper = {.arch = 90, .multiprocessors = 132, .shared_bytes = 227 * 1024, .sm90a = true};

TEST(SelectCuda, TheChoiceIsCloseToTheBestThatWasMeasuredOnAnH200) { expect_little_regret("h200.csv", kHopper); }
TEST(SelectCuda, TheChoiceIsCloseToTheBestThatWasMeasuredOnAnH100) { expect_little_regret("h100.csv", kHopper); }

}  // namespace
}  // namespace blocksparse::gemm
