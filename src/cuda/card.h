// What choices need to know of a CUDA card, and the current device. Includes no CUDA header.
#pragma once

#include <cstdint>

#include "blocksparse/status.h"
#include "blocksparse/tensor.h"

namespace blocksparse::cuda {

struct Card {
  int32_t arch = 0;  // compute capability: 90 is 9.0
  int32_t multiprocessors = 0;
  int32_t shared_bytes = 99 * 1024;  // the most that a thread block may ask for
  bool sm90a = false;  // this build holds code for compute capability 9.0 and all its features, and the card runs it
};

inline constexpr int32_t kOldestArch = 80;

// The card of a device, or the reason why it cannot be used.
Result<Card> card_of(Device device);

// Makes a device the current one of this thread while the object lives.
class OnDevice {
 public:
  explicit OnDevice(Device device);
  ~OnDevice();
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  const Status& status() const { return status_; }

 private:
  Status status_;
  int before_ = -1;  // -1: nothing to restore
};

}  // namespace blocksparse::cuda
