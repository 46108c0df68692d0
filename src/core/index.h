// The tables of a layout: one array of int32, with one form on the host and on devices.
//
//   header      Header, 32 words
//   by_out      starts  [out_blocks + 1]        fprop walks rows of W:    BlockRef{in block, weight}
//               refs    [blocks] BlockRef
//               pieces  [out_blocks + kMaxSlots] Piece, of which the header says how many are in use
//               splits  [kMaxSplits] Split, of which the header says how many are in use
//               order   [out_blocks] in which a card takes strips of rows: 0, 1, 2, ..., or as index_for_card() says
//   by_in       five sections for in_blocks     dgrad walks columns of W: BlockRef{out block, weight}
//   out_of      [blocks]                        out block of each weight block; wgrad's pieces are runs of blocks
//   schedules   if a direction has splits: room for rows dealt to a card's multiprocessors, see schedule.h
//   padding     4 words if by_out has splits, and 8 if by_in has: the length alone tells which directions are cut
//
// Where a section begins is a pure function of (out_blocks, in_blocks, blocks). Whoever holds a device pointer and the
// shapes of the tensors can find every section without reading the tables.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "blocksparse/layout.h"
#include "core/tables.h"

namespace blocksparse {

// Offsets in words; sections begin at multiples of 16 bytes.
struct IndexSections {
  struct {
    int64_t starts, refs, pieces, splits, order;
  } by_out, by_in;
  int64_t out_of;
  int64_t words;  // without schedules and padding
};

// Aligned for reads of whole records of four words.
inline constexpr size_t kIndexAlignment = 16;

inline constexpr int64_t kCutByOutWords = 4, kCutByInWords = 8;

IndexSections index_sections(int64_t out_blocks, int64_t in_blocks, int64_t blocks);

// The most blocks that a row may have without being cut, in a matrix of `rows` rows.
int64_t split_cap(int64_t rows, int64_t blocks);

// The most slices that a row may have, in a matrix of `rows` x `columns`.
int32_t most_slices(int64_t rows, int64_t columns, int64_t blocks);

// The most slots that a matrix of this size may have, whatever its tables hold.
int64_t most_slots(int64_t rows, int64_t columns, int64_t blocks);

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
  std::span<const Piece> pieces;  // rows of most slices first, then the longest, so that the last wave is short
  std::span<const BlockRef> refs;
  std::span<const Split> splits;
  int32_t slots = 0;                // slices over all split rows
  std::span<const int32_t> starts;  // row r has refs[starts[r]] to refs[starts[r + 1] - 1]
  std::span<const BlockRef> of(const Piece& p) const {
    return refs.subspan(static_cast<size_t>(p.first), static_cast<size_t>(p.last - p.first));
  }
};

// Host tables only. `by_in` walks the columns of W.
const Header& header_of(const LayoutView& view);
RowWalk walk_of(const LayoutView& view, bool by_in);
std::span<const int32_t> out_of(const LayoutView& view);

}  // namespace blocksparse
