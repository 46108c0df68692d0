// The CUDA entry points of a build without CUDA: they return `unavailable`, or an empty list.
#include "blocksparse/blocksparse.h"
#include "cuda/memory.h"
#include "gemm/product.h"
#include "ops/bias/bias.h"
#include "ops/conv/conv.h"
#include "ops/glu/glu.h"
#include "ops/lstm/cell.h"
#include "ops/lstm/lstm.h"
#include "ops/norm/norm.h"

namespace blocksparse {

Status cuda_status() {
  return {StatusCode::unavailable,
          "[cuda] this library was built without CUDA; build it with nvcc and -DBLOCKSPARSE_CUDA=ON"};
}

std::vector<std::string> cuda_kernels() { return {}; }
Status set_cuda_kernel(std::string_view) { return cuda_status(); }
Status cuda_prepare(Device) { return cuda_status(); }
Status cuda_leave_multiprocessors(int32_t) { return cuda_status(); }
Result<Device> cuda_current_device() { return cuda_status(); }

Status make_device_index(const uint8_t*, const LayoutView::Sizes&, std::span<int32_t>, Device, Workspace, Stream) {
  return cuda_status();
}

namespace cuda {

Result<std::shared_ptr<void>> allocate(Device, size_t) { return cuda_status(); }
Status copy_to_device(Device, void*, const void*, size_t) { return cuda_status(); }
Status copy_to_host(Device, void*, const void*, size_t) { return cuda_status(); }
Status synchronise(Device) { return cuda_status(); }

}  // namespace cuda

namespace gemm {

Status cuda_product(const Product&, Workspace, Stream) { return cuda_status(); }
Status cuda_weight_gradient(const WeightGradient&, Workspace, Stream) { return cuda_status(); }
size_t cuda_workspace_size(Pass, const LayoutView&, DType, int64_t) { return 0; }
bool cuda_fuses_glu(const LayoutView&, DType, int64_t) { return false; }
size_t cuda_glu_workspace_size(const LayoutView&, DType, int64_t) { return 0; }
Result<std::string> cuda_choice(const Product&, Math) { return cuda_status(); }
Result<std::string> cuda_choice(const WeightGradient&, Math) { return cuda_status(); }

}  // namespace gemm

namespace bias {

Status cuda_gradient(const Gradient&, Workspace, Device, Stream) { return cuda_status(); }

}  // namespace bias

namespace conv {

Status cuda_product(const Product&, Workspace, Stream) { return cuda_status(); }
Status cuda_weight_gradient(const WeightGradient&, Workspace, Stream) { return cuda_status(); }
size_t cuda_workspace_size(const Product&) { return 0; }
size_t cuda_workspace_size(const WeightGradient&) { return 0; }
Result<std::string> cuda_choice(const Product&) { return cuda_status(); }
Result<std::string> cuda_choice(const WeightGradient&) { return cuda_status(); }

}  // namespace conv

namespace lstm {

Status cuda_forward(const Forward&, Workspace, Stream) { return cuda_status(); }
Status cuda_backward(const Backward&, Workspace, Stream) { return cuda_status(); }
size_t cuda_forward_workspace_size(const LayoutView&, DType, int64_t) { return 0; }
size_t cuda_backward_workspace_size(const LayoutView&, DType, int64_t, int64_t) { return 0; }
Status cuda_cell(const ForwardCell&, DType, Device, Stream) { return cuda_status(); }
Status cuda_cell(const BackwardCell&, DType, Device, Stream) { return cuda_status(); }
Status cuda_copy(const CopyOfEmpty&, DType, Device, Stream) { return cuda_status(); }
Status cuda_multiply(const Multiply&, DType, Device, Stream) { return cuda_status(); }

}  // namespace lstm

namespace norm {

Status cuda_forward(const Forward&, Device, Stream) { return cuda_status(); }
Status cuda_backward(const Backward&, Device, Stream) { return cuda_status(); }
Status cuda_cell_forward(const CellForward&, Device, Stream) { return cuda_status(); }

}  // namespace norm

namespace glu {

Status cuda_forward(const Forward&, Device, Stream) { return cuda_status(); }
Status cuda_backward(const Backward&, Device, Stream) { return cuda_status(); }

}  // namespace glu

}  // namespace blocksparse
