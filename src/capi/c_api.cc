// The C interface: translates, catches, remembers the last error. No logic of its own.
#include "blocksparse/c_api.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "blocksparse/blocksparse.h"
#include "capi/translate.h"
#include "core/text.h"
#include "cpu/threads.h"

struct bs_layout {
  blocksparse::Layout layout;
};

namespace {

using namespace blocksparse;        // NOLINT(google-build-using-namespace)
using namespace blocksparse::capi;  // NOLINT(google-build-using-namespace)

std::string in_one_line(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : " ") + name;
  return text;
}

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

template <class Size>
size_t linear_workspace_size(const bs_layout_view* layout, int32_t dtype, int64_t n, Size size) {
  if (layout == nullptr || size_of(static_cast<DType>(dtype)) == 0) return 0;
  return size(to_view(*layout), static_cast<DType>(dtype), n,
              Device{static_cast<DeviceType>(layout->device_type), layout->device_index});
}

}  // namespace

namespace blocksparse::capi {

std::string& last_error() {
  thread_local std::string message;
  return message;
}

}  // namespace blocksparse::capi

extern "C" {

int32_t bs_abi_version(void) { return BS_ABI_VERSION; }
const char* bs_version(void) { return version().data(); }
const char* bs_last_error(void) { return last_error().c_str(); }

const char* bs_cpu_isas(void) {
  static const std::string names = in_one_line(cpu_isas());
  return names.c_str();
}

bs_status bs_cpu_isa(const char** name) {
  return guarded([&]() -> Status {
    BS_RETURN_IF_ERROR(need("isa", "name", name));
    const auto isa = cpu_isa();
    if (!isa.ok()) return isa.status();
    thread_local std::string held;
    held = *isa;
    *name = held.c_str();
    return {};
  });
}

bs_status bs_set_cpu_isa(const char* name) {
  return guarded([&]() -> Status {
    BS_RETURN_IF_ERROR(need("isa", "name", name));
    return set_cpu_isa(name);
  });
}

bs_status bs_cuda_status(void) {
  return guarded([] { return cuda_status(); });
}
const char* bs_cuda_kernels(void) {
  static const std::string names = in_one_line(cuda_kernels());
  return names.c_str();
}

bs_status bs_set_cuda_kernel(const char* name) {
  return guarded([&]() -> Status {
    BS_RETURN_IF_ERROR(need("cuda", "name", name));
    return set_cuda_kernel(name);
  });
}

bs_status bs_cuda_prepare(int32_t device_index) {
  return guarded([&] { return cuda_prepare({DeviceType::cuda, device_index}); });
}

int32_t bs_default_threads(void) { return default_threads(); }

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
    constexpr int64_t kMost = std::numeric_limits<int32_t>::max() - 1;
    if (blocks < 0 || blocks > kMost) return invalid("[layout] blocks is ", blocks, ", needs 0 to ", kMost);
    if (blocks > 0) {
      BS_RETURN_IF_ERROR(need("layout", "out", out));
      BS_RETURN_IF_ERROR(need("layout", "in", in));
    }
    return Layout::from_coordinates({out_blocks, in_blocks, {out, out + blocks}, {in, in + blocks}}, b);
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
  return view == nullptr ? 0 : device_index_workspace_size(sizes_of(*view));
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

bs_status bs_linear_fprop(const bs_layout_view* layout, const bs_tensor* x, const bs_tensor* w, const bs_tensor* gates,
                          const bs_epilogue* epilogue, const bs_tensor* y, bs_workspace workspace, bs_stream stream) {
  return guarded([&]() -> Status {
    const char* op = "linear_fprop";
    BS_RETURN_IF_ERROR(need(op, "layout", layout));
    BS_RETURN_IF_ERROR(need(op, "x", x));
    BS_RETURN_IF_ERROR(need(op, "w", w));
    BS_RETURN_IF_ERROR(need(op, "y", y));
    Epilogue e;
    if (epilogue != nullptr) {
      e = {to_const(epilogue->bias), to_const(epilogue->residual), static_cast<Activation>(epilogue->activation)};
    }
    return linear_fprop(to_view(*layout), to_const(x), {to_const(w), to_const(gates)}, e, to_tensor(y),
                        to_workspace(workspace), to_stream(stream));
  });
}

bs_status bs_linear_dgrad(const bs_layout_view* layout, const bs_tensor* dy, const bs_tensor* w, const bs_tensor* gates,
                          const bs_tensor* dx, bs_workspace workspace, bs_stream stream) {
  return guarded([&]() -> Status {
    const char* op = "linear_dgrad";
    BS_RETURN_IF_ERROR(need(op, "layout", layout));
    BS_RETURN_IF_ERROR(need(op, "dy", dy));
    BS_RETURN_IF_ERROR(need(op, "w", w));
    BS_RETURN_IF_ERROR(need(op, "dx", dx));
    return linear_dgrad(to_view(*layout), to_const(dy), {to_const(w), to_const(gates)}, to_tensor(dx),
                        to_workspace(workspace), to_stream(stream));
  });
}

bs_status bs_linear_wgrad(const bs_layout_view* layout, int64_t pairs, const bs_tensor* x, const bs_tensor* dy,
                          const bs_tensor* w, const bs_tensor* gates, int32_t accumulate, const bs_tensor* dw,
                          const bs_tensor* dgates, bs_workspace workspace, bs_stream stream) {
  return guarded([&]() -> Status {
    const char* op = "linear_wgrad";
    BS_RETURN_IF_ERROR(need(op, "layout", layout));
    BS_RETURN_IF_ERROR(need(op, "dw", dw));
    if (pairs < 0) return invalid("[", op, "] pairs is ", pairs, ", needs 0 or more");
    if (pairs > 0) {
      BS_RETURN_IF_ERROR(need(op, "x", x));
      BS_RETURN_IF_ERROR(need(op, "dy", dy));
    }
    if (accumulate != 0 && accumulate != 1) return invalid("[", op, "] accumulate is ", accumulate, ", needs 0 or 1");
    // One pair, the usual case, needs no memory.
    const auto pair_at = [&](int64_t i) { return GradPair{to_const(x + i), to_const(dy + i)}; };
    const GradPair single = pairs == 1 ? pair_at(0) : GradPair{};
    std::vector<GradPair> many;
    for (int64_t i = 0; pairs > 1 && i < pairs; ++i) many.push_back(pair_at(i));
    const std::span<const GradPair> list = pairs == 1 ? std::span(&single, 1) : std::span<const GradPair>(many);
    return linear_wgrad(to_view(*layout), list, {to_const(w), to_const(gates)}, static_cast<Accumulate>(accumulate),
                        {to_tensor(dw), to_tensor(dgates)}, to_workspace(workspace), to_stream(stream));
  });
}

size_t bs_linear_fprop_workspace_size(const bs_layout_view* layout, int32_t dtype, int64_t n) {
  return linear_workspace_size(layout, dtype, n, linear_fprop_workspace_size);
}
size_t bs_linear_dgrad_workspace_size(const bs_layout_view* layout, int32_t dtype, int64_t n) {
  return linear_workspace_size(layout, dtype, n, linear_dgrad_workspace_size);
}
size_t bs_linear_wgrad_workspace_size(const bs_layout_view* layout, int32_t dtype, int64_t n) {
  return linear_workspace_size(layout, dtype, n, linear_wgrad_workspace_size);
}

}  // extern "C"
