#include "core/device_index.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "core/ceil_div.h"
#include "core/checks.h"
#include "core/schedule.h"
#include "core/text.h"

namespace blocksparse {

namespace {

Status check_sizes(const LayoutView::Sizes& s) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() / 4;
  if (!is_block_size(s.block_size)) {
    return invalid("[layout] block_size is ", s.block_size, ", needs 8, 16, 32, 64 or 128");
  }
  const int64_t most_features = kMost * s.block_size;
  if (std::min({s.out_features, s.in_features, s.blocks}) < 0 || s.blocks > kMost ||
      std::max(s.out_features, s.in_features) > most_features) {
    return invalid("[layout] ", s.blocks, " blocks of ", s.out_features, " x ", s.in_features,
                   " features are no layout that a card can make; each side and the blocks need 0 to ", kMost);
  }
  return {};
}

}  // namespace

Result<DeviceIndexPlan> plan_device_index(const LayoutView::Sizes& sizes) {
  BS_RETURN_IF_ERROR(check_sizes(sizes));
  const int64_t b = sizes.block_size, rows = ceil_div(sizes.out_features, b), columns = ceil_div(sizes.in_features, b);
  if (sizes.blocks > rows * columns) {
    return invalid("[layout] ", sizes.blocks, " blocks, a mask of ", rows, " x ", columns, " holds ", rows * columns,
                   " at most");
  }
  const IndexSections at = index_sections(rows, columns, sizes.blocks);
  DeviceIndexPlan plan{};
  Header& h = plan.header;
  h.magic = kIndexMagic;
  h.version = kIndexVersion;
  h.block_size = sizes.block_size;
  h.blocks = static_cast<int32_t>(sizes.blocks);
  h.out_blocks = static_cast<int32_t>(rows);
  h.in_blocks = static_cast<int32_t>(columns);
  split_words(sizes.out_features, h.out_features);
  split_words(sizes.in_features, h.in_features);
  int64_t next = 0;
  const auto place = [&next](int64_t words) {
    const int64_t begin = next;
    next += round_up(words, 4);
    return begin;
  };
  const auto side = [&](const auto& sections, int64_t of, int64_t across, int64_t end) {
    DeviceIndexSide s;
    s.rows = static_cast<int32_t>(of);
    s.words = static_cast<int32_t>(ceil_div(across, 32));
    s.starts = sections.starts, s.refs = sections.refs, s.pieces = sections.pieces, s.splits = sections.splits,
    s.order = sections.order;
    s.end = end;
    s.bits = place(of * s.words);
    s.before = place(of * s.words);
    s.counts = place(of);
    s.keys = place(of + kMaxSlots);
    s.unsorted = place((of + kMaxSlots) * 4);
    s.cap = static_cast<int32_t>(split_cap(of, sizes.blocks));
    s.most_slices = most_slices(of, across, sizes.blocks);
    return s;
  };
  plan.by_out = side(at.by_out, rows, columns, at.by_in.starts);
  plan.by_in = side(at.by_in, columns, rows, at.out_of);
  plan.out_of = at.out_of;
  plan.words = at.words + schedule_words(rows, columns) + kCutByOutWords + kCutByInWords;
  plan.workspace_words = next;
  return plan;
}

Result<int64_t> device_index_words(const LayoutView::Sizes& sizes) {
  const auto plan = plan_device_index(sizes);
  if (!plan.ok()) return plan.status();
  return plan->words;
}

size_t device_index_workspace_size(const LayoutView::Sizes& sizes, Device device) {
  if (device.type != DeviceType::cuda) return 0;
  const auto plan = plan_device_index(sizes);
  return plan.ok() ? static_cast<size_t>(plan->workspace_words) * sizeof(int32_t) : 0;
}

Result<DeviceIndexPlan> check_device_index(const uint8_t* mask, const LayoutView::Sizes& sizes,
                                           std::span<const int32_t> index, Device device, Workspace workspace) {
  auto plan = plan_device_index(sizes);
  if (!plan.ok()) return plan.status();
  const auto bytes = static_cast<size_t>(plan->workspace_words) * sizeof(int32_t);
  if (device.type != DeviceType::cuda) return invalid("[layout] device is the CPU, needs a CUDA card");
  if (index.data() == nullptr || static_cast<int64_t>(index.size()) != plan->words) {
    return invalid("[layout] index has ", index.size(), " words, needs ", plan->words);
  }
  BS_RETURN_IF_ERROR(check_address("layout", "index", index.data(), kIndexAlignment));
  BS_RETURN_IF_ERROR(check_workspace("layout", workspace, bytes, device));
  if (mask == nullptr && plan->by_out.rows > 0 && plan->by_in.rows > 0) return invalid("[layout] mask is not given");
  return plan;
}

Result<Layout> layout_of_device_index(std::span<const int32_t> index) {
  const auto view = LayoutView::from_index(index);
  if (!view.ok()) return view.status();
  const Header& h = header_of(*view);
  if (h.reserved[kWrongBlocks] != 0) {
    return invalid("[layout] the mask holds ", h.reserved[kFoundBlocks], " blocks, ", h.blocks, " were asked for");
  }
  const int32_t* starts = index.data() + index_sections(h.out_blocks, h.in_blocks, h.blocks).by_out.starts;
  std::vector<int64_t> columns;
  columns.reserve(static_cast<size_t>(h.blocks));
  for (const BlockRef& ref : walk_of(*view, false).refs) columns.push_back(ref.from);
  return Layout::from_csr(
      std::vector<int64_t>(starts, starts + h.out_blocks + 1), columns, h.in_blocks,
      {.block_size = h.block_size, .out_features = view->out_features, .in_features = view->in_features});
}

}  // namespace blocksparse
