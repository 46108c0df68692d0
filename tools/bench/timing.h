// Timing of contenders side by side.
#pragma once

#include <vector>

#include "machine.h"
#include "opponents.h"
#include "options.h"

namespace blocksparse::bench {

// us of a call: the median of the samples, and their first and third quartile.
struct Time {
  double median = 0, first = 0, third = 0;
};

struct Timing {
  Time cold, hot;
  bool launched = false;  // on a card: it cannot be captured in a graph, so its time includes launches
};

struct Timings {
  std::vector<Timing> contenders;  // in the order of the contenders
  int samples = 0;
  double fma_peak = 0;  // FLOP/s: median of samples that lie between those of the contenders
};

Time summary(std::vector<double> values);

Timings time_all(const std::vector<Contender>& contenders, const Options& options, const Peak& peak);

}  // namespace blocksparse::bench
