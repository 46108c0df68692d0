// Ceilings of the machine, measured in the run that measures the kernels.
#pragma once

#include <string>

#include "blocksparse/dtype.h"
#include "cpu/isa.h"

namespace blocksparse::bench {

std::string cpu_model();

// What FMA instructions reach by themselves.
struct Peak {
  Isa isa;
  DType dtype;  // counts as the type of its sums, unless the instruction set multiplies it directly
  int threads;
  double measure(double seconds) const;  // FLOP/s of all threads together
};

// Bytes/s that `threads` threads read from a buffer larger than the caches; measured once for each number of threads.
double read_bandwidth(int threads);

}  // namespace blocksparse::bench
