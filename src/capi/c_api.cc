// The C interface translates, catches exceptions and remembers the last error; it has no logic of its own. This file
// holds the library's own functions. Layouts and each family of ops have files of their own.
#include "blocksparse/c_api.h"

#include <string>
#include <vector>

#include "blocksparse/blocksparse.h"
#include "capi/translate.h"
#include "cpu/threads.h"

namespace {

using namespace blocksparse;        // NOLINT(google-build-using-namespace)
using namespace blocksparse::capi;  // NOLINT(google-build-using-namespace)

std::string in_one_line(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : " ") + name;
  return text;
}

}  // namespace

namespace blocksparse::capi {

std::string& last_error() {
  thread_local std::string message;
  return message;
}

}  // namespace blocksparse::capi

extern "C" {

int32_t bs_abi_version(void) { return BS_ABI_VERSION; }
const char* bs_version(void) { return version().data(); }
const char* bs_last_error(void) { return last_error().c_str(); }

const char* bs_cpu_isas(void) {
  static const std::string names = in_one_line(cpu_isas());
  return names.c_str();
}

bs_status bs_cpu_isa(const char** name) {
  return guarded([&]() -> Status {
    BS_RETURN_IF_ERROR(need("isa", "name", name));
    const auto isa = cpu_isa();
    if (!isa.ok()) return isa.status();
    thread_local std::string held;
    held = *isa;
    *name = held.c_str();
    return {};
  });
}

bs_status bs_set_cpu_isa(const char* name) {
  return guarded([&]() -> Status {
    BS_RETURN_IF_ERROR(need("isa", "name", name));
    return set_cpu_isa(name);
  });
}

bs_status bs_cuda_status(void) {
  return guarded([] { return cuda_status(); });
}
const char* bs_cuda_kernels(void) {
  static const std::string names = in_one_line(cuda_kernels());
  return names.c_str();
}

bs_status bs_set_cuda_kernel(const char* name) {
  return guarded([&]() -> Status {
    BS_RETURN_IF_ERROR(need("cuda", "name", name));
    return set_cuda_kernel(name);
  });
}

bs_status bs_cuda_prepare(int32_t device_index) {
  return guarded([&] { return cuda_prepare({DeviceType::cuda, device_index}); });
}

bs_status bs_cuda_leave_multiprocessors(int32_t count) {
  return guarded([&] { return cuda_leave_multiprocessors(count); });
}

int32_t bs_default_threads(void) { return default_threads(); }

}  // extern "C"
