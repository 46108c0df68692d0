// Which instruction sets this CPU runs, and which one is in use.
#pragma once

#include <array>
#include <optional>
#include <string_view>

#include "blocksparse/status.h"

namespace blocksparse {

// From plain to fast; of those that a CPU runs, the largest is preferred.
enum class Isa : int32_t { reference = 0, scalar = 1, avx2 = 2, avx512 = 3, neon = 4 };

inline constexpr std::array kAllIsas = {Isa::reference, Isa::scalar, Isa::avx2, Isa::avx512, Isa::neon};

// What decides which of them run: a value, so that the choice is tested for CPUs that are not at hand.
struct Cpu {
  bool avx2 = false;    // and FMA
  bool avx512 = false;  // F, BW, DQ and VL
  bool neon = false;    // every 64-bit Arm CPU
};
const Cpu& this_cpu();

std::string_view name_of(Isa isa);
std::optional<Isa> parse_isa(std::string_view name);
bool cpu_runs(Isa isa, const Cpu& cpu = this_cpu());
Isa best_isa(const Cpu& cpu = this_cpu());
Result<Isa> named_isa(std::string_view name, const Cpu& cpu = this_cpu());  // one that the CPU runs

// The one in use: set by force_isa, else by BLOCKSPARSE_ISA, else the best.
Result<Isa> current_isa();
Status force_isa(std::string_view name);  // "" ends it

}  // namespace blocksparse
