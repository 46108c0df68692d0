// Which processors the benchmark runs on.
#pragma once

#include <vector>

#include "blocksparse/status.h"

namespace blocksparse::bench {

// The processors that this process may use: the first of each core, then the others.
std::vector<int> usable_processors();

// Confines every thread of the process to the first `threads` of these, and so the threads that start later.
Status confine(const std::vector<int>& processors, int threads);

}  // namespace blocksparse::bench
