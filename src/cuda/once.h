// What is done, or found out, once for each device.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>

#include "blocksparse/status.h"
#include "blocksparse/tensor.h"
#include "core/text.h"

namespace blocksparse::cuda {

inline constexpr size_t kMostDevices = 64;  // that are remembered

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
  std::array<std::atomic<bool>, kMostDevices> done_{};
};

// What an op asks of a device once: yes or no.
class KnownPerDevice {
 public:
  // What find() answered for that device, a Result<bool>, or answers now. Threads that meet here may both ask, which
  // does no harm; an error is not remembered.
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
