#include "cuda/memory.h"

#include <algorithm>

#include "cuda/card.h"
#include "cuda/error.h"

namespace blocksparse::cuda {

Result<std::shared_ptr<void>> allocate(Device device, size_t bytes) {
  const OnDevice on(device);
  BS_RETURN_IF_ERROR(on.status());
  void* memory = nullptr;
  BS_RETURN_IF_ERROR(status_of(cudaMalloc(&memory, std::max<size_t>(bytes, 1)), "cudaMalloc"));
  return std::shared_ptr<void>(memory, [](void* p) { (void)cudaFree(p); });
}

Status copy_to_device(Device device, void* to, const void* from, size_t bytes) {
  BS_RETURN_IF_ERROR(synchronise(device));
  BS_RETURN_IF_ERROR(status_of(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice), "cudaMemcpy"));
  return synchronise(device);
}

Status copy_to_host(Device device, void* to, const void* from, size_t bytes) {
  BS_RETURN_IF_ERROR(synchronise(device));
  return status_of(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost), "cudaMemcpy");
}

Status synchronise(Device device) {
  const OnDevice on(device);
  BS_RETURN_IF_ERROR(on.status());
  return status_of(cudaDeviceSynchronize(), "a kernel failed");
}

}  // namespace blocksparse::cuda
