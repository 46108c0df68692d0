// Which instruction sets this CPU runs, and which one is in use.
#pragma once

#include <array>
#include <optional>
#include <string_view>

#include "blocksparse/status.h"

namespace blocksparse {

// From plain to fast; a larger value is preferred.
enum class Isa : int32_t { reference = 0, scalar = 1, avx2 = 2, avx512 = 3 };

inline constexpr std::array kAllIsas = {Isa::reference, Isa::scalar, Isa::avx2, Isa::avx512};

std::string_view name_of(Isa isa);
std::optional<Isa> parse_isa(std::string_view name);
bool cpu_runs(Isa isa);
Isa best_isa();

// The one in use: set by force_isa, else by BLOCKSPARSE_ISA, else the best.
Result<Isa> current_isa();
Status force_isa(std::string_view name);  // "" ends it

}  // namespace blocksparse
