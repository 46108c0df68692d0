// Which processors the benchmark runs on.
#pragma once

#include <vector>

#include "blocksparse/status.h"

namespace blocksparse::bench {

// The processors that this process may use; the first of each core before the others of any.
std::vector<int> usable_processors();

// Confines every thread of the process, and those that are started later, to the first `threads` of these.
Status confine(const std::vector<int>& processors, int threads);

}  // namespace blocksparse::bench
