// What recurrent ops of several products a step share: sizes, the parts of a step, and the checks of both.
#pragma once

#include <span>

#include "core/checked_tensors.h"
#include "ops/sequence/machine.h"

namespace blocksparse::sequence {

// Null where not given.
struct Steps {
  DType dtype = DType::f32;
  Device device;
  int64_t steps = 0, n = 0, hidden = 0;
  const void *factor = nullptr, *h0 = nullptr, *c0 = nullptr;
  const int64_t* lengths = nullptr;  // where the tensors lie
};

// Tensors in one piece of memory begin at multiples of 64 bytes.
inline int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

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

  // y = x W^T + residual, or x W + residual by_in. `behind`: the kernel in front made x, and nothing else that is read.
  Status product(const Weight& w, bool by_in, const void* x, void* y, const void* residual, bool behind) const;
  // dW, or dW += sum over `tokens` of dy^T x; dw null: nothing is done.
  Status gradient(const Weight& w, void* dw, DType dw_dtype, const void* x, const void* dy, int64_t tokens,
                  bool accumulate) const;
  void set_step(int64_t t, lstm::CellStep& step) const;
  // The state of sequences that have no step at all.
  Status copy_of_empty(const void* from, void* to, DType dtype) const;
};

// ---- Checks at the edge ---------------------------------------------------------------------------------------------

// Sizes and dtype, of a problem.
bool is_right(const Steps& s);
// Sizes, dtype and device, which `factor` [steps, n, H] tells.
Status check_steps(const char* op, const ConstTensor& factor, Steps& s);
Status check_layout(const char* op, const char* name, const LayoutView& layout, int64_t rows, const Steps& s);
Status check_saved(const char* op, const Workspace& saved, int64_t needed);

// Bytes that the products of a forward and of a backward pass with such a layout need.
size_t forward_product_bytes(const LayoutView& layout, const Steps& s);
size_t backward_product_bytes(const LayoutView& layout, const Steps& s);

}  // namespace blocksparse::sequence
