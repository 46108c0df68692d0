// The kernels that the user has forced, for tests and measurements: by set_cuda_kernel(), or by BLOCKSPARSE_CUDA_KERNEL
// in the environment. One name or several, separated by commas. A call is done by the first family of families.inc that
// is named and supports it.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "blocksparse/status.h"

namespace blocksparse::gemm {

class ForcedKernels {
 public:
  ForcedKernels() = default;
  explicit ForcedKernels(uint32_t names) : names_(names) {}
  bool any() const { return names_ != 0; }
  bool has(std::string_view name) const;
  std::string text() const;  // their names
  uint32_t bits() const { return names_; }

 private:
  uint32_t names_ = 0;  // one bit for each of kernel_names()
};

// Empty if nothing is forced. An error if the environment names a kernel that does not exist.
Result<ForcedKernels> forced_kernels();
bool kernels_are_forced();
Status force_kernels(std::string_view names);  // "": nothing is forced, unless the environment says otherwise

// All names that can be forced, best first: the families of this engine and the kernels that ops add. Ops are above the
// engine, so ops/cuda_kernels.cc defines this, where both are known.
std::span<const std::string_view> kernel_names();

}  // namespace blocksparse::gemm
