// The CUDA kernels of all ops: their names, and how they are loaded.
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "blocksparse/blocksparse.h"
#include "core/text.h"
#include "gemm/cuda/families.h"
#include "gemm/cuda/forced.h"
#include "gemm/product.h"
#include "ops/bias/bias.h"
#include "ops/conv/conv.h"
#include "ops/conv/cuda/select.h"
#include "ops/glu/glu.h"
#include "ops/lstm/lstm.h"
#include "ops/norm/norm.h"

namespace blocksparse {

namespace gemm {

std::span<const std::string_view> kernel_names() {
  static const std::vector<std::string_view> names = [] {
    std::vector<std::string_view> list;
    for (conv::CudaWay way : {conv::CudaWay::halo, conv::CudaWay::halo_block, conv::CudaWay::gather}) {
      list.push_back(name_of(way));
    }
    for (const Family& family : families()) list.push_back(family.name);
    return list;
  }();
  return names;
}

}  // namespace gemm

std::vector<std::string> cuda_kernels() {
  const auto names = gemm::kernel_names();
  return {names.begin(), names.end()};
}

Status set_cuda_kernel(std::string_view names) { return gemm::force_kernels(names); }

Status cuda_prepare(Device device) {
  BS_RETURN_IF_ERROR(gemm::prepare_cuda(device));
  BS_RETURN_IF_ERROR(bias::prepare_cuda(device));
  BS_RETURN_IF_ERROR(conv::prepare_cuda(device));
  BS_RETURN_IF_ERROR(glu::prepare_cuda(device));
  BS_RETURN_IF_ERROR(lstm::prepare_cuda(device));
  return norm::prepare_cuda(device);
}

}  // namespace blocksparse
