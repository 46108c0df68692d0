#include "cpu/isa.h"

#include <atomic>
#include <cstdlib>

#include "core/text.h"

namespace blocksparse {

namespace {

constexpr int32_t kNotForced = -1;
std::atomic<int32_t> forced{kNotForced};

// "avx2, scalar, reference": best first.
template <class Wanted>
std::string list_isas(Wanted wanted) {
  std::string list;
  for (auto isa = kAllIsas.rbegin(); isa != kAllIsas.rend(); ++isa) {
    if (wanted(*isa)) list.append(list.empty() ? "" : ", ").append(name_of(*isa));
  }
  return list;
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
    case Isa::neon: return "neon";
  }
  return "unknown";
}

std::optional<Isa> parse_isa(std::string_view name) {
  for (Isa isa : kAllIsas) {
    if (name == name_of(isa)) return isa;
  }
  return std::nullopt;
}

const Cpu& this_cpu() {
#if defined(__x86_64__)
  static const Cpu cpu{.avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"),
                       .avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                                 __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")};
#elif defined(__aarch64__)
  static const Cpu cpu{.neon = true};
#else
  static const Cpu cpu{};
#endif
  return cpu;
}

bool cpu_runs(Isa isa, const Cpu& cpu) {
  switch (isa) {
    case Isa::neon: return cpu.neon;
    case Isa::avx512: return cpu.avx512;
    case Isa::avx2: return cpu.avx2;
    case Isa::scalar:
    case Isa::reference: return true;
  }
  return false;
}

Isa best_isa(const Cpu& cpu) {
  for (auto isa = kAllIsas.rbegin(); isa != kAllIsas.rend(); ++isa) {
    if (cpu_runs(*isa, cpu)) return *isa;
  }
  return Isa::reference;
}

Result<Isa> named_isa(std::string_view name, const Cpu& cpu) {
  const auto isa = parse_isa(name);
  if (!isa) return invalid("[isa] there is no \"", name, "\"; there are ", list_isas([](Isa) { return true; }));
  if (!cpu_runs(*isa, cpu)) {
    return Status(StatusCode::unavailable, concat("[isa] this CPU does not run ", name, "; it runs ",
                                                  list_isas([&](Isa i) { return cpu_runs(i, cpu); })));
  }
  return *isa;
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
