// The forward pass in one launch, if W fits on the chip: see plan.h.
#pragma once

#include "ops/lstm/cuda/w_in_smem/plan.h"

namespace blocksparse::lstm {

// Whether all tensors are aligned as the kernel needs.
bool w_in_smem_takes(const Forward& f);
// `memory` has w_in_smem_workspace_bytes(), and begins at a multiple of 16.
Status launch_w_in_smem(const Forward& f, const WInSmemPlan& plan, void* memory, void* stream);
Status prepare_w_in_smem();  // for the current device

}  // namespace blocksparse::lstm
