// The cell's arithmetic on a card: one kernel a step, behind the product that made its sums.
#pragma once

#include "ops/lstm/cell.h"

namespace blocksparse::lstm {

// On the current device. `overlap`: may begin before the kernel in front has ended. The kernel behind may do so, too,
// and read at once all but what the cell writes.
Status launch_cell(const ForwardCell& step, DType dtype, bool overlap, void* stream);
Status launch_cell(const BackwardCell& step, DType dtype, bool overlap, void* stream);
Status launch_copy(const CopyOfEmpty& copy, DType dtype, void* stream);
Status launch_multiply(const Multiply& m, DType dtype, bool overlap, void* stream);

Status prepare_cells();  // for the current device
bool cells_overlap();    // whether the current device's code can wait

}  // namespace blocksparse::lstm
