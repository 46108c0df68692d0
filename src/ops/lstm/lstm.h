// The LSTM op inside: a call that is checked.
#pragma once

#include <cstdint>

#include "blocksparse/lstm.h"
#include "core/gates.h"
#include "cpu/isa.h"

namespace blocksparse::lstm {

// What both passes share. All tensors are contiguous; a pointer is null if its tensor is not given.
struct Sequence {
  DType dtype = DType::f32;
  LayoutView layout;  // [4 H, H]
  int64_t steps = 0, n = 0, hidden = 0;
  const void* w = nullptr;
  const void *h0 = nullptr, *c0 = nullptr;
  const int64_t* lengths = nullptr;  // on the device of the tensors

  // On the CPU alone:
  int64_t length(int64_t token) const { return lengths == nullptr ? steps : lengths[token]; }
  // One past the last sequence that still runs at step t. The sequences behind it are not computed.
  int64_t running(int64_t t) const;
};

struct Forward : Sequence {
  const void* pre = nullptr;
  void *y = nullptr, *h = nullptr, *c = nullptr;
  void *gates = nullptr, *cells = nullptr;
};

struct Backward : Sequence {
  const void *y = nullptr, *gates = nullptr, *cells = nullptr;
  const void *dy = nullptr, *dh = nullptr, *dc = nullptr;
  void *dpre = nullptr, *dh0 = nullptr, *dc0 = nullptr;
  void* dw = nullptr;
  DType dw_dtype = DType::f32;
  bool accumulate = false;
};

// Checks the lengths of n sequences, unless they are on a card. Other ops over sequences call it too.
Status check_lengths(const char* op, Device device, const int64_t* lengths, int64_t n, int64_t steps);

// Plain loops in double precision: the specification, with which tests compare.
void reference_forward(const Forward& f);
void reference_backward(const Backward& b);

Status cpu_forward(const Forward& f, Isa isa, Workspace workspace, int32_t threads);
Status cpu_backward(const Backward& b, Isa isa, Workspace workspace, int32_t threads);
size_t cpu_forward_workspace_size(const LayoutView& layout, DType dtype, int64_t n);
size_t cpu_backward_workspace_size(const LayoutView& layout, DType dtype, int64_t steps, int64_t n);

// The CUDA path. A build without it returns `unavailable`.
Status cuda_forward(const Forward& f, Workspace workspace, Stream stream);
Status cuda_backward(const Backward& b, Workspace workspace, Stream stream);
size_t cuda_forward_workspace_size(const LayoutView& layout, DType dtype, int64_t n);
size_t cuda_backward_workspace_size(const LayoutView& layout, DType dtype, int64_t steps, int64_t n);
Status prepare_cuda(Device device);

}  // namespace blocksparse::lstm
