// What the machine could do: ceilings measured in the same run as the kernels.
#pragma once

#include <string>

#include "blocksparse/dtype.h"
#include "cpu/isa.h"

namespace blocksparse::bench {

std::string cpu_model();

// What FMA instructions alone reach.
struct Peak {
  Isa isa;
  DType dtype;  // counts as the type of its sums, unless the instruction set multiplies it as it is
  int threads;
  double measure(double seconds) const;  // FLOP/s of all threads together
};

// Bytes/s that `threads` threads read from a buffer larger than the caches; measured once for each number of threads.
double read_bandwidth(int threads);

}  // namespace blocksparse::bench
