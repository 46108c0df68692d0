// The units of the kernel `regions` and the blocks that each holds, made anew by every call.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "blocksparse/status.h"
#include "gemm/cuda/driver.h"
#include "gemm/cuda/wgrad_in_registers/plan.h"

namespace blocksparse::gemm {

struct alignas(16) RegionUnit {
  int32_t first_column, columns;  // of blocks
  int32_t first_entry, entries;
};

// A block, or where the unit's row has an odd number of blocks of 8, none (weight -1). Rows one after the other,
// columns rising.
struct RegionEntry {
  int32_t weight;
  uint16_t row, column;  // within strip and unit
};

struct RegionTables {
  RegionEntry* entries;
  RegionUnit* units;  // [strips][kMostStripUnits]
  int32_t* counts;    // [strips] units in use
  float* partial;     // [slices][blocks, b, b]
};

inline RegionTables region_tables(const CudaProblem& p, void* workspace) {
  auto* base = static_cast<char*>(workspace);
  const RegionPlaces at = region_places(p);
  return {.entries = reinterpret_cast<RegionEntry*>(base + at.entries),
          .units = reinterpret_cast<RegionUnit*>(base + at.units),
          .counts = reinterpret_cast<int32_t*>(base + at.counts),
          .partial = reinterpret_cast<float*>(base + at.partial)};
}

Status make_region_units(const CudaCall& call, const RegionPlan& plan, const DeviceWalk& walk, const RegionTables& to);
Status prepare_region_units();

}  // namespace blocksparse::gemm
