// Which family of CUDA kernels does a problem.
#pragma once

#include <string>

#include "options.h"

namespace blocksparse::bench {

// Prints it for a linear problem on a card of the kind options.choice; nothing is run.
Status print_choice(const std::string& line, const Options& options);

}  // namespace blocksparse::bench
