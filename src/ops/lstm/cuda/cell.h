// The cell's arithmetic on a card: one kernel a step, behind the product that made its sums.
#pragma once

#include "ops/lstm/cell.h"

namespace blocksparse::lstm {

// Launches on the current device. `overlap`: the cell may begin before the kernel in front has ended. The kernel behind
// may overlap the cell too, and may read at once everything that the cell does not write.
Status launch_cell(const ForwardCell& step, DType dtype, bool overlap, void* stream);
Status launch_cell(const BackwardCell& step, DType dtype, bool overlap, void* stream);
Status launch_copy(const CopyOfEmpty& copy, DType dtype, void* stream);
Status launch_multiply(const Multiply& m, DType dtype, bool overlap, void* stream);

Status prepare_cells();  // for the current device
bool cells_overlap();    // whether the current device's code can wait for the kernel in front

}  // namespace blocksparse::lstm
