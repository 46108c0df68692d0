#include "core/index.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "core/ceil_div.h"
#include "core/checks.h"
#include "core/schedule.h"
#include "core/text.h"

namespace blocksparse {

namespace {

constexpr int64_t words_of(int64_t bytes) { return bytes / static_cast<int64_t>(sizeof(int32_t)); }

template <class T>
std::span<const T> section(const LayoutView& view, int64_t offset, int64_t count) {
  return {reinterpret_cast<const T*>(view.index + offset), static_cast<size_t>(count)};
}

}  // namespace

IndexSections index_sections(int64_t out_blocks, int64_t in_blocks, int64_t blocks) {
  IndexSections s{};
  int64_t next = words_of(sizeof(Header));
  auto place = [&next](int64_t words) {
    const int64_t begin = next;
    next += round_up(words, 4);  // 16 bytes
    return begin;
  };
  auto place_direction = [&](auto& direction, int64_t rows) {
    direction.starts = place(rows + 1);
    direction.refs = place(blocks * words_of(sizeof(BlockRef)));
    direction.pieces = place((rows + kMaxSlots) * words_of(sizeof(Piece)));
    direction.splits = place(kMaxSplits * words_of(sizeof(Split)));
    direction.order = place(rows);
  };
  place_direction(s.by_out, out_blocks);
  place_direction(s.by_in, in_blocks);
  s.out_of = place(blocks);
  s.words = next;
  return s;
}

int64_t split_cap(int64_t rows, int64_t blocks) {
  const int64_t mean = rows > 0 ? blocks / rows : 0;
  return std::max<int64_t>({32, ceil_div(blocks, 256), std::min(2 * mean, blocks / 32)});
}

int32_t most_slices(int64_t rows, int64_t columns, int64_t blocks) {
  return static_cast<int32_t>(columns <= kFewSlicesCaps * split_cap(rows, blocks) ? kFewSlices : kMaxSlots);
}

int64_t most_slots(int64_t rows, int64_t columns, int64_t blocks) {
  const int64_t cap = split_cap(rows, blocks);
  if (columns <= cap) return 0;
  return std::min(kMaxSlots, 2 * blocks / cap);  // a row of l blocks has less than 2 * l / cap slices
}

const Header& header_of(const LayoutView& view) { return *reinterpret_cast<const Header*>(view.index); }

RowWalk walk_of(const LayoutView& view, bool by_in) {
  const Header& h = header_of(view);
  const IndexSections s = index_sections(h.out_blocks, h.in_blocks, h.blocks);
  const auto& at = by_in ? s.by_in : s.by_out;
  const auto& count = by_in ? h.by_in : h.by_out;
  return {section<Piece>(view, at.pieces, count.pieces), section<BlockRef>(view, at.refs, h.blocks),
          section<Split>(view, at.splits, count.splits), count.slots,
          section<int32_t>(view, at.starts, (by_in ? h.in_blocks : h.out_blocks) + 1)};
}

std::span<const int32_t> out_of(const LayoutView& view) {
  const Header& h = header_of(view);
  return section<int32_t>(view, index_sections(h.out_blocks, h.in_blocks, h.blocks).out_of, h.blocks);
}

Result<LayoutView> LayoutView::from_index(std::span<const int32_t> index) {
  if (index.data() == nullptr || index.size() < sizeof(Header) / sizeof(int32_t)) {
    return invalid("[layout] index has ", index.size(), " words, its header alone has 32");
  }
  Header h;
  std::memcpy(&h, index.data(), sizeof(h));
  if (h.magic != kIndexMagic || h.version != kIndexVersion) {
    return invalid("[layout] this is no layout index of version ", kIndexVersion, ": it begins with ", h.magic, ", ",
                   h.version);
  }
  const bool counts_ok = h.out_blocks >= 0 && h.in_blocks >= 0 && h.blocks >= 0 && is_block_size(h.block_size);
  const bool room = h.hash[0] == 0 && h.hash[1] == 0;  // a card made it, and a card always leaves room for both
  const bool by_out = room || h.by_out.splits > 0, by_in = room || h.by_in.splits > 0;
  int64_t words = counts_ok ? index_sections(h.out_blocks, h.in_blocks, h.blocks).words : -1;
  if (counts_ok && (by_out || by_in)) words += schedule_words(h.out_blocks, h.in_blocks);
  words += (by_out ? kCutByOutWords : 0) + (by_in ? kCutByInWords : 0);
  if (words != static_cast<int64_t>(index.size())) {
    return invalid("[layout] index has ", index.size(), " words, its header asks for ", words);
  }
  auto fits = [b = int64_t{h.block_size}](int64_t features, int64_t blocks) {
    return features >= 0 && features <= blocks * b && ceil_div(features, b) == blocks;
  };
  auto in_range = [](const auto& walk, int64_t rows) {
    return walk.pieces >= 0 && walk.pieces <= rows + kMaxSlots && walk.splits >= 0 && walk.splits <= kMaxSplits &&
           walk.slots >= 0 && walk.slots <= kMaxSlots;
  };
  if (!fits(join_words(h.out_features), h.out_blocks) || !fits(join_words(h.in_features), h.in_blocks) ||
      h.blocks > int64_t{h.out_blocks} * h.in_blocks || !in_range(h.by_out, h.out_blocks) ||
      !in_range(h.by_in, h.in_blocks)) {
    return invalid("[layout] index is damaged: its header contradicts itself");
  }
  return LayoutView{.index = index.data(),
                    .block_size = h.block_size,
                    .out_features = join_words(h.out_features),
                    .in_features = join_words(h.in_features),
                    .blocks = h.blocks,
                    .cut_by_out = h.by_out.splits > 0,
                    .cut_by_in = h.by_in.splits > 0};
}

Result<LayoutView> LayoutView::on_device(std::span<const int32_t> index, const Sizes& sizes, Device device) {
  const int64_t b = sizes.block_size;
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  const int64_t most_features = kMost * std::max<int64_t>(b, 1);
  if (!is_block_size(b)) return invalid("[layout] block_size is ", b, ", needs 8, 16, 32, 64 or 128");
  if (std::min({sizes.out_features, sizes.in_features, sizes.blocks}) < 0 || sizes.blocks > kMost ||
      std::max(sizes.out_features, sizes.in_features) > most_features) {
    return invalid("[layout] ", sizes.blocks, " blocks of ", sizes.out_features, " x ", sizes.in_features,
                   " features are no layout");
  }
  const int64_t rows = ceil_div(sizes.out_features, b), columns = ceil_div(sizes.in_features, b);
  const int64_t words = index_sections(rows, columns, sizes.blocks).words;
  const int64_t more = static_cast<int64_t>(index.size()) - words;
  constexpr int64_t kBoth = kCutByOutWords + kCutByInWords;
  const int64_t schedules = schedule_words(rows, columns), kMostMore = schedules + kBoth;
  const bool right =
      more == 0 || more == schedules + kCutByOutWords || more == schedules + kCutByInWords || more == kMostMore;
  if (!right || index.data() == nullptr) {
    return invalid("[layout] index has ", index.size(), " words, ", sizes.blocks, " blocks of ", b, " in ",
                   sizes.out_features, " x ", sizes.in_features, " features need ", words, " to ", words + kMostMore);
  }
  BS_RETURN_IF_ERROR(check_address("layout", "index", index.data(), kIndexAlignment));
  return LayoutView{.index = index.data(),
                    .device = device,
                    .block_size = sizes.block_size,
                    .out_features = sizes.out_features,
                    .in_features = sizes.in_features,
                    .blocks = sizes.blocks,
                    .cut_by_out = (more & kCutByOutWords) != 0,
                    .cut_by_in = (more & kCutByInWords) != 0};
}

}  // namespace blocksparse
