#include "core/build_index.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "core/hash.h"
#include "core/index.h"
#include "core/schedule.h"

namespace blocksparse {

namespace {

// The pieces of the rows that `starts` describes, in the order of piece_key(), and the rows that were cut.
struct Cut {
  std::vector<Piece> pieces;
  std::vector<Split> splits;
  int32_t slots = 0;
};

Cut cut_rows(std::span<const int32_t> starts, int64_t columns, int64_t blocks) {
  const int64_t rows = static_cast<int64_t>(starts.size()) - 1;
  const auto cap = static_cast<int32_t>(split_cap(rows, blocks));
  const int32_t most = most_slices(rows, columns, blocks);
  Cut cut;
  cut.pieces.reserve(static_cast<size_t>(rows));
  std::vector<int32_t> keys(static_cast<size_t>(rows));
  for (int32_t row = 0; row < rows; ++row) {
    const int64_t first = starts[row], length = starts[row + 1] - first;
    const int32_t slices = slices_of(static_cast<int32_t>(length), cap, most);
    keys[static_cast<size_t>(row)] = piece_key(static_cast<int32_t>(length), slices);
    if (slices == 1) {
      cut.pieces.push_back({row, starts[row], starts[row + 1], -1});
      continue;
    }
    cut.splits.push_back({row, cut.slots, slices, 0});
    for (int64_t i = 0; i < slices; ++i) {
      cut.pieces.push_back({row, static_cast<int32_t>(first + length * i / slices),
                            static_cast<int32_t>(first + length * (i + 1) / slices), cut.slots++});
    }
  }
  std::stable_sort(cut.pieces.begin(), cut.pieces.end(), [&](const Piece& a, const Piece& b) {
    return keys[static_cast<size_t>(a.to)] > keys[static_cast<size_t>(b.to)];
  });
  return cut;
}

template <class T>
void put(std::vector<int32_t>& index, int64_t offset, std::span<const T> items) {
  if (!items.empty()) std::memcpy(index.data() + offset, items.data(), items.size_bytes());
}

uint64_t hash_of(const Grid& grid, std::span<const int32_t> row_start, std::span<const int32_t> columns) {
  uint64_t hash = 0;
  for (int64_t word : {int64_t{grid.blocking.block_size}, grid.blocking.out_features, grid.blocking.in_features,
                       static_cast<int64_t>(columns.size())}) {
    hash = hash_word(hash, static_cast<uint64_t>(word));
  }
  for (int32_t word : row_start) hash = hash_word(hash, static_cast<uint32_t>(word));
  for (int32_t word : columns) hash = hash_word(hash, static_cast<uint32_t>(word));
  return hash;
}

}  // namespace

std::vector<int32_t> prefix_sum(std::span<const int32_t> keys, int64_t rows) {
  std::vector<int32_t> starts(static_cast<size_t>(rows) + 1, 0);
  for (int32_t key : keys) ++starts[static_cast<size_t>(key) + 1];
  for (size_t i = 1; i < starts.size(); ++i) starts[i] += starts[i - 1];
  return starts;
}

std::shared_ptr<const std::vector<int32_t>> build_index(const Grid& grid, std::span<const int32_t> row_start,
                                                        std::span<const int32_t> columns) {
  const auto blocks = static_cast<int64_t>(columns.size());
  const IndexSections at = index_sections(grid.out_blocks, grid.in_blocks, blocks);
  auto index = std::make_shared<std::vector<int32_t>>();
  const int64_t schedules = schedule_words(grid.out_blocks, grid.in_blocks);
  index->reserve(static_cast<size_t>(at.words + schedules + kCutByOutWords + kCutByInWords));  // never copied
  index->resize(static_cast<size_t>(at.words), 0);

  auto* refs_by_out = reinterpret_cast<BlockRef*>(index->data() + at.by_out.refs);
  auto* refs_by_in = reinterpret_cast<BlockRef*>(index->data() + at.by_in.refs);
  int32_t* out_of = index->data() + at.out_of;
  const std::vector<int32_t> col_start = prefix_sum(columns, grid.in_blocks);
  std::vector<int32_t> next(col_start.begin(), col_start.end());
  for (int32_t row = 0; row < grid.out_blocks; ++row) {
    for (int32_t i = row_start[row]; i < row_start[row + 1]; ++i) {
      refs_by_out[i] = {columns[i], i};
      refs_by_in[next[columns[i]]++] = {row, i};
      out_of[i] = row;
    }
  }
  put(*index, at.by_out.starts, row_start);
  put(*index, at.by_in.starts, std::span<const int32_t>(col_start));
  std::iota(index->begin() + at.by_out.order, index->begin() + at.by_out.order + grid.out_blocks, 0);
  std::iota(index->begin() + at.by_in.order, index->begin() + at.by_in.order + grid.in_blocks, 0);

  Header h{};
  h.magic = kIndexMagic;
  h.version = kIndexVersion;
  h.block_size = grid.blocking.block_size;
  h.blocks = static_cast<int32_t>(blocks);
  h.out_blocks = static_cast<int32_t>(grid.out_blocks);
  h.in_blocks = static_cast<int32_t>(grid.in_blocks);
  split_words(grid.blocking.out_features, h.out_features);
  split_words(grid.blocking.in_features, h.in_features);
  split_words(static_cast<int64_t>(hash_of(grid, row_start, columns)), h.hash);
  auto place_cut = [&](const Cut& cut, const auto& section, auto& count) {
    put(*index, section.pieces, std::span<const Piece>(cut.pieces));
    put(*index, section.splits, std::span<const Split>(cut.splits));
    count = {static_cast<int32_t>(cut.pieces.size()), static_cast<int32_t>(cut.splits.size()), cut.slots};
  };
  place_cut(cut_rows(row_start, grid.in_blocks, blocks), at.by_out, h.by_out);
  place_cut(cut_rows(col_start, grid.out_blocks, blocks), at.by_in, h.by_in);
  const bool by_out = h.by_out.splits > 0, by_in = h.by_in.splits > 0;
  index->resize(static_cast<size_t>(at.words + (by_out || by_in ? schedules : 0) + (by_out ? kCutByOutWords : 0) +
                                    (by_in ? kCutByInWords : 0)));
  std::memcpy(index->data(), &h, sizeof(h));
  return index;
}

}  // namespace blocksparse
