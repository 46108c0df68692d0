// What blocksparse-bench prints.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "timing.h"

namespace blocksparse::bench {

struct Row {
  std::string problem, kernel, plan;  // plan: how a CPU does it, or ""
  int64_t out = 0, in = 0;            // features
  double density = 0;
  std::string device;  // "cpu: AMD EPYC ..."
  int threads = 1;
  bool cold = true, hot = true;  // which of the two were timed
  Timing us;
  double gflops = 0;                                         // on live blocks, cold if timed
  double peak_fraction = 0;                                  // of FMA peak
  double roofline_fraction = 0;                              // of what peak and read bandwidth allow
  std::string bound;                                         // "compute" or "memory"
  double error = 0;                                          // as a share of the allowed error
  std::vector<std::pair<std::string, Timing>> vs;            // by "name version"
  std::vector<std::pair<std::string, std::string>> without;  // opponents that cannot do it, and why
  std::vector<std::pair<std::string, std::string>> notes;    // of opponents: what their times mean
  int samples = 0;
};

std::string json_string(std::string_view text);
void print_json(const Row& row, std::FILE* to);
void print_text(const Row& row);

}  // namespace blocksparse::bench
