// The layer norm inside: a call that is checked.
#pragma once

#include <cstdint>

#include "blocksparse/norm.h"
#include "cpu/isa.h"

namespace blocksparse::norm {

// A pointer is null if its tensor is not given. Rows are the groups of all tokens.
struct Forward {
  DType dtype = DType::f32;
  int64_t n = 0, groups = 1, features = 0;
  bool relu = false;
  double epsilon = 0;
  const void *x = nullptr, *gain = nullptr, *shift = nullptr, *factor = nullptr, *term = nullptr;
  void *y = nullptr, *stats = nullptr;

  int64_t rows() const { return n * groups; }
};

struct Backward {
  DType dtype = DType::f32;
  int64_t n = 0, groups = 1, features = 0;
  bool relu = false;
  bool accumulate = false;  // adds to dgain and dshift; on the CPU alone
  const void *x = nullptr, *gain = nullptr, *shift = nullptr, *factor = nullptr, *y = nullptr, *stats = nullptr;
  const void* dy = nullptr;
  void *dx = nullptr, *dgain = nullptr, *dshift = nullptr, *dfactor = nullptr, *dterm = nullptr;

  int64_t rows() const { return n * groups; }
};

// The norm of each gate of z [n, 4, features], and one step of an LSTM's cell on them (lstm.h), on a card. The
// normalised gates are not rounded in between.
struct CellForward {
  DType dtype = DType::f32;
  int64_t n = 0, features = 0;
  double epsilon = 0;
  const void *z = nullptr, *gain = nullptr, *shift = nullptr;  // [n, 4, features], [4, features]
  const void* c_before = nullptr;                              // [n, features]; null: 0
  void *h = nullptr, *c = nullptr;                             // c may be c_before
  void* gates = nullptr;                                       // for backward; null: not wanted
  void* stats = nullptr;                                       // [n, 4, 2], for backward
  void *h_end = nullptr, *c_end = nullptr;                     // copies of h and c; null: none
};

Status cpu_forward(const Forward& f, Isa isa, int32_t threads);
Status cpu_backward(const Backward& b, Isa isa, int32_t threads);

// The CUDA path. A build without it returns `unavailable`.
Status cuda_forward(const Forward& f, Device device, Stream stream);
Status cuda_backward(const Backward& b, Device device, Stream stream);
Status cuda_cell_forward(const CellForward& f, Device device, Stream stream);
Status prepare_cuda(Device device);

}  // namespace blocksparse::norm
