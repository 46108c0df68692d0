#include "blocksparse/blocksparse.h"
#include "cpu/isa.h"

namespace blocksparse {

std::string_view version() { return BS_VERSION; }

std::vector<std::string> cpu_isas() {
  std::vector<std::string> names;
  for (Isa isa : isas_of(this_cpu())) names.emplace_back(name_of(isa));
  return names;
}

Result<std::string> cpu_isa() {
  const auto isa = current_isa();
  if (!isa.ok()) return isa.status();
  return std::string(name_of(*isa));
}

Status set_cpu_isa(std::string_view name) { return force_isa(name); }

}  // namespace blocksparse
