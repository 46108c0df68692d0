// Things that are done, or found out, once for each device.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>

#include "blocksparse/status.h"
#include "blocksparse/tensor.h"
#include "core/text.h"

namespace blocksparse::cuda {

inline constexpr size_t kMostDevices = 64;  // devices that are remembered

// A preparation that an op needs before its first launch on a device.
class OncePerDevice {
 public:
  // Calls prepare(), unless it has succeeded for the device. Threads that arrive together may both call it, which is
  // harmless.
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
  std::array<std::atomic<bool>, kMostDevices> done_{};
};

// A yes-or-no question that an op asks of a device once.
class KnownPerDevice {
 public:
  // The answer of find() for the device, a Result<bool>, now or earlier. Threads that arrive together may both ask,
  // which is harmless. An error is not remembered.
  template <class Find>
  Result<bool> operator()(Device device, Find find) {
    const auto index = static_cast<size_t>(device.index);
    if (index >= known_.size()) return find();
    const Answer seen = known_[index].load(std::memory_order_acquire);
    if (seen != Answer::unknown) return seen == Answer::yes;
    const Result<bool> found = find();
    if (found.ok()) known_[index].store(*found ? Answer::yes : Answer::no, std::memory_order_release);
    return found;
  }

 private:
  enum class Answer : int { unknown = 0, no, yes };
  std::array<std::atomic<Answer>, kMostDevices> known_{};
};

}  // namespace blocksparse::cuda
