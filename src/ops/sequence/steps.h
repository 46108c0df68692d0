// Parts of recurrent ops with several products a step: sizes, parts of a step, and checks.
#pragma once

#include <span>

#include "core/ceil_div.h"
#include "core/checked_tensors.h"
#include "ops/sequence/machine.h"

namespace blocksparse::sequence {

// A pointer is null if its tensor is not given.
struct Steps {
  DType dtype = DType::f32;
  Device device;
  int64_t steps = 0, n = 0, hidden = 0;
  const void *factor = nullptr, *h0 = nullptr, *c0 = nullptr;
  const int64_t* lengths = nullptr;  // on the device of the tensors
};

// Tensors that share one piece of memory begin at multiples of 64 bytes.
inline int64_t part_bytes(int64_t bytes) { return round_up(bytes, 64); }

// A block-sparse W [rows, H], which may be stored transposed.
struct Weight {
  LayoutView layout;
  const void* w = nullptr;

  int64_t rows() const { return layout.outputs(); }
};

// Runs parts of steps.
struct StepRunner {
  const Steps& s;
  const Machine& on;
  DType state = sum_dtype(s.dtype);
  int64_t one = s.n * s.hidden;  // elements of [n, H]

  // y = x W^T + residual, or x W + residual by_in. `behind`: the kernel in front made x, and nothing else that this
  // reads.
  Status product(const Weight& w, bool by_in, const void* x, void* y, const void* residual, bool behind) const;
  // dW = or += sum over `tokens` of dy^T x. With dw null it does nothing.
  Status gradient(const Weight& w, void* dw, DType dw_dtype, const void* x, const void* dy, int64_t tokens,
                  bool accumulate) const;
  void set_step(int64_t t, lstm::CellStep& step) const;
  // Copies the state of sequences that have no step.
  Status copy_of_empty(const void* from, void* to, DType dtype) const;
};

// ---- Checks at the edge ---------------------------------------------------------------------------------------------

// Whether sizes and dtype of a problem are right.
bool is_right(const Steps& s);
// Checks `factor` [steps, n, H] and takes sizes, dtype and device from it.
Status check_steps(const char* op, const ConstTensor& factor, Steps& s);
Status check_layout(const char* op, const char* name, const LayoutView& layout, int64_t rows, const Steps& s);
Status check_saved(const char* op, const Workspace& saved, int64_t needed);

// The workspace bytes of the products of a forward or a backward pass with such a layout.
size_t forward_product_bytes(const LayoutView& layout, const Steps& s);
size_t backward_product_bytes(const LayoutView& layout, const Steps& s);

}  // namespace blocksparse::sequence
