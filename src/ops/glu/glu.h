// Gated linear units inside: a call that is checked.
#pragma once

#include <cstdint>

#include "blocksparse/glu.h"
#include "cpu/isa.h"

namespace blocksparse::glu {

// Matrices are features-last; `_token` is the step from one token to the next, in elements.
struct Forward {
  DType dtype = DType::f32;
  Activation activation = Activation::none;
  int64_t n = 0, hidden = 0;
  const void* z = nullptr;
  void* y = nullptr;
  int64_t z_token = 0, y_token = 0;

  int64_t groups() const { return interleaved_features(hidden) / (2 * kInterleaved); }
};

struct Backward {
  DType dtype = DType::f32;
  Activation activation = Activation::none;
  int64_t n = 0, hidden = 0;
  const void *z = nullptr, *dy = nullptr;
  void* dz = nullptr;
  int64_t z_token = 0, dy_token = 0, dz_token = 0;

  int64_t groups() const { return interleaved_features(hidden) / (2 * kInterleaved); }
};

// Plain loops in double precision: the specification, with which tests compare.
void reference_forward(const Forward& f);
void reference_backward(const Backward& b);

Status cpu_forward(const Forward& f, Isa isa, int32_t threads);
Status cpu_backward(const Backward& b, Isa isa, int32_t threads);

// Runs on the device, on the stream. z may lie in a workspace.
Status forward(const Forward& f, Device device, Stream stream);
Status backward(const Backward& b, Device device, Stream stream);

// The CUDA path. A build without it returns `unavailable`.
Status cuda_forward(const Forward& f, Device device, Stream stream);
Status cuda_backward(const Backward& b, Device device, Stream stream);
Status prepare_cuda(Device device);

}  // namespace blocksparse::glu
