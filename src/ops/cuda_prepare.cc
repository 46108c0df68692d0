// Loads all ops' kernels.
#include "blocksparse/blocksparse.h"
#include "core/text.h"
#include "ops/conv/conv.h"
#include "gemm/product.h"
#include "ops/lstm/lstm.h"
#include "ops/norm/norm.h"

namespace blocksparse {

Status cuda_prepare(Device device) {
  BS_RETURN_IF_ERROR(gemm::prepare_cuda(device));
  BS_RETURN_IF_ERROR(conv::prepare_cuda(device));
  BS_RETURN_IF_ERROR(lstm::prepare_cuda(device));
  return norm::prepare_cuda(device);
}

}  // namespace blocksparse
