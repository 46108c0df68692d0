// Drives the convolution on the CPU in rounds. A round packs a box of some images, and multiplies it by the linear op's
// kernels.
#include <algorithm>

#include "core/ceil_div.h"
#include "core/text.h"
#include "cpu/carver.h"
#include "cpu/threads.h"
#include "gemm/cpu/kernels.h"
#include "gemm/cpu/plan.h"
#include "ops/conv/conv.h"
#include "ops/conv/cpu/panels.h"

namespace blocksparse::conv {

namespace {

using gemm::ProductKernel;
using gemm::Range;
using gemm::Tap;
using gemm::TapArgs;

constexpr int64_t kRunsPerThread = 16;  // of rows of blocks

template <class T>
T* advance(T* data, int64_t elements, DType dtype) {
  using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
  return data == nullptr ? nullptr : static_cast<Byte*>(data) + elements * size_of(dtype);
}

const ProductKernel* find_taps_kernel(Isa isa, DType dtype) {
  for (; isa != Isa::reference; isa = next_below(isa)) {
    const ProductKernel* kernel = gemm::find_product_kernel(isa, dtype);
    if (kernel == nullptr || kernel->multiply_taps != nullptr) return kernel;
  }
  return nullptr;
}

size_t pointwise_workspace_size(const Product& p) {
  return gemm::cpu_workspace_bytes(gemm::CpuProblem{.dtype = p.dtype,
                                                    .block = p.layout.block_size,
                                                    .n = p.x.channels_last ? p.x.n * p.x.pixels() : p.x.pixels(),
                                                    .inputs = p.x.channels,
                                                    .outputs = p.y.channels,
                                                    .slots = walk_of(p.layout, p.by_in).slots});
}

// A filter of one tap that stays in place: pixels are tokens. Hubs may ask for more workspace than is promised; then it
// is not done so.
bool is_pointwise(const Product& p) {
  return is_in_place(p.gather, p.x, p.y) && p.x_channels == nullptr && p.y_channels == nullptr &&
         pointwise_workspace_size(p) <= kMostWorkspace;
}

gemm::Product pointwise_product(const Product& p, int64_t image) {
  // The tokens of one image, or of all images together.
  const auto tokens = [&](const Images& a) {
    const int64_t images = a.channels_last ? a.n : 1;
    return gemm::Activations{advance(a.data, image * a.image_stride(), p.dtype), images * a.pixels(), a.channels,
                             a.pixel_stride(), a.channel_stride()};
  };
  return {.dtype = p.dtype,
          .layout = p.layout,
          .by_in = p.by_in,
          .x = tokens(p.x),
          .y = tokens(p.y),
          .residual = p.residual.data == nullptr ? gemm::Activations{} : tokens(p.residual),
          .w = p.w,
          .gates = p.gates,
          .bias = p.bias,
          .activation = p.activation};
}

Status run_pointwise(const Product& p, Isa isa, Workspace workspace, int32_t threads) {
  for (int64_t image = 0; image < (p.x.channels_last ? 1 : p.x.n); ++image) {
    BS_RETURN_IF_ERROR(gemm::cpu_product(pointwise_product(p, image), isa, workspace, threads));
  }
  return {};
}

class Run {
 public:
  Run(const Product& p, const Plan& plan, const ProductKernel& kernel, Workspace workspace, int32_t threads)
      : p_(p), plan_(plan), kernel_(kernel), threads_(threads) {
    Carver carver(workspace);
    panels_ = carver.take(plan.panel_bytes);
    weights_ = plan.weight_bytes == 0 ? nullptr : carver.take(plan.weight_bytes);
    positions_ = static_cast<int64_t*>(carver.take(plan.place_bytes));
    pixels_ = static_cast<int64_t*>(carver.take(plan.place_bytes));
    sources_ = static_cast<int64_t*>(carver.take(plan.source_bytes));
    taps_ = static_cast<Tap*>(carver.take(plan.tap_bytes));
  }

