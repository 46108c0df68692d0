// The products of every op: what is to be computed, after the op's edge has checked the call.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "blocksparse/glu.h"
#include "blocksparse/ops.h"
#include "core/index.h"
#include "cpu/isa.h"

namespace blocksparse::gemm {

enum class Pass : int32_t { fprop = 0, dgrad = 1, wgrad = 2 };
std::string_view name_of(Pass pass);

// Activations after the edge has checked them. All leading dimensions are one.
struct Activations {
  const void* data = nullptr;
  int64_t n = 0, features = 0;
  int64_t token_stride = 0, feature_stride = 0;  // in elements; one of them is 1

  bool features_first() const { return feature_stride != 1; }
};

// fprop, and dgrad as fprop on the transposed layout.
struct Product {
  DType dtype = DType::f32;
  LayoutView layout;
  bool by_in = false;    // walk columns of W and read each block transposed
  Activations x, y;      // y.data is written
  Activations residual;  // data null: none
  const void* w = nullptr;
  const void* gates = nullptr;
  const void* bias = nullptr;
  Activation activation = Activation::none;
  // The sums are gate and up of a gated linear unit (glu.h), and y = f(gate) * up has half as many features. b >= 16,
  // no residual, y features-last.
  bool glu = false;
  // CUDA: the kernel before this one on the stream writes x and nothing else that this product reads, and it lets this
  // product begin only after it has waited for all kernels before it (every kernel here that calls
  // griddepcontrol.launch_dependents does). Everything except x may then be read at once.
  bool x_is_last = false;
  // The four quarters of y are gates, whose rows of blocks mostly have the same columns. It matters for speed alone.
  bool quarters_are_alike = false;

  int64_t outputs() const { return glu ? interleaved_features(y.features) : y.features; }  // rows of W
};

struct GradTerm {
  Activations x, dy;
};

struct WeightGradient {
  DType dtype = DType::f32;
  DType dw_dtype = DType::f32;
  LayoutView layout;
  std::span<const GradPair> pairs;  // checked pairs; term() flattens one
  const void* w = nullptr;
  const void* gates = nullptr;
  void* dw = nullptr;
  void* dgates = nullptr;
  bool accumulate = false;
  bool exchanged = false;  // the layout is meant transposed: x and dy are exchanged

  GradTerm term(size_t i) const;
};

Activations flatten(const ConstTensor& tensor);  // only for tensors that the edge has checked

// Bytes of workspace for n tokens (wgrad: of all pairs together), for activations on `device`.
size_t workspace_size(Pass pass, const LayoutView& layout, DType dtype, int64_t n, Device device);
// Whether products with `glu` exist for the layout and type (on CUDA: among fprop's families), and their workspace.
bool fuses_glu(const LayoutView& layout, DType dtype, int64_t n, Device device);
size_t glu_workspace_size(const LayoutView& layout, DType dtype, int64_t n, Device device);

// The CPU path, with the kernels of an instruction set.
Status cpu_product(const Product& p, Isa isa, Workspace workspace, int32_t threads);
Status cpu_weight_gradient(const WeightGradient& g, Isa isa, Workspace workspace, int32_t threads);

// The CUDA path. In builds without CUDA these answer `unavailable`.
Status cuda_product(const Product& p, Workspace workspace, Stream stream);
Status cuda_weight_gradient(const WeightGradient& g, Workspace workspace, Stream stream);
Status prepare_cuda(Device device);
size_t cuda_workspace_size(Pass pass, const LayoutView& layout, DType dtype, int64_t n);
bool cuda_fuses_glu(const LayoutView& layout, DType dtype, int64_t n);
size_t cuda_glu_workspace_size(const LayoutView& layout, DType dtype, int64_t n);
// The name of the kernel that would do a call. A list of pairs in several launches: the kernel of the first.
Result<std::string> cuda_choice(const Product& p, Math math);
Result<std::string> cuda_choice(const WeightGradient& g, Math math);

}  // namespace blocksparse::gemm
