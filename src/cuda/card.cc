#include "cuda/card.h"

#include <algorithm>
#include <vector>

#include "blocksparse/blocksparse.h"
#include "cuda/error.h"

namespace blocksparse {

namespace cuda {

namespace {

Result<Card> look_at(int index) {
  Card card;
  int major = 0, minor = 0;
  const auto ask = [index](int& value, cudaDeviceAttr attribute) {
    return status_of(cudaDeviceGetAttribute(&value, attribute, index), "cudaDeviceGetAttribute");
  };
  BS_RETURN_IF_ERROR(ask(major, cudaDevAttrComputeCapabilityMajor));
  BS_RETURN_IF_ERROR(ask(minor, cudaDevAttrComputeCapabilityMinor));
  BS_RETURN_IF_ERROR(ask(card.multiprocessors, cudaDevAttrMultiProcessorCount));
  BS_RETURN_IF_ERROR(ask(card.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin));
  card.arch = 10 * major + minor;
  card.sm90a = card.arch == 90 && BLOCKSPARSE_SM90A;
  if (card.arch < kOldestArch) {
    return Status(StatusCode::unavailable, concat("[cuda] cuda:", index, " has compute capability ", major, ".", minor,
                                                  ", the kernels need 8.0 or newer"));
  }
  if (BLOCKSPARSE_IS_SLOW) {  // and no card has tested it
    return Status(StatusCode::unavailable,
                  "[cuda] this library was built for tests on a machine without a card, so its kernels are slow: build "
                  "and install it again here (make: QUICK_NVCC=OFF; CMake: -DBLOCKSPARSE_QUICK_NVCC=OFF)");
  }
  return card;
}

thread_local int32_t left_to_others = 0;  // multiprocessors, by cuda_leave_multiprocessors()

struct Cards {
  Status status;  // why there are no cards
  std::vector<Result<Card>> list;
};

// The cards of this machine. Cards do not come and go, so they are looked at once. No context is made on any of them.
const Cards& cards() {
  static const Cards all = [] {
    Cards found;
    int count = 0;
    const cudaError_t error = cudaGetDeviceCount(&count);
    if (error == cudaErrorInsufficientDriver) {
      found.status = {StatusCode::unavailable,
                      concat("[cuda] NVIDIA's driver is missing, or older than the CUDA ", CUDART_VERSION / 1000, ".",
                             CUDART_VERSION % 1000 / 10, " that this library was built with")};
    } else {
      found.status = status_of(error, "no card can be used");
    }
    for (int i = 0; i < count; ++i) found.list.push_back(look_at(i));
    return found;
  }();
  return all;
}

}  // namespace

Result<Card> card_of(Device device) {
  const Cards& all = cards();
  if (!all.status.ok()) return all.status;
  const auto count = static_cast<int32_t>(all.list.size());
  if (device.index < 0 || device.index >= count) {
    return invalid("[cuda] there is no cuda:", device.index, ", this machine has ", count, " cards");
  }
  Result<Card> card = all.list[static_cast<size_t>(device.index)];
  if (card.ok()) card->multiprocessors = std::max(1, card->multiprocessors - left_to_others);
  return card;
}

OnDevice::OnDevice(Device device) {
  int current = 0;
  status_ = status_of(cudaGetDevice(&current), "cudaGetDevice");
  if (!status_.ok() || current == device.index) return;
  status_ = status_of(cudaSetDevice(device.index), "cudaSetDevice");
  if (status_.ok()) before_ = current;
}

OnDevice::~OnDevice() {
  if (before_ >= 0) (void)cudaSetDevice(before_);
}

}  // namespace cuda

Status cuda_status() {
  const cuda::Cards& all = cuda::cards();
  if (!all.status.ok()) return all.status;
  for (const auto& card : all.list) {
    if (card.ok()) return {};
  }
  if (!all.list.empty()) return all.list[0].status();
  return {StatusCode::unavailable, "[cuda] this machine has no card"};
}

Status cuda_leave_multiprocessors(int32_t count) {
  if (count < 0) return invalid("[cuda] cannot leave ", count, " multiprocessors, needs 0 or more");
  cuda::left_to_others = count;
  return {};
}

Result<Device> cuda_current_device() {
  Device device{DeviceType::cuda, 0};
  BS_RETURN_IF_ERROR(cuda::status_of(cudaGetDevice(&device.index), "cudaGetDevice"));
  return device;
}

}  // namespace blocksparse
