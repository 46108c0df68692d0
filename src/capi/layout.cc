// Layouts through the C interface.
#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "blocksparse/blocksparse.h"
#include "blocksparse/c_api.h"
#include "capi/translate.h"
#include "core/text.h"

struct bs_layout {
  blocksparse::Layout layout;
};

namespace {

using namespace blocksparse;        // NOLINT(google-build-using-namespace)
using namespace blocksparse::capi;  // NOLINT(google-build-using-namespace)

Blocking to_blocking(const bs_blocking& b) { return {b.block_size, b.out_features, b.in_features}; }

Status give(Result<Layout> made, bs_layout** layout) {
  if (!made.ok()) return made.status();
  *layout = new bs_layout{*std::move(made)};
  return {};
}

template <class Make>
bs_status make_layout(const bs_blocking* blocking, bs_layout** layout, Make&& make) {
  return guarded([&]() -> Status {
    BS_RETURN_IF_ERROR(need("layout", "blocking", blocking));
    BS_RETURN_IF_ERROR(need("layout", "layout", layout));
    return give(make(to_blocking(*blocking)), layout);
  });
}

bs_layout_view from_view(const LayoutView& v) {
  return {.index = v.index,
          .device_type = static_cast<int32_t>(v.device.type),
          .device_index = v.device.index,
          .transposed = v.transposed ? 1 : 0,
          .block_size = v.block_size,
          .out_features = v.out_features,
          .in_features = v.in_features,
          .blocks = v.blocks,
          .cut_by_out = v.cut_by_out ? 1 : 0,
          .cut_by_in = v.cut_by_in ? 1 : 0};
}

LayoutView::Sizes sizes_of(const bs_layout_view& v) { return {v.block_size, v.out_features, v.in_features, v.blocks}; }

bs_degrees from_degrees(const graphs::Degrees& d) { return {d.min, d.median, d.max}; }

}  // namespace

