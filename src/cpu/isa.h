// The instruction sets that this CPU runs, and the one in use.
#pragma once

#include <array>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "blocksparse/dtype.h"
#include "blocksparse/status.h"

namespace blocksparse {

// The x86 sets are numbered from plain to fast.
enum class Isa : int32_t {
  reference = 0,
  scalar = 1,
  avx2 = 2,
  avx512 = 3,
  avx512_bf16 = 4,
  amx = 5,
  neon = 6,
  neon_bf16 = 7
};

inline constexpr std::array kAllIsas = {Isa::reference,   Isa::scalar, Isa::avx2, Isa::avx512,
                                        Isa::avx512_bf16, Isa::amx,    Isa::neon, Isa::neon_bf16};

// The features of a CPU that decide which instruction sets it runs. They are a value, so the choice is tested for CPUs
// that are not at hand.
struct Cpu {
  bool avx2 = false;         // with FMA
  bool avx512 = false;       // F, BW, DQ and VL
  bool avx512_bf16 = false;  // has vdpbf16ps
  bool fast_bf16 = false;    // vdpbf16ps outruns two FMAs
  bool amx = false;          // tiles and bf16, and the system keeps their state
  bool intel = false;        // plans for AVX-512 differ from those for AMD
  bool neon = false;         // every 64-bit Arm CPU
  bool neon_bf16 = false;    // has bfdot
};
const Cpu& this_cpu();

std::string_view name_of(Isa isa);
std::optional<Isa> parse_isa(std::string_view name);
bool cpu_runs(Isa isa, const Cpu& cpu = this_cpu());
// The instruction set whose kernels are taken if `isa` has none of its own. Nothing is below reference.
Isa next_below(Isa isa);
template <class Kernel>
const Kernel* find_kernel(std::span<const Kernel> kernels, Isa isa, DType dtype) {
  for (; isa != Isa::reference; isa = next_below(isa)) {
    for (const Kernel& kernel : kernels) {
      if (kernel.isa == isa && kernel.dtype == dtype) return &kernel;
    }
  }
  return nullptr;
}

// Of an op that has no kernel of `isa`, nor of those below it, for `dtype`.
Status no_kernel(std::string_view op, Isa isa, DType dtype);

std::vector<Isa> isas_of(const Cpu& cpu);                                   // those that the CPU runs, best first
Result<Isa> named_isa(std::string_view name, const Cpu& cpu = this_cpu());  // refused if the CPU does not run it

// The instruction set in use: that of force_isa, otherwise that of BLOCKSPARSE_ISA, otherwise the best.
Result<Isa> current_isa();
Status force_isa(std::string_view name);  // "" ends forcing

}  // namespace blocksparse
