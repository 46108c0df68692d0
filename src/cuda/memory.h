// Device memory for tests and benchmarks; the library itself allocates none. No CUDA header.
#pragma once

#include <cstddef>
#include <memory>

#include "blocksparse/status.h"
#include "blocksparse/tensor.h"

namespace blocksparse::cuda {

// Freed with its last owner.
Result<std::shared_ptr<void>> allocate(Device device, size_t bytes);

// Done on return, after everything that was queued before.
Status copy_to_device(Device device, void* to, const void* from, size_t bytes);
Status copy_to_host(Device device, void* to, const void* from, size_t bytes);
Status synchronise(Device device);

}  // namespace blocksparse::cuda
