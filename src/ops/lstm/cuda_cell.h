// The cell's arithmetic on a card: one kernel a step, behind the product that made its sums.
#pragma once

#include <cstdint>

#include "ops/lstm/kernels.h"

namespace blocksparse::lstm {

// `lengths` lie on the card, and may be anything there: what is out of range counts as the nearest that is right.
struct ForwardCell : ForwardStep {
  int64_t n = 0;
  const void* sums = nullptr;  // [n, 4, H], dtype of pre; null: 0
};

struct BackwardCell : BackwardStep {
  int64_t n = 0;
  const void* sums = nullptr;  // [n, H], dtype of dpre: from the step behind; null: 0
};

// The rows of sequences that have no step at all: `to` is `from` there (null: 0). With lengths null, all rows.
struct CopyOfEmpty {
  int64_t n = 0, hidden = 0;
  const int64_t* lengths = nullptr;
  const void* from = nullptr;
  void* to = nullptr;
};

// On the current device. `overlap`: may begin before the kernel in front has ended. The kernel behind may do so, too,
// and read at once all but what the cell writes.
Status launch_cell(const ForwardCell& step, DType dtype, bool overlap, void* stream);
Status launch_cell(const BackwardCell& step, DType dtype, bool overlap, void* stream);
Status launch_copy(const CopyOfEmpty& copy, DType dtype, void* stream);

Status prepare_cells();  // for the current device
bool cells_overlap();    // whether the current device's code can wait

}  // namespace blocksparse::lstm
