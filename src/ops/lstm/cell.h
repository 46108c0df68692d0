// One step of the cell for ops that do their own products: z is `pre`, and the gradient from the step behind is in
// `dy`.
#pragma once

#include "blocksparse/status.h"
#include "blocksparse/stream.h"
#include "blocksparse/tensor.h"
#include "ops/lstm/cpu/kernels.h"

namespace blocksparse::lstm {

// On a card `lengths` may have any values: one that is out of range counts as the nearest right one.
struct ForwardCell : ForwardStep {
  int64_t n = 0;
  const void* sums = nullptr;  // on a card: [n, 4, H], dtype of pre; null: 0
};

struct BackwardCell : BackwardStep {
  int64_t n = 0;
  const void* sums = nullptr;  // on a card: [n, H], dtype of dpre: from the step behind; null: 0
};

// Copies the rows of sequences that have no step: `to` becomes `from` (null: 0). With lengths null it copies all rows.
struct CopyOfEmpty {
  int64_t n = 0, hidden = 0;
  const int64_t* lengths = nullptr;
  const void* from = nullptr;
  void* to = nullptr;  // null: nothing is done
};

// hidden must be a multiple of 8; `block` is ignored.
Status cpu_cell(const ForwardCell& step, DType dtype, Isa isa, int32_t threads);
Status cpu_cell(const BackwardCell& step, DType dtype, Isa isa, int32_t threads);
void cpu_copy(const CopyOfEmpty& copy, DType dtype);
Status cpu_multiply(const Multiply& m, DType dtype, Isa isa, int32_t threads);

// The kernels behind cells and products may begin while these run. They may read at once everything that these do not
// write.
Status cuda_cell(const ForwardCell& step, DType dtype, Device device, Stream stream);
Status cuda_cell(const BackwardCell& step, DType dtype, Device device, Stream stream);
Status cuda_copy(const CopyOfEmpty& copy, DType dtype, Device device, Stream stream);
Status cuda_multiply(const Multiply& m, DType dtype, Device device, Stream stream);

}  // namespace blocksparse::lstm
