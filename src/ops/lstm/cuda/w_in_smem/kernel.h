// The forward pass in one launch, where W fits on the chip: see select_cuda.h.
#pragma once

#include "ops/lstm/cuda/w_in_smem/plan.h"

namespace blocksparse::lstm {

// Whether all tensors begin where the kernel needs it.
bool resident_takes(const Forward& f);
// `memory` has resident_workspace_bytes() at a multiple of 16.
Status launch_resident(const Forward& f, const ResidentPlan& plan, void* memory, void* stream);
Status prepare_resident();  // for the current device

}  // namespace blocksparse::lstm
