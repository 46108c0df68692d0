// The multiplicative LSTM inside: a call that is checked, and how its memory is divided.
#pragma once

#include <cstdint>

#include "blocksparse/multiplicative.h"
#include "core/gates.h"
#include "ops/sequence/steps.h"

namespace blocksparse::multiplicative {

using sequence::part_bytes;

// What both passes share. A pointer is null if its tensor is not given.
struct Sequence : sequence::Steps {
  sequence::Weight m, gates;  // W_m and W
  const void* pre = nullptr;
};

struct Forward : Sequence {
  void *y = nullptr, *h = nullptr, *c = nullptr;
  char* saved = nullptr;
};

struct Backward : Sequence {
  const void* y = nullptr;
  const char* saved = nullptr;
  const void *dy = nullptr, *dh = nullptr, *dc = nullptr;
  void *dw_m = nullptr, *dw = nullptr, *dfactor = nullptr, *dpre = nullptr, *dh0 = nullptr, *dc0 = nullptr;
  DType dw_m_dtype = DType::f32, dw_dtype = DType::f32;
};

// ---- Memory, in bytes; every tensor begins at a multiple of 64 ------------------------------------------------------

// The results of the forward pass over `steps` steps.
struct Made {
  int64_t product = 0;  // W_m h [steps, n, H]
  int64_t m, gates, cells, total;

  Made(const Sequence& s, int64_t steps) {
    const int64_t one = steps * s.n * s.hidden;
    m = part_bytes(one * size_of(s.dtype));
    gates = 2 * m;
    cells = gates + part_bytes(kGates * one * size_of(s.dtype));
    total = cells + part_bytes(one * size_of(sum_dtype(s.dtype)));
  }
};

// The workspace of the forward pass: z, and if nothing is saved, the results of one step.
struct ForwardSpace {
  int64_t made, linear;

  explicit ForwardSpace(const Sequence& s)
      : made(part_bytes(kGates * s.n * s.hidden * size_of(s.dtype))), linear(made + Made(s, 1).total) {}
};

// The workspace of the backward pass: the gradients of W_m h of all steps, and of a step's m, h and c.
struct BackwardSpace {
  int64_t of_product = 0;
  int64_t dm, dh, dc, linear;

  explicit BackwardSpace(const Sequence& s) {
    const int64_t one = part_bytes(s.n * s.hidden * size_of(s.dtype));
    dm = part_bytes(s.steps * s.n * s.hidden * size_of(s.dtype));
    dh = dm + one;
    dc = dh + one;
    linear = dc + part_bytes(s.n * s.hidden * size_of(sum_dtype(s.dtype)));
  }
};

Status run_forward(const Forward& f, Workspace workspace, Stream stream);
Status run_backward(const Backward& b, Workspace workspace, Stream stream);

}  // namespace blocksparse::multiplicative
