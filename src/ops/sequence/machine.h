// Runs the parts of a recurrent network's step on the device of its tensors.
#pragma once

#include "blocksparse/dtype.h"
#include "cpu/isa.h"
#include "cpu/threads.h"
#include "gemm/product.h"
#include "ops/lstm/cell.h"

namespace blocksparse::sequence {

struct Machine {
  Device device;
  Stream stream;
  Isa isa = Isa::reference;
  int32_t threads = 1;
  Workspace linear;  // of the products

  // The products have the workspace from byte `linear` on.
  static Result<Machine> of(Device device, Stream stream, Workspace workspace, int64_t linear) {
    const auto first = static_cast<size_t>(linear);
    Machine m{.device = device, .stream = stream, .linear = {}};
    m.linear = {static_cast<char*>(workspace.data) + first, workspace.bytes - first};
    if (m.on_card()) return m;
    const auto isa = current_isa();
    if (!isa.ok()) return isa.status();
    m.isa = *isa;
    m.threads = threads_for(stream.threads);
    return m;
  }
  bool on_card() const { return device.type == DeviceType::cuda; }
  Status product(const gemm::Product& p) const {
    return on_card() ? gemm::cuda_product(p, linear, stream) : gemm::cpu_product(p, isa, linear, threads);
  }
  Status gradient(const gemm::WeightGradient& g) const {
    return on_card() ? gemm::cuda_weight_gradient(g, linear, stream)
                     : gemm::cpu_weight_gradient(g, isa, linear, threads);
  }
  template <class Cell>
  Status cell(const Cell& step, DType dtype) const {
    return on_card() ? cuda_cell(step, dtype, device, stream) : cpu_cell(step, dtype, isa, threads);
  }
  Status copy(const lstm::CopyOfEmpty& copy, DType dtype) const {
    if (on_card()) return cuda_copy(copy, dtype, device, stream);
    cpu_copy(copy, dtype);
    return {};
  }
  Status multiply(const lstm::Multiply& m, DType dtype) const {
    return on_card() ? cuda_multiply(m, dtype, device, stream) : cpu_multiply(m, dtype, isa, threads);
  }
};

inline const char* advance(const void* data, int64_t elements, DType dtype) {
  return data == nullptr ? nullptr : static_cast<const char*>(data) + elements * size_of(dtype);
}
inline char* advance(void* data, int64_t elements, DType dtype) {
  return data == nullptr ? nullptr : static_cast<char*>(data) + elements * size_of(dtype);
}

}  // namespace blocksparse::sequence
