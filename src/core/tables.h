// What the tables of a layout are made of: plain data, for the host and for devices. index.h says how they lie in
// memory.
#pragma once

#include <cstdint>

#include "core/ceil_div.h"

namespace blocksparse {

struct BlockRef {
  int32_t from;    // the block of inputs of this pass: columns of W in fprop, rows of W in dgrad
  int32_t weight;  // index into values[blocks, b, b]
};

// One unit of work: an output block, or a slice of one whose list was cut.
struct Piece {
  int32_t to;           // the block of outputs of this pass; an empty row is a piece too, which writes the bias
  int32_t first, last;  // its range in refs
  int32_t slot;  // a slice's place for its partial sum, added later in the order of slots; -1: the piece writes y
};

// A row that was cut: its slices have the slots first_slot ... first_slot + slots - 1, in the order of the list.
struct Split {
  int32_t to;
  int32_t first_slot, slots;
  int32_t reserved;
};

// A row with more blocks than cap = max(32, blocks / 256, min(2 * mean row, blocks / 32)) is cut into 2^k equal slices
// of at most cap blocks. Hubs of skewed layouts are cut, rows of uniform layouts never. There are at most 256 split
// rows. If no row can be longer than 16 caps, a row has at most 8 slices, which may then hold 2 caps each: 8 thread
// blocks are as many as every card can put into a cluster.
inline constexpr int64_t kMaxSlots = 512;
inline constexpr int64_t kMaxSplits = 256;
inline constexpr int32_t kFewSlices = 8;
inline constexpr int32_t kFewSlicesCaps = 16;

constexpr int32_t slices_of(int32_t length, int32_t cap, int32_t most) {
  int32_t slices = 1;
  while (slices < most && int64_t{slices} * cap < length) slices *= 2;
  return slices;
}

// Pieces of larger keys come first: rows of most slices, then the longest. Slices of a row share a key, so they lie
// side by side and begin at a multiple of their number. A slice has less than 2^27 blocks.
constexpr int32_t piece_key(int32_t length, int32_t slices) {
  int32_t key = ceil_div(length, slices);
  for (int32_t s = slices; s > 1; s /= 2) key += 1 << 27;
  return key;
}

struct Header {
  int32_t magic;
  int32_t version;
  int32_t block_size;
  int32_t blocks;
  int32_t out_blocks, in_blocks;
  int32_t out_features[2], in_features[2];  // low word, high word
  int32_t hash[2];
  struct {
    int32_t pieces, splits, slots;
  } by_out, by_in;
  int32_t reserved[14];
};
static_assert(sizeof(Header) == 32 * sizeof(int32_t));

inline constexpr int32_t kIndexMagic = 0x58495342;  // "BSIX"
inline constexpr int32_t kIndexVersion = 5;

}  // namespace blocksparse