extern "C" {

bs_status bs_layout_from_mask(const uint8_t* mask, int64_t out_blocks, int64_t in_blocks, const bs_blocking* blocking,
                              bs_layout** layout) {
  return make_layout(blocking, layout, [&](Blocking b) -> Result<Layout> {
    const bool empty = out_blocks <= 0 || in_blocks <= 0;
    if (!empty) BS_RETURN_IF_ERROR(need("layout", "mask", mask));
    const auto size =
        static_cast<size_t>(std::max<int64_t>(out_blocks, 0)) * static_cast<size_t>(std::max<int64_t>(in_blocks, 0));
    return Layout::from_mask({mask, empty ? 0 : size}, out_blocks, in_blocks, b);
  });
}

bs_status bs_layout_from_coordinates(const int32_t* out, const int32_t* in, int64_t blocks, int64_t out_blocks,
                                     int64_t in_blocks, const bs_blocking* blocking, bs_layout** layout) {
  return make_layout(blocking, layout, [&](Blocking b) -> Result<Layout> {
    constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
    if (blocks < 0 || blocks > kMost) return invalid("[layout] blocks is ", blocks, ", needs 0 to ", kMost);
    if (blocks > 0) {
      BS_RETURN_IF_ERROR(need("layout", "out", out));
      BS_RETURN_IF_ERROR(need("layout", "in", in));
    }
    return Layout::from_coordinates({out, static_cast<size_t>(blocks)}, {in, static_cast<size_t>(blocks)}, out_blocks,
                                    in_blocks, b);
  });
}

bs_status bs_layout_from_csr(const int64_t* row_start, const int64_t* columns, int64_t out_blocks, int64_t in_blocks,
                             const bs_blocking* blocking, bs_layout** layout) {
  return make_layout(blocking, layout, [&](Blocking b) -> Result<Layout> {
    BS_RETURN_IF_ERROR(need("layout", "row_start", row_start));
    if (out_blocks < 0) return invalid("[layout] out_blocks is ", out_blocks, ", needs 0 or more");
    const int64_t blocks = row_start[out_blocks];
    if (blocks < 0) return invalid("[layout] row_start ends with ", blocks, ", needs 0 or more");
    if (blocks > 0) BS_RETURN_IF_ERROR(need("layout", "columns", columns));
    return Layout::from_csr({row_start, static_cast<size_t>(out_blocks) + 1}, {columns, static_cast<size_t>(blocks)},
                            in_blocks, b);
  });
}

bs_status bs_layout_from_graph(const char* name, int64_t seed, const bs_blocking* blocking, bs_layout** layout) {
  return make_layout(blocking, layout, [&](Blocking b) -> Result<Layout> {
    BS_RETURN_IF_ERROR(need("layout", "name", name));
    return Layout::from_graph(name, b, seed);
  });
}

bs_status bs_layout_from_pattern(const int32_t* pattern, int64_t words, bs_layout** layout) {
  return guarded([&]() -> Status {
    BS_RETURN_IF_ERROR(need("layout", "pattern", pattern));
    BS_RETURN_IF_ERROR(need("layout", "layout", layout));
    if (words < 0) return invalid("[layout] words is ", words, ", needs 0 or more");
    return give(Layout::from_pattern({pattern, static_cast<size_t>(words)}), layout);
  });
}

bs_status bs_layout_t(const bs_layout* layout, bs_layout** transposed) {
  return guarded([&]() -> Status {
    BS_RETURN_IF_ERROR(need("layout", "layout", layout));
    BS_RETURN_IF_ERROR(need("layout", "transposed", transposed));
    return give(layout->layout.t(), transposed);
  });
}

bs_status bs_layout_stack(const bs_layout* layout, int64_t times, bs_layout** stacked) {
  return guarded([&]() -> Status {
    BS_RETURN_IF_ERROR(need("layout", "layout", layout));
    BS_RETURN_IF_ERROR(need("layout", "stacked", stacked));
    return give(layout->layout.stack(times), stacked);
  });
}

void bs_layout_free(bs_layout* layout) { delete layout; }

bs_status bs_layout_get_info(const bs_layout* layout, bs_layout_info* info) {
  return guarded([&]() -> Status {
    BS_RETURN_IF_ERROR(need("layout", "layout", layout));
    BS_RETURN_IF_ERROR(need("layout", "info", info));
    const Layout& l = layout->layout;
    *info = {.block_size = l.block_size(),
             .transposed = l.transposed() ? 1 : 0,
             .out_features = l.out_features(),
             .in_features = l.in_features(),
             .out_blocks = l.out_blocks(),
             .in_blocks = l.in_blocks(),
             .blocks = l.blocks(),
             .pattern_words = l.pattern_words(),
             .index_words = static_cast<int64_t>(l.index().size()),
             .hash = l.hash()};
    return {};
  });
}

bs_status bs_layout_get_view(const bs_layout* layout, bs_layout_view* view) {
  return guarded([&]() -> Status {
    BS_RETURN_IF_ERROR(need("layout", "layout", layout));
    BS_RETURN_IF_ERROR(need("layout", "view", view));
    *view = from_view(layout->layout.view());
    return {};
  });
}

bs_status bs_layout_index_for_card(const bs_layout* layout, int32_t* index) {
  return guarded([&]() -> Status {
    BS_RETURN_IF_ERROR(need("layout", "layout", layout));
    BS_RETURN_IF_ERROR(need("layout", "index", index));
    const std::vector<int32_t> words = index_for_card(layout->layout);
    std::copy(words.begin(), words.end(), index);
    return {};
  });
}

bs_status bs_layout_view_from_index(const int32_t* index, int64_t words, bs_layout_view* view) {
  return guarded([&]() -> Status {
    BS_RETURN_IF_ERROR(need("layout", "index", index));
    BS_RETURN_IF_ERROR(need("layout", "view", view));
    const auto made = LayoutView::from_index({index, static_cast<size_t>(std::max<int64_t>(words, 0))});
    if (!made.ok()) return made.status();
    *view = from_view(*made);
    return {};
  });
}

bs_status bs_layout_view_on_device(int64_t words, bs_layout_view* view) {
  return guarded([&]() -> Status {
    BS_RETURN_IF_ERROR(need("layout", "view", view));
    const LayoutView v = to_view(*view);
    const LayoutView::Sizes sizes{v.block_size, v.out_features, v.in_features, v.blocks};
    auto made = LayoutView::on_device({v.index, static_cast<size_t>(std::max<int64_t>(words, 0))}, sizes, v.device);
    if (!made.ok()) return made.status();
    made->transposed = v.transposed;
    *view = from_view(*made);
    return {};
  });
}

bs_status bs_layout_build_words(const bs_layout_view* view, int64_t* words) {
  return guarded([&]() -> Status {
    BS_RETURN_IF_ERROR(need("layout", "view", view));
    BS_RETURN_IF_ERROR(need("layout", "words", words));
    const auto count = device_index_words(sizes_of(*view));
    if (!count.ok()) return count.status();
    *words = *count;
    return {};
  });
}

size_t bs_layout_build_workspace_size(const bs_layout_view* view) {
  return view == nullptr ? 0 : device_index_workspace_size(sizes_of(*view), {DeviceType::cuda, view->device_index});
}

bs_status bs_layout_build(const uint8_t* mask, const bs_layout_view* view, int32_t* index, int64_t words,
                          bs_workspace workspace, bs_stream stream) {
  return guarded([&]() -> Status {
    BS_RETURN_IF_ERROR(need("layout", "view", view));
    return make_device_index(mask, sizes_of(*view), {index, static_cast<size_t>(std::max<int64_t>(words, 0))},
                             to_view(*view).device, to_workspace(workspace), to_stream(stream));
  });
}

bs_status bs_layout_from_device_index(const int32_t* index, int64_t words, bs_layout** layout) {
  return guarded([&]() -> Status {
    BS_RETURN_IF_ERROR(need("layout", "layout", layout));
    return give(layout_of_device_index({index, static_cast<size_t>(std::max<int64_t>(words, 0))}), layout);
  });
}

bs_status bs_layout_csr(const bs_layout* layout, int32_t* row_start, int32_t* columns) {
  return guarded([&]() -> Status {
    BS_RETURN_IF_ERROR(need("layout", "layout", layout));
    BS_RETURN_IF_ERROR(need("layout", "row_start", row_start));
    if (layout->layout.blocks() > 0) BS_RETURN_IF_ERROR(need("layout", "columns", columns));
    const auto starts = layout->layout.row_start(), cols = layout->layout.columns();
    std::copy(starts.begin(), starts.end(), row_start);
    std::copy(cols.begin(), cols.end(), columns);
    return {};
  });
}

bs_status bs_layout_pattern(const bs_layout* layout, int32_t* pattern) {
  return guarded([&]() -> Status {
    BS_RETURN_IF_ERROR(need("layout", "layout", layout));
    BS_RETURN_IF_ERROR(need("layout", "pattern", pattern));
    const auto words = layout->layout.pattern();
    std::copy(words.begin(), words.end(), pattern);
    return {};
  });
}

bs_status bs_layout_equal(const bs_layout* a, const bs_layout* b, int32_t* equal) {
  return guarded([&]() -> Status {
    BS_RETURN_IF_ERROR(need("layout", "a", a));
    BS_RETURN_IF_ERROR(need("layout", "b", b));
    BS_RETURN_IF_ERROR(need("layout", "equal", equal));
    *equal = a->layout == b->layout ? 1 : 0;
    return {};
  });
}

bs_status bs_layout_report(const bs_layout* layout, bs_report* report) {
  return guarded([&]() -> Status {
    BS_RETURN_IF_ERROR(need("layout", "layout", layout));
    BS_RETURN_IF_ERROR(need("layout", "report", report));
    const graphs::Report r = graphs::report(layout->layout);
    *report = {.blocks = r.blocks,
               .density = r.density,
               .out = from_degrees(r.out),
               .in = from_degrees(r.in),
               .mean_path = r.mean_path,
               .unreachable = r.unreachable,
               .clustering = r.clustering,
               .diameter = r.diameter,
               .symmetric = r.symmetric ? 1 : 0,
               .sampled = r.sampled ? 1 : 0,
               .mix_steps = static_cast<int32_t>(std::min<size_t>(r.mix.size(), BS_MAX_MIX)),
               .mix = {}};
    std::copy_n(r.mix.begin(), report->mix_steps, report->mix);
    return {};
  });
}

bs_status bs_layout_mix(const bs_layout* const* layouts, int64_t count, double* mix) {
  return guarded([&]() -> Status {
    if (count < 0) return invalid("[mix] count is ", count, ", needs 0 or more");
    if (count == 0) return {};
    BS_RETURN_IF_ERROR(need("mix", "layouts", static_cast<const void*>(layouts)));
    BS_RETURN_IF_ERROR(need("mix", "mix", mix));
    std::vector<Layout> steps;
    for (int64_t i = 0; i < count; ++i) {
      BS_RETURN_IF_ERROR(need("mix", "a layout", layouts[i]));
      steps.push_back(layouts[i]->layout);
    }
    const auto shares = graphs::mix(steps);
    if (!shares.ok()) return shares.status();
    std::copy(shares->begin(), shares->end(), mix);
    return {};
  });
}

}  // extern "C"
