// Plain loops in double precision. They specify the products, and tests compare every kernel with them.
#pragma once

#include <optional>

#include "gemm/product.h"

namespace blocksparse::gemm {

void reference_product(const Product& p);
void reference_weight_gradient(const WeightGradient& g);
// Single results, before they are rounded and before dW is gated or added to. nullopt beyond the matrix.
double reference_product_at(const Product& p, int64_t token, int64_t output);
std::optional<double> reference_gradient_at(const WeightGradient& g, int64_t block, int64_t row, int64_t column);

// f of a sum, and the gate of a block (1 without gates). The plain loops of other ops use them too.
double reference_activation(Activation activation, double z);
double reference_gate(const void* gates, int64_t block, DType dtype);

}  // namespace blocksparse::gemm
