#include "cpu/isa.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <span>
#include <utility>
#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

#include "core/text.h"

namespace blocksparse {

namespace {

constexpr int32_t kNotForced = -1;
std::atomic<int32_t> forced{kNotForced};

// "avx2, scalar, reference"
std::string list_of(std::span<const Isa> isas) {
  std::string list;
  for (Isa isa : isas) list.append(list.empty() ? "" : ", ").append(name_of(isa));
  return list;
}

Result<Isa> isa_of_environment() {
  const char* name = std::getenv("BLOCKSPARSE_ISA");
  if (name == nullptr || *name == '\0') return isas_of(this_cpu()).front();
  return named_isa(name);
}

#if defined(__x86_64__)
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

// Asks Linux for the use of tiles: it saves their state only for processes that ask.
bool may_use_tiles() {
#if defined(__linux__)
  constexpr uint32_t kOsSaves = 1u << 27, kTileState = 3u << 17;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  uint32_t a, b, c, d;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0 || (c & kOsSaves) == 0) return false;
  asm volatile("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
  return (a & kTileState) == kTileState && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

bool has_amx() {
  constexpr uint32_t kBf16 = 1u << 22, kTiles = 1u << 24;
  uint32_t a, b, c, d;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  return (d & (kBf16 | kTiles)) == (kBf16 | kTiles) && may_use_tiles();
}

Cpu detect() {
  Cpu cpu{.avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"), .avx512 = has_avx512()};
  cpu.avx512_bf16 = cpu.avx512 && __builtin_cpu_supports("avx512bf16");
  cpu.amx = cpu.avx512_bf16 && has_amx();
  cpu.intel = __builtin_cpu_is("intel");
#if defined(BLOCKSPARSE_EMULATE)
  cpu.avx512 = cpu.avx512_bf16 = cpu.amx = cpu.avx2;
  cpu.intel = true;  // plans for Intel's CPUs are tested as well
#endif
  // Whether vdpbf16ps outruns two FMAs of f32. Zen 4 and 5 are documented at twice the rate of f32's FMA. An Intel Xeon
  // with AMX was measured at 90 GFLOP/s, against 180 in f32.
  cpu.fast_bf16 = cpu.avx512_bf16 && __builtin_cpu_is("amd");
  return cpu;
}
#elif defined(__aarch64__)
Cpu detect() {
  Cpu cpu{.neon = true};
#if defined(__linux__)
  constexpr unsigned long kBf16 = 1ul << 14;  // HWCAP2_BF16, which older headers lack
  cpu.neon_bf16 = (getauxval(AT_HWCAP2) & kBf16) != 0;
#endif
  return cpu;
}
#endif

}  // namespace

Status no_kernel(std::string_view op, Isa isa, DType dtype) {
  std::string message = "[";
  message.append(op).append("] there is no kernel for ").append(name_of(dtype)).append(" of ").append(name_of(isa));
  return {StatusCode::unsupported, message.append(" or an instruction set below it")};
}

std::string_view name_of(Isa isa) {
  switch (isa) {
    case Isa::reference: return "reference";
    case Isa::scalar: return "scalar";
    case Isa::avx2: return "avx2";
    case Isa::avx512: return "avx512";
    case Isa::avx512_bf16: return "avx512_bf16";
    case Isa::amx: return "amx";
    case Isa::neon: return "neon";
    case Isa::neon_bf16: return "neon_bf16";
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
#if defined(__x86_64__) || defined(__aarch64__)
  static const Cpu cpu = detect();
#else
  static const Cpu cpu{};
#endif
  return cpu;
}

bool cpu_runs(Isa isa, const Cpu& cpu) {
  switch (isa) {
    case Isa::neon_bf16: return cpu.neon_bf16;
    case Isa::neon: return cpu.neon;
    case Isa::amx: return cpu.amx;
    case Isa::avx512_bf16: return cpu.avx512_bf16;
    case Isa::avx512: return cpu.avx512;
    case Isa::avx2: return cpu.avx2;
    case Isa::scalar:
    case Isa::reference: return true;
  }
  return false;
}

Isa next_below(Isa isa) {
  switch (isa) {
    case Isa::amx: return Isa::avx512_bf16;
    case Isa::avx512_bf16: return Isa::avx512;
    case Isa::avx512: return Isa::avx2;
    case Isa::neon_bf16: return Isa::neon;
    case Isa::avx2:
    case Isa::neon: return Isa::scalar;
    case Isa::scalar:
    case Isa::reference: break;
  }
  return Isa::reference;
}

std::vector<Isa> isas_of(const Cpu& cpu) {
  std::vector<Isa> isas(kAllIsas.rbegin(), kAllIsas.rend());
  if (!cpu.fast_bf16)
    std::swap(*std::find(isas.begin(), isas.end(), Isa::avx512_bf16),
              *std::find(isas.begin(), isas.end(), Isa::avx512));
  std::erase_if(isas, [&](Isa isa) { return !cpu_runs(isa, cpu); });
  return isas;
}

Result<Isa> named_isa(std::string_view name, const Cpu& cpu) {
  const auto isa = parse_isa(name);
  if (!isa)
    return invalid("[isa] there is no \"", name, "\"; there are ",
                   list_of(std::vector<Isa>(kAllIsas.rbegin(), kAllIsas.rend())));
  if (!cpu_runs(*isa, cpu)) {
    return Status(StatusCode::unavailable,
                  concat("[isa] this CPU does not run ", name, "; it runs ", list_of(isas_of(cpu))));
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
