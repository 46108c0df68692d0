// What every function of the C interface needs: translation of arguments, a catch of exceptions, the last error.
#pragma once

#include <algorithm>
#include <new>
#include <stdexcept>
#include <string>

#include "blocksparse/blocksparse.h"
#include "blocksparse/c_api.h"
#include "core/text.h"

namespace blocksparse::capi {

static_assert(BS_MAX_RANK == kMaxRank);

std::string& last_error();  // of this thread

inline bs_status answer(const Status& status) {
  std::string& error = last_error();
  if (status.ok()) {
    if (!error.empty()) error.clear();
    return BS_OK;
  }
  error = status.message();
  return static_cast<bs_status>(status.code());
}

// Runs `body` and turns exceptions into a status: none may pass through C.
template <class Body>
bs_status guarded(Body&& body) noexcept {
  try {
    return answer(body());
  } catch (const std::bad_alloc&) {
    last_error() = "out of memory";  // short enough to need no allocation
    return BS_OUT_OF_MEMORY;
  } catch (const std::length_error&) {
    last_error() = "out of memory";
    return BS_OUT_OF_MEMORY;
  }
}

inline Status need(const char* op, const char* name, const void* pointer) {
  if (pointer != nullptr) return {};
  return invalid("[", op, "] ", name, " is NULL");
}

inline LayoutView to_view(const bs_layout_view& v) {
  return {.index = v.index,
          .device = {static_cast<DeviceType>(v.device_type), v.device_index},
          .transposed = v.transposed != 0,
          .block_size = v.block_size,
          .out_features = v.out_features,
          .in_features = v.in_features,
          .blocks = v.blocks,
          .cut_by_out = v.cut_by_out != 0,
          .cut_by_in = v.cut_by_in != 0};
}

template <class T = Tensor>
T to_tensor(const bs_tensor* t) {
  T tensor;
  if (t == nullptr) return tensor;
  tensor.data = t->data;
  tensor.dtype = static_cast<DType>(t->dtype);
  tensor.device = {static_cast<DeviceType>(t->device_type), t->device_index};
  tensor.rank = t->rank;
  std::copy(std::begin(t->shape), std::end(t->shape), tensor.shape.begin());
  std::copy(std::begin(t->stride), std::end(t->stride), tensor.stride.begin());
  return tensor;
}

inline ConstTensor to_const(const bs_tensor* t) { return to_tensor<ConstTensor>(t); }

inline Epilogue to_epilogue(const bs_epilogue* e) {
  if (e == nullptr) return {};
  return {to_const(e->bias), to_const(e->residual), static_cast<Activation>(e->activation)};
}

inline Stream to_stream(const bs_stream& s) { return {s.handle, s.threads, static_cast<Math>(s.math)}; }
inline Workspace to_workspace(const bs_workspace& w) { return {w.data, w.bytes}; }

}  // namespace blocksparse::capi
