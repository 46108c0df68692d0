// Measures the matrix of problems into a dated file, which a later run can continue.
#pragma once

#include <functional>
#include <string>

#include "blocksparse/status.h"
#include "options.h"

namespace blocksparse::bench {

// Measures one problem and prints its line of JSON to options.sink.
using Measure = std::function<Status(const std::string& problem, const Options& options)>;

// Measures the problems of options.paths against options.opponents into a file in options.output. It skips the problems
// that the file has, so the command that was stopped continues the run. Threads are confined to as many processors. The
// file's first line says what was measured: machine, build, opponents.
Status reproduce(Options options, const Measure& measure);

}  // namespace blocksparse::bench
