#include "gemm/cuda/forced.h"

#include <atomic>
#include <cstdlib>
#include <optional>

#include "core/text.h"

namespace blocksparse::gemm {

namespace {

// Names from before 2026-11-25, which files of results contain.
struct OldName {
  std::string_view name, names;
};
constexpr OldName kOldNames[] = {
    {"few", "stream_w,stream_w_f32,wgrad_stream"},
    {"many", "wgmma,wgrad_wgmma,gather"},
    {"regions", "wgrad_in_registers"},
    {"tiled", "tiled_f32"},
    {"rows", "row_wgmma"},
    {"sweep", "stream_x"},
    {"resident", "w_in_smem"},
};

std::atomic<uint32_t> forced{0};

std::optional<uint32_t> bit_of(std::string_view name) {
  const auto names = kernel_names();
  for (size_t i = 0; i < names.size(); ++i) {
    if (names[i] == name) return uint32_t{1} << i;
  }
  return std::nullopt;
}

std::string names_in_one_line(uint32_t bits) {
  std::string text;
  for (std::string_view name : kernel_names()) {
    if ((bits & *bit_of(name)) != 0) text += concat(text.empty() ? "" : ", ", name);
  }
  return text;
}

Result<ForcedKernels> parse(std::string_view names) {
  uint32_t bits = 0;
  while (!names.empty()) {
    const size_t comma = std::min(names.find(','), names.size());
    const std::string_view name = names.substr(0, comma);
    names.remove_prefix(std::min(comma + 1, names.size()));
    const auto bit = bit_of(name);
    if (bit) {
      bits |= *bit;
      continue;
    }
    const OldName* old = nullptr;
    for (const OldName& known : kOldNames) {
      if (known.name == name) old = &known;
    }
    if (old == nullptr) {
      return invalid("[cuda] there is no kernel \"", name, "\"; there are ", names_in_one_line(~uint32_t{0}));
    }
    bits |= parse(old->names)->bits();
  }
  return ForcedKernels(bits);
}

}  // namespace

bool ForcedKernels::has(std::string_view name) const {
  const auto bit = bit_of(name);
  return bit && (names_ & *bit) != 0;
}

std::string ForcedKernels::text() const { return names_in_one_line(names_); }

Result<ForcedKernels> forced_kernels() {
  static const Result<ForcedKernels> from_environment = [] {
    const char* names = std::getenv("BLOCKSPARSE_CUDA_KERNEL");
    return parse(names == nullptr ? "" : names);
  }();
  const uint32_t asked = forced.load(std::memory_order_relaxed);
  if (asked != 0) return ForcedKernels(asked);
  return from_environment;
}

bool kernels_are_forced() {
  const auto names = forced_kernels();
  return names.ok() && names->any();
}

Status force_kernels(std::string_view names) {
  const auto parsed = parse(names);
  if (!parsed.ok()) return parsed.status();
  forced = parsed->bits();
  return {};
}

}  // namespace blocksparse::gemm
