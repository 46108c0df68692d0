// How the kernel `many` divides a product of many tokens, and what it needs of workspace: pure functions of sizes.
#pragma once

#include <cstdint>

#include "gemm/cuda/select.h"

namespace blocksparse::gemm {

// Inputs are walked in chunks of 64: x is then read in lines of 128 bytes, at 20 TB/s; lines of 64 come at 8 (H200).
inline constexpr int32_t kChunk = 64;
inline constexpr int32_t kMostChunks = 2048;  // of a layout, for the tables are made in shared memory
inline constexpr int32_t kMostGradientChunks = 2 * kMostChunks;
inline constexpr int64_t kLeastManyTokens = 128;  // less would not fill a tile
inline constexpr int64_t kMostStrips = 1 << 16;

// What W is cut into. A tile of outputs has slots side by side, a cell is what one slot has of some inputs.
enum class ManyKind : int32_t {
  direct = 0,   // b = 64, 128: boxes of 64 x 64 of W as it lies
  filled = 1,   // b <= 32, many blocks: cells of 64 x 64 filled up with zeros
  cells32 = 2,  // b = 32
  cells16 = 3,  // b = 16, and b = 8 filled up
};

struct ManyForm {
  int32_t slots;         // of a tile
  int32_t slot_outputs;  // of a slot, so rows of a cell
  int32_t cell_inputs;   // columns of a cell
  int32_t parts;         // slots are divided among so many groups of warps
  int32_t most_cells;    // of a record, which is what is in shared memory together
  int32_t tokens;        // of a tile

  constexpr int32_t outputs() const { return slots * slot_outputs; }
  constexpr int32_t cell_bytes() const { return slot_outputs * cell_inputs * 2; }
  constexpr int32_t part_slots() const { return slots / parts; }
  constexpr int32_t part_bits() const { return part_slots() * (kChunk / cell_inputs); }
};

constexpr ManyForm form_of(ManyKind kind) {
  switch (kind) {
    case ManyKind::direct:
    case ManyKind::filled: return {2, 64, 64, 2, 2, 256};
    case ManyKind::cells32: return {8, 32, 32, 4, 8, 128};
    case ManyKind::cells16: break;
  }
  return {16, 16, 16, 4, 32, 128};
}

struct ManyPlan {
  ManyKind kind;
  int64_t tiles;  // of outputs
  int64_t chunks;
  int64_t records, cells;  // at most
  int64_t copy_bytes;      // of W as it lies, for `direct` where it cannot be read so
};
ManyPlan plan_many(const CudaProblem& p);

// Whether blocks of 64 and 128 have to be copied: what W holds beyond the edge must not be multiplied, not even by 0.
bool many_copies(const CudaProblem& p);

bool many_supports(const CudaProblem& p);  // on a card that runs it
// Whether it is faster than the generic kernel.
bool many_pays(const CudaProblem& p);

// Where the tables and the copy of W lie in the workspace, in bytes.
struct ManyPlaces {
  int64_t records, tiles, counter, sources, cells, copy, end;
};
ManyPlaces many_places(const ManyPlan& plan, int32_t block);

// wgrad: dW in strips of 64 or 128 outputs, cells of some inputs in which a strip has a block, and units of
// cells that share the strip's dy.
struct ManyGradientForm {
  int32_t strip_outputs;
  int32_t cell_inputs;
  int32_t most_cells;  // of a unit
  int32_t ids;         // blocks of a cell, at most
  // What a step of a unit takes, and adding up units that were cut. In 0.054 us for 128 outputs (H200), 0.026 for b =
  // 64, 0.08 for 32 inputs: 4 cells of b = 64 take 46 us where 8 take 59, two of 128 outputs 31 and four 58.
  int32_t fixed_cost, cell_cost, combine_cost;
  int32_t part_bytes;  // a unit's sums

  constexpr int32_t cost_of(int32_t unit_cells) const {
    // Cells of 32 inputs are bound by how fast they come, a few by how late: 4096 x 4096, n = 4096, b = 32, .02, 5 of a
    // strip, takes 51 us where thread blocks have equal steps and 62 where they have equal cells.
    if (cell_inputs < kChunk) return fixed_cost + cell_cost * (unit_cells > 5 ? unit_cells : 5);
    const int32_t quarter = most_cells / 4;  // that the tensor cores take
    return fixed_cost + cell_cost * ((unit_cells + quarter - 1) / quarter * quarter);
  }
};

// `wide`: of small blocks that are so many that cells of that size hardly ever have none. Always so for b = 128.
constexpr ManyGradientForm gradient_form_of(int32_t block, bool wide) {
  constexpr int32_t kPartBytes = 2 * 128 * 128 * 4;
  if (wide || block == 128) return {128, 64, 4, block > 32 ? 1 : (128 / block) * (64 / block), 1, 4, 170, kPartBytes};
  if (block == 64) return {64, 64, 8, 1, 10, 1, 350, kPartBytes};
  return {64, 32, 16, (64 / block) * (32 / block), 1, 1, 110, kPartBytes};
}
ManyGradientForm gradient_form_of(const CudaProblem& p);

struct ManyGradientPlan {
  int64_t strips, chunks;  // of outputs and of inputs
  int64_t cells, units;    // at most
};
ManyGradientPlan plan_gradient(const CudaProblem& p, const ManyGradientForm& form);
inline ManyGradientPlan plan_many_gradient(const CudaProblem& p) { return plan_gradient(p, gradient_form_of(p)); }

struct ManyGradientPlaces {
  int64_t chunks, ids, counts, units, shares, parts, gate_parts, end;
};
ManyGradientPlaces gradient_places(const CudaProblem& p, const ManyGradientForm& form);

// Thread blocks, one an SM; each may leave two partial sums.
inline constexpr int32_t kMostGradientGrid = 132;

// The (x, dy) that one launch sums. Their maps are the kernel's arguments, which have 4 KB.
inline constexpr int32_t kMostManyTerms = 12;

}  // namespace blocksparse::gemm