  void all() {
    const AxisPlan &z = plan_.axis[0], &y = plan_.axis[1], &x = plan_.axis[2];
    const int64_t boxes = z.boxes() * y.boxes() * x.boxes();
    const int64_t phases = z.out_phases() * y.out_phases() * x.out_phases();
    pack_weights();
    const Panels panels = panels_of_x();
    for (int64_t box = 0; box < boxes; ++box) {
      const Index b = index_of(box, y.boxes(), x.boxes());
      begin_ = {b.z * z.box, b.y * y.box, b.x * x.box};
      for (int64_t image = 0; image < p_.x.n; image += plan_.images) {
        const int64_t images = std::min(plan_.images, p_.x.n - image);
        panels.gathered(plan_.axis, plan_.positions, begin_, image, images);
        for (int64_t phase = 0; phase < phases; ++phase) {
          const Index f = index_of(phase, y.out_phases(), x.out_phases());
          TapArgs a = args(image);
          a.image = plan_.phases * plan_.positions;
          a.tap_count = list_taps(f);
          a.places = list_places(f);
          multiply(a, images);
        }
      }
    }
  }

  void all_far() {
    const auto& size = p_.x.size;
    const int64_t blocks = ceil_div(p_.x.channels, p_.layout.block_size);
    pack_weights();
    list_sources();
    const Panels panels = panels_of_x();
    for (int64_t image = 0; image < p_.x.n; image += plan_.images) {
      const int64_t images = std::min(plan_.images, p_.x.n - image);
      panels.plain({}, {size[0], size[1], size[2]}, image, images);
      panels.zero(0, blocks * p_.layout.block_size / panels.block, plan_.round - 1, 1);
      TapArgs a = args(image);
      a.image = p_.x.pixels();
      a.tap_count = p_.gather.taps();
      a.places = p_.y.pixels();
      a.sources = sources_;
      a.nothing = plan_.round - 1;
      multiply(a, images);
    }
  }

 private:
  Panels panels_of_x() const {
    return {.from = p_.x,
            .order = p_.x_channels,
            .dtype = p_.dtype,
            .block = std::min<int64_t>(p_.layout.block_size, gemm::kTapInputs),
            .data = panels_,
            .round = plan_.round,
            .pack = gemm::find_gradient_kernel(kernel_.isa, p_.dtype)->pack,
            .threads = threads_};
  }

  // Lists every pixel, and the pixel that each tap brings to it.
  void list_sources() const {
    const auto &in = p_.x.size, &out = p_.y.size;
    for (int64_t place = 0; place < p_.y.pixels(); ++place) pixels_[place] = place;
    int64_t at = 0;
    for (int64_t tap = 0; tap < p_.gather.taps(); ++tap) {
      taps_[tap] = {0, tap};
      const Index t = index_of(tap, p_.gather.kernel[1], p_.gather.kernel[2]);
      for (int64_t place = 0; place < p_.y.pixels(); ++place, ++at) {
        const Index q = index_of(place, out[1], out[2]);
        const auto z = p_.gather.source(0, q.z, t.z, in[0]), y = p_.gather.source(1, q.y, t.y, in[1]),
                   x = p_.gather.source(2, q.x, t.x, in[2]);
        sources_[at] = z && y && x ? (*z * in[1] + *y) * in[2] + *x : -1;
      }
    }
  }

  void pack_weights() const {
    if (weights_ == nullptr || p_.x.n == 0) return;
    const TapArgs a = args(0);
    parallel_for(threads_, p_.layout.blocks, [&](int64_t block) { kernel_.pack_tap_weights(a, block, block + 1); });
  }

  // Lists the taps that count in a phase of y, in the order of the filter.
  int64_t list_taps(const Index& f) const {
    const AxisPlan &z = plan_.axis[0], &y = plan_.axis[1], &x = plan_.axis[2];
    int64_t count = 0;
    for (int64_t tap = 0; tap < p_.gather.taps(); ++tap) {
      const Index t = index_of(tap, y.kernel, x.kernel);
      const Index shift = {z.shift_of(t.z, f.z), y.shift_of(t.y, f.y), x.shift_of(t.x, f.x)};
      if (std::min({shift.z, shift.y, shift.x}) < 0) continue;
      const int64_t phase = (t.z % z.phases * y.phases + t.y % y.phases) * x.phases + t.x % x.phases;
      taps_[count++] = {phase * plan_.positions + plan_.offset(shift.z, shift.y, shift.x), tap};
    }
    return count;
  }

