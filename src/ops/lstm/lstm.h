// The LSTM op inside: what a checked call looks like.
#pragma once

#include <cstdint>

#include "blocksparse/lstm.h"
#include "core/gates.h"
#include "cpu/isa.h"

namespace blocksparse::lstm {

// What both passes share. All tensors are contiguous; null where they are not given.
struct Sequence {
  DType dtype = DType::f32;
  LayoutView layout;  // [4 H, H]
  int64_t steps = 0, n = 0, hidden = 0;
  const void* w = nullptr;
  const void *h0 = nullptr, *c0 = nullptr;
  const int64_t* lengths = nullptr;  // where the tensors lie

  // On the CPU.
  int64_t length(int64_t token) const { return lengths == nullptr ? steps : lengths[token]; }
  // One past the last sequence that still runs at step t: the rest is not computed.
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

// Of n sequences; on a card they cannot be looked at. Other ops over sequences ask too.
Status check_lengths(const char* op, Device device, const int64_t* lengths, int64_t n, int64_t steps);

// The plain loops in double precision: the specification, and what tests compare with.
void reference_forward(const Forward& f);
void reference_backward(const Backward& b);

Status cpu_forward(const Forward& f, Isa isa, Workspace workspace, int32_t threads);
Status cpu_backward(const Backward& b, Isa isa, Workspace workspace, int32_t threads);
size_t cpu_forward_workspace_size(const LayoutView& layout, DType dtype, int64_t n);
size_t cpu_backward_workspace_size(const LayoutView& layout, DType dtype, int64_t steps, int64_t n);

// The CUDA path, or in builds without it the answer `unavailable`.
Status cuda_forward(const Forward& f, Workspace workspace, Stream stream);
Status cuda_backward(const Backward& b, Workspace workspace, Stream stream);
size_t cuda_forward_workspace_size(const LayoutView& layout, DType dtype, int64_t n);
size_t cuda_backward_workspace_size(const LayoutView& layout, DType dtype, int64_t steps, int64_t n);
Status prepare_cuda(Device device);

}  // namespace blocksparse::lstm
