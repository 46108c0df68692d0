// The kernels that this process is held to, for tests and measurements: set_cuda_kernel(), or BLOCKSPARSE_CUDA_KERNEL
// in the environment. One name or several, separated by commas: a call is done by the first family of
// families.inc that is named and can.
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
  uint32_t names_ = 0;  // a bit for each of kernel_names()
};

// Empty if the choice is free. An error where the environment names what there is not.
Result<ForcedKernels> forced_kernels();
bool kernels_are_forced();
Status force_kernels(std::string_view names);  // "": the choice is free, unless the environment says otherwise

// All that can be named: the families of this engine and what ops have besides, best first. Ops are above the engine,
// so this is defined where both are known, in ops/cuda_kernels.cc.
std::span<const std::string_view> kernel_names();

}  // namespace blocksparse::gemm
