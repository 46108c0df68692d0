// One step of the cell as others call it, behind products of their own: z is `pre`, and all that comes from the step
// behind is in `dy`.
#pragma once

#include "blocksparse/status.h"
#include "blocksparse/stream.h"
#include "blocksparse/tensor.h"
#include "ops/lstm/cpu/kernels.h"

namespace blocksparse::lstm {

// `lengths` may be anything on a card: what is out of range counts as the nearest that is right.
struct ForwardCell : ForwardStep {
  int64_t n = 0;
  const void* sums = nullptr;  // on a card: [n, 4, H], dtype of pre; null: 0
};

struct BackwardCell : BackwardStep {
  int64_t n = 0;
  const void* sums = nullptr;  // on a card: [n, H], dtype of dpre: from the step behind; null: 0
};

// The rows of sequences that have no step at all: `to` is `from` there (null: 0). With lengths null, all rows.
struct CopyOfEmpty {
  int64_t n = 0, hidden = 0;
  const int64_t* lengths = nullptr;
  const void* from = nullptr;
  void* to = nullptr;  // null: nothing is done
};

// hidden is a multiple of 8; `block` is not looked at.
Status cpu_cell(const ForwardCell& step, DType dtype, Isa isa, int32_t threads);
Status cpu_cell(const BackwardCell& step, DType dtype, Isa isa, int32_t threads);
void cpu_copy(const CopyOfEmpty& copy, DType dtype);
Status cpu_multiply(const Multiply& m, DType dtype, Isa isa, int32_t threads);

// The kernels behind cells and products may begin while these run, and read at once all but what they write.
Status cuda_cell(const ForwardCell& step, DType dtype, Device device, Stream stream);
Status cuda_cell(const BackwardCell& step, DType dtype, Device device, Stream stream);
Status cuda_copy(const CopyOfEmpty& copy, DType dtype, Device device, Stream stream);
Status cuda_multiply(const Multiply& m, DType dtype, Device device, Stream stream);

}  // namespace blocksparse::lstm
