// What the machine could do: ceilings measured in the same run as the kernels.
#pragma once

#include <string>

#include "blocksparse/dtype.h"
#include "cpu/isa.h"

namespace blocksparse::bench {

std::string cpu_model();

// FLOP/s of `threads` threads at once, in the type of sums of `dtype` (measured once for each combination).
double fma_peak(Isa isa, DType dtype, int threads);

// Bytes/s that `threads` threads read from a buffer larger than the caches.
double read_bandwidth(int threads);

}  // namespace blocksparse::bench
