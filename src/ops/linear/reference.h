// What the plain loops of several ops share.
#pragma once

#include "gemm/product.h"

namespace blocksparse::linear {

// f of a sum, and the gate of a block: 1 without gates.
double reference_activation(Activation activation, double z);
double reference_gate(const void* gates, int64_t block, DType dtype);

}  // namespace blocksparse::linear
