// The command line of blocksparse-bench.
#pragma once

#include <cstdio>
#include <string>
#include <vector>

#include "blocksparse/status.h"

namespace blocksparse::bench {

struct Options {
  std::vector<std::string> problems;
  std::vector<std::string> opponents;
  int threads = 0;           // 0: what the problem says
  bool cuda = false;         // all problems on the first card
  bool each_kernel = false;  // each CUDA kernel that can do a problem, in turn
  std::string choice;        // a kind of card: say which family does a problem there, and run nothing
  bool cold = true, hot = true, json = false, check_only = false, list = false, help = false;
  size_t rotate_bytes = size_t{256} << 20;
  int samples = 15;
  double budget_s = 0;       // of sampling one problem, after at least 3 samples; 0: no limit
  std::FILE* sink = stdout;  // of JSON

  bool reproduce = false;
  std::vector<std::string> paths;  // files and folders of problems
  std::string output;              // folder of results, or a file *.jsonl
};

extern const char* const kUsage;
Result<Options> parse_options(int argc, char** argv);

}  // namespace blocksparse::bench
