// What blocksparse-bench prints.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "timing.h"

namespace blocksparse::bench {

struct Row {
  std::string problem, kernel;
  std::string device;  // "cpu: AMD EPYC ..."
  int threads = 1;
  bool cold = true, hot = true;  // which were timed
  Timing us;
  double gflops = 0;                               // on live blocks, cold if timed
  double peak_fraction = 0;                        // of FMA peak
  double roofline_fraction = 0;                    // of what peak and read bandwidth allow
  std::string bound;                               // "compute" or "memory"
  double error = 0;                                // as a share of the allowed error
  std::vector<std::pair<std::string, Timing>> vs;  // by "name version"
};

void print_json(const Row& row);
void print_text(const Row& row);

}  // namespace blocksparse::bench
