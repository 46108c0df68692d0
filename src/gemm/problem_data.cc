#include "gemm/problem_data.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/text.h"
#include "cpu/isa.h"

namespace blocksparse::gemm {

double epsilon(DType dtype) {
  switch (dtype) {
    case DType::f64: return 0x1p-53;
    case DType::f32: return 0x1p-24;
    case DType::bf16: return 0x1p-8;
    case DType::f16: return 0x1p-11;
  }
  return 0;
}

double sum_epsilon(DType dtype, const Device& device) {
  const auto isa = current_isa();
  const bool to_odd = dtype == DType::bf16 && device.type == DeviceType::cpu && isa.ok() && *isa == Isa::neon_bf16;
  return epsilon(sum_dtype(dtype)) * (to_odd ? 2 : 1);
}

void note_error(double got, double expected, double allowed, int64_t at, ResultError& error) {
  const double difference = std::abs(got - expected);
  const bool same = got == expected || (std::isnan(got) && std::isnan(expected));
  const double ratio = same ? 0 : difference / std::max(allowed, std::numeric_limits<double>::min());
  if (ratio <= error.worst && !std::isnan(ratio)) return;
  error.worst = std::isnan(ratio) ? std::numeric_limits<double>::infinity() : ratio;
  error.absolute = difference;
  error.where = concat("element ", at, ": got ", got, ", expected ", expected, ", allowed difference ", allowed);
}

}  // namespace blocksparse::gemm
