// Something that is done once for each device.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>

#include "blocksparse/status.h"
#include "blocksparse/tensor.h"

namespace blocksparse::cuda {

// What an op does before its first launch on a device.
class OncePerDevice {
 public:
  // prepare(), unless it has succeeded for that device. Threads that meet here may both do it, which does no harm.
  template <class Prepare>
  Status operator()(Device device, Prepare prepare) {
    const auto index = static_cast<size_t>(device.index);
    if (index >= done_.size()) return prepare();
    if (done_[index].load(std::memory_order_acquire)) return {};
    BS_RETURN_IF_ERROR(prepare());
    done_[index].store(true, std::memory_order_release);
    return {};
  }

 private:
  std::array<std::atomic<bool>, 64> done_{};
};

}  // namespace blocksparse::cuda
