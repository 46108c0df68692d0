// What the convolution means, in plain loops with double sums. Tests and the bench compare every kernel with it. It
// also runs as the instruction set "reference".
#include <algorithm>
#include <optional>

#include "core/convert.h"
#include "gemm/reference.h"
#include "ops/conv/conv.h"

namespace blocksparse::conv {

namespace {

// A position along each axis.
struct Place {
  int64_t z, y, x;
};

Place place_of(int64_t index, const SpatialSizes& size) {
  return {index / (size[1] * size[2]), index / size[2] % size[1], index % size[2]};
}

int64_t offset_of(const Images& a, int64_t image, int64_t channel, int64_t pixel) {
  return image * a.image_stride() + channel * a.channel_stride() + pixel * a.pixel_stride();
}

double element(const Images& a, int64_t image, int64_t channel, int64_t pixel, DType dtype) {
  return load_element(a.data, offset_of(a, image, channel, pixel), dtype);
}

int64_t channel_of(const int32_t* order, int64_t channel) { return order == nullptr ? channel : order[channel]; }

// The pixel of `images` that `tap` brings to `pixel` of images of `size`.
std::optional<int64_t> gathered_pixel(const Gather& gather, int64_t tap, const SpatialSizes& size, int64_t pixel,
                                      const Images& images) {
  const Place p = place_of(pixel, size), t = place_of(tap, gather.kernel);
  const auto z = gather.source(0, p.z, t.z, images.size[0]);
  const auto y = gather.source(1, p.y, t.y, images.size[1]);
  const auto x = gather.source(2, p.x, t.x, images.size[2]);
  if (!z || !y || !x) return std::nullopt;
  return (*z * images.size[1] + *y) * images.size[2] + *x;
}

}  // namespace

double reference_product_at(const Product& p, int64_t image, int64_t o, int64_t pixel) {
  const int64_t b = p.layout.block_size, taps = p.gather.taps();
  const RowWalk walk = walk_of(p.layout, p.by_in);
  const Header& header = header_of(p.layout);
  const IndexSections at = index_sections(header.out_blocks, header.in_blocks, p.layout.blocks);
  const int32_t* starts = p.layout.index + (p.by_in ? at.by_in.starts : at.by_out.starts);
  double sum = 0;
  for (int64_t tap = 0; tap < taps; ++tap) {
    const auto from = gathered_pixel(p.gather, tap, p.y.size, pixel, p.x);
    if (!from) continue;
    for (int32_t i = starts[o / b]; i < starts[o / b + 1]; ++i) {
      const BlockRef ref = walk.refs[static_cast<size_t>(i)];
      const double gate = gemm::reference_gate(p.gates, ref.weight, p.dtype);
      if (gate == 0) continue;
      const int64_t first = ref.from * b;
      for (int64_t k = 0; k < std::min(b, p.x.channels - first); ++k) {
        const int64_t row = p.by_in ? k : o % b, column = p.by_in ? o % b : k;
        const double w = load_element(p.w, ((ref.weight * taps + tap) * b + row) * b + column, p.dtype);
        sum += gate * w * element(p.x, image, channel_of(p.x_channels, first + k), *from, p.dtype);
      }
    }
  }
  const int64_t channel = channel_of(p.y_channels, o);
  if (p.bias != nullptr) sum += load_element(p.bias, channel, p.dtype);
  if (p.residual.data != nullptr) sum += element(p.residual, image, channel, pixel, p.dtype);
  return gemm::reference_activation(p.activation, sum);
}

void reference_product(const Product& p) {
  for (int64_t image = 0; image < p.y.n; ++image) {
    for (int64_t o = 0; o < p.y.channels; ++o) {
      for (int64_t pixel = 0; pixel < p.y.pixels(); ++pixel) {
        store_element(const_cast<void*>(p.y.data), offset_of(p.y, image, channel_of(p.y_channels, o), pixel), p.dtype,
                      reference_product_at(p, image, o, pixel));
      }
    }
  }
}

std::optional<double> reference_gradient_at(const WeightGradient& g, int64_t block, int64_t tap, int64_t row,
                                            int64_t column) {
  const int64_t b = g.layout.block_size;
  const int64_t r = out_of(g.layout)[static_cast<size_t>(block)] * b + row;
  const int64_t c = walk_of(g.layout, false).refs[static_cast<size_t>(block)].from * b + column;
  if (r >= g.rows.channels || c >= g.columns.channels) return std::nullopt;
  const int64_t row_channel = channel_of(g.row_channels, r), column_channel = channel_of(g.column_channels, c);
  double sum = 0;
  for (int64_t image = 0; image < g.rows.n; ++image) {
    for (int64_t pixel = 0; pixel < g.plain().pixels(); ++pixel) {
      const auto from = gathered_pixel(g.gather, tap, g.plain().size, pixel, g.gathered());
      if (!from) continue;
      sum += element(g.rows, image, row_channel, g.gathers_rows ? *from : pixel, g.dtype) *
             element(g.columns, image, column_channel, g.gathers_rows ? pixel : *from, g.dtype);
    }
  }
  return sum;
}

// dW = gate * S;  dgate = sum over taps and the block of S * W
void reference_weight_gradient(const WeightGradient& g) {
  const int64_t b = g.layout.block_size, taps = g.gather.taps();
  for (int64_t block = 0; block < g.layout.blocks; ++block) {
    const double gate = gemm::reference_gate(g.gates, block, g.dtype);
    double gate_sum = 0;
    for (int64_t entry = 0; entry < taps * b * b; ++entry) {
      const int64_t at = block * taps * b * b + entry;
      const auto sum = reference_gradient_at(g, block, entry / (b * b), entry / b % b, entry % b);
      if (sum && g.dgates != nullptr) gate_sum += *sum * load_element(g.w, at, g.dtype);
      const double old = g.accumulate ? load_element(g.dw, at, g.dw_dtype) : 0;
      store_element(g.dw, at, g.dw_dtype, old + (gate == 0 ? 0 : gate * sum.value_or(0)));
    }
    if (g.dgates == nullptr) continue;
    const double old = g.accumulate ? load_element(g.dgates, block, sum_dtype(g.dtype)) : 0;
    store_element(g.dgates, block, sum_dtype(g.dtype), old + gate_sum);
  }
}

}  // namespace blocksparse::conv