  // Lists the places of y in the box.
  int64_t list_places(const Index& f) const {
    const auto places = [&](const AxisPlan& a, int64_t phase, int64_t begin) {
      return std::min(a.box, a.places_of(phase) - begin);
    };
    const AxisPlan &z = plan_.axis[0], &y = plan_.axis[1], &x = plan_.axis[2];
    const Index n = {places(z, f.z, begin_.z), places(y, f.y, begin_.y), places(x, f.x, begin_.x)};
    int64_t count = 0;
    for (int64_t qz = 0; qz < n.z; ++qz) {
      for (int64_t qy = 0; qy < n.y; ++qy) {
        const int64_t pz = (begin_.z + qz) * z.out_step() + f.z, py = (begin_.y + qy) * y.out_step() + f.y;
        const int64_t row = (pz * p_.y.size[1] + py) * p_.y.size[2];
        for (int64_t qx = 0; qx < n.x; ++qx, ++count) {
          positions_[count] = plan_.offset(qz, qy, qx);
          pixels_[count] = row + (begin_.x + qx) * x.out_step() + f.x;
        }
      }
    }
    return count;
  }

  TapArgs args(int64_t image) const {
    const Header& header = header_of(p_.layout);
    const IndexSections at = index_sections(header.out_blocks, header.in_blocks, p_.layout.blocks);
    const int64_t y_at = image * p_.y.image_stride();
    return {.product = {.block = p_.layout.block_size,
                        .by_in = p_.by_in,
                        .inputs = p_.x.channels,
                        .outputs = p_.y.channels,
                        .w = p_.w,
                        .gates = p_.gates,
                        .y = advance(const_cast<void*>(p_.y.data), y_at, p_.dtype),
                        .y_token = p_.y.pixel_stride(),
                        .y_feature = p_.y.channel_stride(),
                        .residual = advance(p_.residual.data, y_at, p_.dtype),
                        .residual_token = p_.y.pixel_stride(),
                        .residual_feature = p_.y.channel_stride(),
                        .bias = p_.bias,
                        .activation = p_.activation},
            .y_image = p_.y.image_stride(),
            .y_channels = p_.y_channels,
            .panels = panels_,
            .round = plan_.round,
            .weights = weights_,
            .starts = p_.layout.index + (p_.by_in ? at.by_in.starts : at.by_out.starts),
            .refs = walk_of(p_.layout, p_.by_in).refs.data(),
            .taps = p_.gather.taps(),
            .tap = taps_,
            .positions = positions_,
            .pixels = pixels_};
  }

  void multiply(const TapArgs& a, int64_t images) const {
    const int64_t pixels = images * a.places, group = kernel_.tap_group, groups = ceil_div(pixels, group);
    const int64_t rows = ceil_div(p_.y.channels, p_.layout.block_size);
    const int64_t length = threads_ == 1 ? rows : ceil_div(rows, threads_ * kRunsPerThread);
    const int64_t runs = ceil_div(rows, length);
    parallel_for(threads_, runs * groups, [&](int64_t task) {
      const int64_t first = task / runs * group;
      const Range range{first, std::min(first + group, pixels)};
      kernel_.multiply_taps(a, {task % runs * length, std::min((task % runs + 1) * length, rows)}, range);
    });
  }

  const Product& p_;
  const Plan& plan_;
  const ProductKernel& kernel_;
  int32_t threads_;
  void* panels_;
  void* weights_;
  int64_t *positions_, *pixels_;
  int64_t* sources_;  // [taps][places]
  Tap* taps_;
  Index begin_;
};

}  // namespace

Status cpu_product(const Product& p, Isa isa, Workspace workspace, int32_t threads) {
  const Plan plan = plan_product(p);
  if (isa == Isa::reference || !plan.fits) {
    reference_product(p);
    return {};
  }
  if (is_pointwise(p)) return run_pointwise(p, isa, workspace, threads);
  const ProductKernel* kernel = find_taps_kernel(isa, p.dtype);
  if (kernel == nullptr) {
    return {StatusCode::unsupported, concat("[conv] there is no ", name_of(isa), " kernel for ", name_of(p.dtype))};
  }
  const double flops = 2.0 * static_cast<double>(p.y.n * p.y.pixels()) * static_cast<double>(p.layout.blocks) *
                       static_cast<double>(p.gather.taps() * p.layout.block_size * p.layout.block_size);
  Run run(p, plan, *kernel, workspace, worthwhile_threads(threads, flops));
  if (plan.far) run.all_far();
  else run.all();
  return {};
}

size_t cpu_workspace_size(const Product& p) {
  const size_t taps = plan_product(p).workspace_bytes();
  return is_pointwise(p) ? std::max(taps, pointwise_workspace_size(p)) : taps;
}

}  // namespace blocksparse::conv
