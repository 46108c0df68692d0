// What gated linear units mean, in plain loops.
#include <cmath>

#include "core/convert.h"
#include "gemm/reference.h"
#include "ops/glu/glu.h"

namespace blocksparse::glu {

namespace {

constexpr double kPi = 3.14159265358979323846;

// f'(z).
double slope(Activation activation, double z) {
  switch (activation) {
    case Activation::none: return 1;
    case Activation::relu: return z <= 0 ? 0 : 1;
    case Activation::gelu:
      return 0.5 * std::erfc(-z / std::sqrt(2.0)) + z * std::exp(-0.5 * z * z) / std::sqrt(2 * kPi);
    case Activation::silu: {
      const double s = 1 / (1 + std::exp(-z));
      return s + z * s * (1 - s);
    }
    case Activation::gelu_tanh: {
      const double c = std::sqrt(2 / kPi), s = 1 / (1 + std::exp(-2 * c * (z + 0.044715 * z * z * z)));
      return s + z * s * (1 - s) * 2 * c * (1 + 3 * 0.044715 * z * z);
    }
  }
  return 1;
}

}  // namespace

void reference_forward(const Forward& f) {
  for (int64_t t = 0; t < f.n; ++t) {
    for (int64_t h = 0; h < f.hidden; ++h) {
      const double gate = load_element(f.z, t * f.z_token + gate_of(h), f.dtype);
      const double up = load_element(f.z, t * f.z_token + gate_of(h) + kInterleaved, f.dtype);
      store_element(f.y, t * f.y_token + h, f.dtype, gemm::reference_activation(f.activation, gate) * up);
    }
  }
}

void reference_backward(const Backward& b) {
  for (int64_t t = 0; t < b.n; ++t) {
    for (int64_t h = 0; h < b.groups() * kInterleaved; ++h) {
      const int64_t at = gate_of(h);
      double dgate = 0, dup = 0;
      if (h < b.hidden) {
        const double gate = load_element(b.z, t * b.z_token + at, b.dtype);
        const double up = load_element(b.z, t * b.z_token + at + kInterleaved, b.dtype);
        const double dy = load_element(b.dy, t * b.dy_token + h, b.dtype);
        dgate = dy * up * slope(b.activation, gate);
        dup = dy * gemm::reference_activation(b.activation, gate);
      }
      store_element(b.dz, t * b.dz_token + at, b.dtype, dgate);
      store_element(b.dz, t * b.dz_token + at + kInterleaved, b.dtype, dup);
    }
  }
}

}  // namespace blocksparse::glu
