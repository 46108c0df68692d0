// The deep-update LSTM of the C interface.
#include "blocksparse/deep_update.h"

#include <array>

#include "capi/translate.h"
#include "ops/sequence/deep_update.h"

namespace {

using namespace blocksparse;        // NOLINT(google-build-using-namespace)
using namespace blocksparse::capi;  // NOLINT(google-build-using-namespace)

template <class T>
using PerMatrix = std::array<T, static_cast<size_t>(deep_update::kMostMatrices)>;

// The translated inputs, with the matrices that they point to.
struct Inputs {
  PerMatrix<DeepUpdateMatrix> matrices;
  DeepUpdateInputs in;

  Status set(const char* op, const bs_deep_update_inputs* given) {
    BS_RETURN_IF_ERROR(need(op, "inputs", given));
    const int32_t most = deep_update::kMostMatrices;
    if (given->count < 0 || given->count > most) {
      return invalid("[", op, "] there are ", given->count, " matrices, needs ", deep_update::kLeastMatrices, " to ",
                     most);
    }
    if (given->count > 0) BS_RETURN_IF_ERROR(need(op, "matrices", given->matrices));
    const auto count = static_cast<size_t>(given->count);
    for (size_t i = 0; i < count; ++i) {
      const bs_deep_update_matrix& m = given->matrices[i];
      BS_RETURN_IF_ERROR(need(op, "layout", m.layout));
      matrices[i] = {to_view(*m.layout), to_const(m.w), to_const(m.gain), to_const(m.shift)};
    }
    in = {.matrices = std::span(matrices).first(count),
          .factor = to_const(given->factor),
          .term = to_const(given->term),
          .h0 = to_const(given->h0),
          .c0 = to_const(given->c0),
          .lengths = given->lengths,
          .epsilon = given->epsilon};
    return {};
  }
};

size_t size_of_inputs(const bs_deep_update_inputs* given, size_t (*size)(const DeepUpdateProblem&, Device)) {
  Inputs inputs;
  if (!inputs.set("deep_update", given).ok() || inputs.in.matrices.empty()) return 0;
  const ConstTensor& factor = inputs.in.factor;
  if (factor.rank != 3 || factor.shape[2] != inputs.in.matrices.front().layout.inputs()) return 0;
  return size({.matrices = inputs.in.matrices, .dtype = factor.dtype, .steps = factor.shape[0], .n = factor.shape[1]},
              factor.device);
}

}  // namespace

extern "C" {

bs_status bs_deep_update_forward(const bs_deep_update_inputs* inputs, const bs_tensor* y, const bs_tensor* h,
                                 const bs_tensor* c, bs_workspace saved, bs_workspace workspace, bs_stream stream) {
  return guarded([&]() -> Status {
    Inputs given;
    BS_RETURN_IF_ERROR(given.set("deep_update_forward", inputs));
    return deep_update_forward(given.in, {to_tensor(y), to_tensor(h), to_tensor(c), to_workspace(saved)},
                               to_workspace(workspace), to_stream(stream));
  });
}

bs_status bs_deep_update_backward(const bs_deep_update_inputs* inputs, const bs_tensor* y, bs_workspace saved,
                                  const bs_tensor* dy, const bs_tensor* dh, const bs_tensor* dc,
                                  const bs_deep_update_grads* grads, bs_workspace workspace, bs_stream stream) {
  return guarded([&]() -> Status {
    const char* op = "deep_update_backward";
    Inputs given;
    BS_RETURN_IF_ERROR(given.set(op, inputs));
    BS_RETURN_IF_ERROR(need(op, "grads", grads));
    BS_RETURN_IF_ERROR(need(op, "gradients of matrices", grads->matrices));
    PerMatrix<DeepUpdateMatrixGrads> of_matrices;
    const size_t count = given.in.matrices.size();
    for (size_t i = 0; i < count; ++i) {
      const bs_deep_update_matrix_grads& g = grads->matrices[i];
      of_matrices[i] = {to_tensor(g.w), to_tensor(g.gain), to_tensor(g.shift)};
    }
    return deep_update_backward(given.in, {to_const(y), to_workspace(saved)},
                                {to_const(dy), to_const(dh), to_const(dc)},
                                {std::span(of_matrices).first(count), to_tensor(grads->factor), to_tensor(grads->term),
                                 to_tensor(grads->h0), to_tensor(grads->c0)},
                                to_workspace(workspace), to_stream(stream));
  });
}

size_t bs_deep_update_saved_size(const bs_deep_update_inputs* inputs) {
  return size_of_inputs(inputs, deep_update_saved_size);
}
size_t bs_deep_update_forward_workspace_size(const bs_deep_update_inputs* inputs) {
  return size_of_inputs(inputs, deep_update_forward_workspace_size);
}
size_t bs_deep_update_backward_workspace_size(const bs_deep_update_inputs* inputs) {
  return size_of_inputs(inputs, deep_update_backward_workspace_size);
}

}  // extern "C"
