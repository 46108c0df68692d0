// What the products mean, in plain loops with double sums. Tests and the bench compare every kernel with them. They can
// also be run as the instruction set "reference".
#include <algorithm>
#include <cmath>
#include <optional>

#include "core/convert.h"
#include "gemm/reference.h"

namespace blocksparse::gemm {

namespace {

constexpr double kPi = 3.14159265358979323846;

double element(const Activations& a, int64_t token, int64_t feature, DType dtype) {
  return load_element(a.data, token * a.token_stride + feature * a.feature_stride, dtype);
}

}  // namespace

double reference_activation(Activation activation, double z) {
  switch (activation) {
    case Activation::none: return z;
    case Activation::relu: return z < 0 ? 0 : z;
    case Activation::gelu: return 0.5 * z * std::erfc(-z / std::sqrt(2.0));
    case Activation::silu: return z / (1 + std::exp(-z));
    case Activation::gelu_tanh: return z / (1 + std::exp(-2 * std::sqrt(2 / kPi) * (z + 0.044715 * z * z * z)));
  }
  return z;
}

double reference_gate(const void* gates, int64_t block, DType dtype) {
  return gates == nullptr ? 1 : load_element(gates, block, sum_dtype(dtype));
}

namespace {

// sum over blocks and k of gate * W[o, k] x[t, k] + bias[o]
double sum_at(const Product& p, int64_t t, int64_t o) {
  const int64_t b = p.layout.block_size;
  const RowWalk walk = walk_of(p.layout, p.by_in);
  const IndexSections at =
      index_sections(header_of(p.layout).out_blocks, header_of(p.layout).in_blocks, p.layout.blocks);
  const int32_t* starts = p.layout.index + (p.by_in ? at.by_in.starts : at.by_out.starts);
  double sum = 0;
  for (int32_t i = starts[o / b]; i < starts[o / b + 1]; ++i) {
    const BlockRef ref = walk.refs[static_cast<size_t>(i)];
    const double gate = reference_gate(p.gates, ref.weight, p.dtype);
    if (gate == 0) continue;
    const int64_t first = ref.from * b;
    for (int64_t k = 0; k < std::min(b, p.x.features - first); ++k) {
      const int64_t row = p.by_in ? k : o % b, column = p.by_in ? o % b : k;
      const double w = load_element(p.w, (ref.weight * b + row) * b + column, p.dtype);
      sum += gate * w * element(p.x, t, first + k, p.dtype);
    }
  }
  return p.bias == nullptr ? sum : sum + load_element(p.bias, o, p.dtype);
}

}  // namespace

// y[t, o] = f(sum[t, o] + residual[t, o]); for a gated linear unit f(sum[t, gate of o]) * sum[t, up of o]
double reference_product_at(const Product& p, int64_t t, int64_t o) {
  if (p.glu) {
    const int64_t gate = gate_of(o);
    return reference_activation(p.activation, sum_at(p, t, gate)) * sum_at(p, t, gate + kInterleaved);
  }
  double sum = sum_at(p, t, o);
  if (p.residual.data != nullptr) sum += element(p.residual, t, o, p.dtype);
  return reference_activation(p.activation, sum);
}

void reference_product(const Product& p) {
  for (int64_t t = 0; t < p.x.n; ++t) {
    for (int64_t o = 0; o < p.y.features; ++o) {
      store_element(const_cast<void*>(p.y.data), t * p.y.token_stride + o * p.y.feature_stride, p.dtype,
                    reference_product_at(p, t, o));
    }
  }
}

// S[o, k] = sum over pairs and t of dy[t, o] x[t, k]; nullopt beyond the matrix
std::optional<double> reference_gradient_at(const WeightGradient& g, int64_t block, int64_t row, int64_t column) {
  const int64_t b = g.layout.block_size;
  const int64_t o = out_of(g.layout)[static_cast<size_t>(block)] * b + row;
  const int64_t k = walk_of(g.layout, false).refs[static_cast<size_t>(block)].from * b + column;
  if (o >= g.layout.out_features || k >= g.layout.in_features) return std::nullopt;
  double sum = 0;
  for (size_t pair = 0; pair < g.pairs.size(); ++pair) {
    const GradTerm term = g.term(pair);
    for (int64_t t = 0; t < term.x.n; ++t) sum += element(term.dy, t, o, g.dtype) * element(term.x, t, k, g.dtype);
  }
  return sum;
}

// dW = gate * S;  dgate = sum over the block of S * W
void reference_weight_gradient(const WeightGradient& g) {
  const int64_t b = g.layout.block_size;
  for (int64_t block = 0; block < g.layout.blocks; ++block) {
    const double gate = reference_gate(g.gates, block, g.dtype);
    double gate_sum = 0;
    for (int64_t entry = 0; entry < b * b; ++entry) {
      const int64_t at = block * b * b + entry;
      const auto sum = reference_gradient_at(g, block, entry / b, entry % b);
      if (sum && g.dgates != nullptr) gate_sum += *sum * load_element(g.w, at, g.dtype);
      const double old = g.accumulate ? load_element(g.dw, at, g.dw_dtype) : 0;
      store_element(g.dw, at, g.dw_dtype, old + (gate == 0 ? 0 : gate * sum.value_or(0)));
    }
    if (g.dgates == nullptr) continue;
    const double old = g.accumulate ? load_element(g.dgates, block, sum_dtype(g.dtype)) : 0;
    store_element(g.dgates, block, sum_dtype(g.dtype), old + gate_sum);
  }
}

}  // namespace blocksparse::gemm
