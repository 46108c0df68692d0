// Arithmetic as it is by default, on threads that belong to a framework.
#pragma once

#include <cfenv>

namespace blocksparse {

// XLA's and TensorFlow's threads round denormals to zero, and threads of OpenMP that they start would go on so. While
// one of these lives, arithmetic is that of all front ends, to the bit: f16 has denormals that count, and conversions
// in software go through those of f32.
class PlainArithmetic {
 public:
  PlainArithmetic() {
    std::fegetenv(&before_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~PlainArithmetic() { std::fesetenv(&before_); }
  PlainArithmetic(const PlainArithmetic&) = delete;
  PlainArithmetic& operator=(const PlainArithmetic&) = delete;

 private:
  std::fenv_t before_;
};

}  // namespace blocksparse
