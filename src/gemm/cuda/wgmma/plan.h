// The family `wgmma`: how a product of many tokens is divided, and the workspace that it needs. All functions are pure
// functions of sizes.
#pragma once

#include <cstdint>

#include "gemm/cuda/problem.h"

namespace blocksparse::gemm::wgmma {

// The functions of the family's row: see families.h.
bool supports(const CudaProblem& p);
int64_t least_tokens(const CudaProblem& p);
bool pays(const CudaProblem& p, const cuda::Card& card);
int64_t workspace_bytes(const CudaProblem& p);

// Inputs are walked in chunks of 64. x is then read in lines of 128 bytes, at 20 TB/s; lines of 64 arrive at 8 (H200).
inline constexpr int32_t kChunk = 64;
inline constexpr int32_t kMostChunks = 2048;  // chunks of a layout, because the tables are made in shared memory
inline constexpr int64_t kLeastTokens = 128;  // fewer would not fill a tile

// The parts that W is cut into. A tile of outputs has bands side by side; a patch is what one band has of some inputs.
enum class Kind : int32_t {
  direct = 0,     // b = 64, 128: boxes of 64 x 64 of W in place
  filled = 1,     // b <= 32, many blocks: patches of 64 x 64 filled up with zeros
  patches32 = 2,  // b = 32
  patches16 = 3,  // b = 16, and b = 8 filled up
};

struct Form {
  int32_t bands;         // of a tile
  int32_t band_outputs;  // outputs of a band, which are rows of a patch
  int32_t patch_inputs;  // columns of a patch
  int32_t parts;         // groups of warps among which the bands are divided
  int32_t most_patches;  // most patches of a record, that is, in a stage
  int32_t tokens;        // tokens of a tile

  constexpr int32_t outputs() const { return bands * band_outputs; }
  constexpr int32_t patch_bytes() const { return band_outputs * patch_inputs * 2; }
  constexpr int32_t part_bands() const { return bands / parts; }
  constexpr int32_t part_bits() const { return part_bands() * (kChunk / patch_inputs); }
};

constexpr Form form_of(Kind kind) {
  switch (kind) {
    case Kind::direct:
    case Kind::filled: return {2, 64, 64, 2, 2, 256};
    case Kind::patches32: return {8, 32, 32, 4, 8, 128};
    case Kind::patches16: break;
  }
  return {16, 16, 16, 4, 32, 128};
}

struct Plan {
  Kind kind;
  int64_t tiles;  // of outputs
  int64_t chunks;
  int64_t records, patches;  // at most
  int64_t copy_bytes;        // for `direct`, if W cannot be read in place
  int64_t note_bytes;        // if zeros stand for missing blocks: see absent.cuh
};
Plan plan_of(const CudaProblem& p);

// Whether blocks of 64 and 128 have to be copied: what W holds beyond the edge must not be multiplied, not even by 0.
bool copies_w(const CudaProblem& p);

// Where the tables and the copy of W begin in the workspace, in bytes.
struct WorkspacePlaces {
  int64_t records, tiles, counter, sources, patches, copy, notes, end;
};
WorkspacePlaces workspace_places(const Plan& plan, int32_t block);

}  // namespace blocksparse::gemm::wgmma
