// Registers the PyTorch ops' C++ kernels. They only save the overhead of those that the Python package registers
// without them: calls with next to nothing to compute take 3 to 6 us instead of 18 to 35 (one core,
// benchmarks/calls.py).
#include <algorithm>
#include <iterator>
#include <string_view>

#include "adapters/torch_api.h"
#include "blocksparse/c_api.h"

namespace {

using namespace blocksparse;           // NOLINT(google-build-using-namespace)
using namespace blocksparse::pytorch;  // NOLINT(google-build-using-namespace)

const char* register_kernels(std::string_view name, int32_t device_type) {
  static const char* const missing = find_api();
  if (missing != nullptr) return missing;
  const bool on_card = device_type == BS_CUDA;
  if (on_card) {
    static const char* const missing_cuda = find_cuda();
    if (missing_cuda != nullptr) return missing_cuda;
  }
  struct Family {
    std::string_view name;
    std::span<const Row> rows;
    bool takes_lists;
  };
  const Family families[] = {{"linear", linear_kernels(), false},
                             {"conv", conv_kernels(), true},
                             {"lstm", lstm_kernels(), false},
                             {"glu", glu_kernels(), false}};
  const auto* family = std::ranges::find(families, name, &Family::name);
  if (family == std::end(families)) return "there is no such family";
  if (family->takes_lists && (api.list_size == nullptr || api.list_item == nullptr || api.delete_list == nullptr)) {
    return "torch_list_size";
  }
  Handle library = nullptr;  // lives as long as the process: the kernels do
  bool refused = api.library_init_impl("blocksparse", on_card ? "CUDA" : "CPU", "torch_shim.cc", 1, &library) != 0;
  for (const Row& row : family->rows) {
    refused = refused || api.library_impl(library, row.op, row.kernel) != 0;
  }
  return refused ? "PyTorch refused to register the kernels" : "";
}

}  // namespace

extern "C" const char* bs_torch_register(const char* family, int32_t device_type) {
  return register_kernels(family == nullptr ? "" : family, device_type);
}
