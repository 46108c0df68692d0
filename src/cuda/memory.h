// Device memory for tests and benchmarks. The library itself allocates none. Includes no CUDA header.
#pragma once

#include <cstddef>
#include <memory>

#include "blocksparse/status.h"
#include "blocksparse/tensor.h"

namespace blocksparse::cuda {

// Freed with its last owner.
Result<std::shared_ptr<void>> allocate(Device device, size_t bytes);

// Each returns when it is done, after everything that was queued before it.
Status copy_to_device(Device device, void* to, const void* from, size_t bytes);
Status copy_to_host(Device device, void* to, const void* from, size_t bytes);
Status synchronise(Device device);

}  // namespace blocksparse::cuda
