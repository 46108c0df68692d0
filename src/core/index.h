// The tables of a layout: one array of int32, the same on the host and on a device.
//
//   header      Header, 32 words
//   by_out      starts  [out_blocks + 1]        fprop walks rows of W:    BlockRef{in block, weight}
//               refs    [blocks] BlockRef
//               pieces  [out_blocks + kMaxSlots] Piece, as many as the header says are in use
//               splits  [kMaxSplits] Split, likewise
//   by_in       the same with in_blocks         dgrad walks columns of W: BlockRef{out block, weight}
//   out_of      [blocks]                        out block of each weight block; wgrad's pieces are runs of blocks
//
// Where a section begins is a pure function of (out_blocks, in_blocks, blocks), so whoever holds only a device pointer
// and the shapes of the tensors knows it too.
#pragma once

#include <cstdint>
#include <span>

#include "blocksparse/layout.h"

namespace blocksparse {

struct BlockRef {
  int32_t from;    // the block of inputs of this pass: columns of W in fprop, rows of W in dgrad
  int32_t weight;  // index into values[blocks, b, b]
};

// One unit of work: an output block, or a slice of one whose list is long.
struct Piece {
  int32_t to;           // the block of outputs of this pass; an empty row is a piece too, it writes the bias
  int32_t first, last;  // its range in refs
  int32_t slot;         // where a slice leaves its partial sum, added later in the order of slots; -1: writes y
};

// A row that was cut: its slices have the slots first_slot ... first_slot + slots - 1, in the order of the list.
struct Split {
  int32_t to;
  int32_t first_slot, slots;
  int32_t reserved;
};

// A row is cut when it holds more than max(32, blocks / 256, min(2 * mean row, blocks / 32)) blocks, into equal slices
// of at most that many. So hubs of skewed layouts are cut, rows of uniform ones never; there are at most 256 split
// rows.
inline constexpr int64_t kMaxSlots = 512;
inline constexpr int64_t kMaxSplits = 256;

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
inline constexpr int32_t kIndexVersion = 1;

// Offsets in words; sections begin at multiples of 16 bytes.
struct IndexSections {
  struct {
    int64_t starts, refs, pieces, splits;
  } by_out, by_in;
  int64_t out_of;
  int64_t words;
};

IndexSections index_sections(int64_t out_blocks, int64_t in_blocks, int64_t blocks);

inline int64_t join_words(int32_t low, int32_t high) {
  return static_cast<int64_t>(static_cast<uint64_t>(static_cast<uint32_t>(high)) << 32 | static_cast<uint32_t>(low));
}
inline int64_t join_words(const int32_t (&words)[2]) { return join_words(words[0], words[1]); }
inline void split_words(int64_t value, int32_t (&words)[2]) {
  words[0] = static_cast<int32_t>(static_cast<uint64_t>(value) & 0xffffffffu);
  words[1] = static_cast<int32_t>(static_cast<uint64_t>(value) >> 32);
}

// What a kernel sees of a layout in one direction.
struct RowWalk {
  std::span<const Piece> pieces;  // longest first, so that the last wave is short
  std::span<const BlockRef> refs;
  std::span<const Split> splits;
  int32_t slots = 0;  // slices over all split rows
  std::span<const BlockRef> of(const Piece& p) const {
    return refs.subspan(static_cast<size_t>(p.first), static_cast<size_t>(p.last - p.first));
  }
};

// Host tables only. `by_in` walks the columns of W.
const Header& header_of(const LayoutView& view);
RowWalk walk_of(const LayoutView& view, bool by_in);
std::span<const int32_t> out_of(const LayoutView& view);

}  // namespace blocksparse
