#include "timing.h"

#include <algorithm>
#include <chrono>
#include <limits>

namespace blocksparse::bench {

namespace {

using Clock = std::chrono::steady_clock;
constexpr double kSampleUs = 2000;
constexpr int kFewestSamples = 3;

double microseconds_since(Clock::time_point start) {
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

// us a call over a sample. One call goes first and is not timed, because threads of the contender before may still be
// spinning.
double sample(const Contender& c, int calls, int& copy, bool rotate) {
  c.run(copy);
  const auto start = Clock::now();
  for (int i = 0; i < calls; ++i) {
    if (rotate) copy = (copy + 1) % c.copies;
    c.run(copy);
  }
  return microseconds_since(start) / calls;
}

}  // namespace

Time summary(std::vector<double> values) {
  if (values.empty()) return {};
  std::sort(values.begin(), values.end());
  const size_t n = values.size();
  return {values[n / 2], values[n / 4], values[3 * n / 4]};
}

// Samples of all contenders and of the peak are interleaved, so that drift of the machine's speed hits all alike.
Timings time_all(const std::vector<Contender>& contenders, const Options& options, const Peak& peak) {
  std::vector<std::vector<double>> cold(contenders.size()), hot(contenders.size());
  std::vector<double> peaks;
  std::vector<int> calls(contenders.size()), copy(contenders.size(), 0);
  for (size_t i = 0; i < contenders.size(); ++i) {
    contenders[i].run(0);
    const auto start = Clock::now();
    contenders[i].run(0);
    calls[i] = static_cast<int>(std::clamp(kSampleUs / std::max(microseconds_since(start), 0.1), 1.0, 10000.0));
  }
  const double most_us = options.budget_s > 0 ? 1e6 * options.budget_s : std::numeric_limits<double>::infinity();
  const auto begin = Clock::now();
  for (int s = 0; s < options.samples && (s < kFewestSamples || microseconds_since(begin) < most_us); ++s) {
    peaks.push_back(peak.measure(0.002));
    for (size_t i = 0; i < contenders.size(); ++i) {
      int same = 0;
      if (options.cold) cold[i].push_back(sample(contenders[i], calls[i], copy[i], true));
      if (options.hot) hot[i].push_back(sample(contenders[i], calls[i], same, false));
    }
  }
  Timings timings;
  for (size_t i = 0; i < contenders.size(); ++i)
    timings.contenders.push_back({.cold = summary(cold[i]), .hot = summary(hot[i])});
  timings.fma_peak = summary(peaks).median;
  timings.samples = static_cast<int>(peaks.size());
  return timings;
}

}  // namespace blocksparse::bench
