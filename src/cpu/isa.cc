#include "cpu/isa.h"

#include <atomic>
#include <cstdlib>

#include "core/text.h"

namespace blocksparse {

namespace {

constexpr int32_t kNotForced = -1;
std::atomic<int32_t> forced{kNotForced};

Result<Isa> named_isa(std::string_view name) {
  const auto isa = parse_isa(name);
  if (!isa) return invalid("[isa] there is no \"", name, "\"; there are avx512, avx2, scalar, reference");
  if (!cpu_runs(*isa)) return Status(StatusCode::unavailable, concat("[isa] this CPU does not run ", name));
  return *isa;
}

Result<Isa> isa_of_environment() {
  const char* name = std::getenv("BLOCKSPARSE_ISA");
  if (name == nullptr || *name == '\0') return best_isa();
  return named_isa(name);
}

}  // namespace

std::string_view name_of(Isa isa) {
  switch (isa) {
    case Isa::reference: return "reference";
    case Isa::scalar: return "scalar";
    case Isa::avx2: return "avx2";
    case Isa::avx512: return "avx512";
  }
  return "unknown";
}

std::optional<Isa> parse_isa(std::string_view name) {
  for (Isa isa : kAllIsas) {
    if (name == name_of(isa)) return isa;
  }
  return std::nullopt;
}

bool cpu_runs(Isa isa) {
#if defined(__x86_64__)
  switch (isa) {
    case Isa::avx512:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    case Isa::avx2: return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    case Isa::scalar:
    case Isa::reference: return true;
  }
  return false;
#else
  return isa == Isa::scalar || isa == Isa::reference;
#endif
}

Isa best_isa() {
  for (auto isa = kAllIsas.rbegin(); isa != kAllIsas.rend(); ++isa) {
    if (cpu_runs(*isa)) return *isa;
  }
  return Isa::reference;
}

Result<Isa> current_isa() {
  if (const int32_t isa = forced.load(std::memory_order_relaxed); isa != kNotForced) return static_cast<Isa>(isa);
  static const Result<Isa> from_environment = isa_of_environment();
  return from_environment;
}

Status force_isa(std::string_view name) {
  if (name.empty()) {
    forced = kNotForced;
    return {};
  }
  const auto isa = named_isa(name);
  if (!isa.ok()) return isa.status();
  forced = static_cast<int32_t>(*isa);
  return {};
}

}  // namespace blocksparse
