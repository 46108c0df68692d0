#include "ops/conv/geometry.h"

#include <limits>
#include <string>

#include "core/text.h"

namespace blocksparse {

namespace conv {

namespace {

constexpr int64_t kMost = std::numeric_limits<int32_t>::max();  // the bound of every number of a geometry, and of taps
                                                                // and sizes

Status check_each(const char* op, const char* name, const SpatialSizes& values, int32_t rank, int64_t least) {
  for (size_t i = 0; i < static_cast<size_t>(rank); ++i) {
    if (values[i] >= least && values[i] <= kMost) continue;
    return invalid("[", op, "] ", name, " is ", sizes_text(values, rank), ", needs ", least, " to ", kMost);
  }
  return {};
}

}  // namespace

std::string sizes_text(const SpatialSizes& sizes, int32_t rank) {
  std::string text = "[";
  for (int32_t i = 0; i < rank; ++i) text += concat(i == 0 ? "" : ", ", sizes[static_cast<size_t>(i)]);
  return text + "]";
}

Status check_geometry(const char* op, const ConvGeometry& g) {
  if (g.rank < 1 || g.rank > kMaxSizes) {
    return invalid("[", op, "] the geometry has rank ", g.rank, ", needs 1 to ", kMaxSizes);
  }
  BS_RETURN_IF_ERROR(check_each(op, "kernel", g.kernel, g.rank, 1));
  BS_RETURN_IF_ERROR(check_each(op, "stride", g.stride, g.rank, 1));
  BS_RETURN_IF_ERROR(check_each(op, "dilation", g.dilation, g.rank, 1));
  BS_RETURN_IF_ERROR(check_each(op, "padding_before", g.padding_before, g.rank, 0));
  BS_RETURN_IF_ERROR(check_each(op, "padding_after", g.padding_after, g.rank, 0));
  int64_t taps = 1;
  for (size_t i = 0; i < static_cast<size_t>(g.rank); ++i) {
    if (taps > kMost / g.kernel[i]) {
      return invalid("[", op, "] kernel is ", sizes_text(g.kernel, g.rank), ", more than ", kMost, " taps");
    }
    taps *= g.kernel[i];
  }
  BS_RETURN_IF_ERROR(check_each(op, "output_padding", g.output_padding, g.rank, 0));
  for (size_t i = 0; i < static_cast<size_t>(g.rank); ++i) {
    const int64_t more = g.output_padding[i];
    if (more == 0) continue;
    if (!g.transposed) return invalid("[", op, "] output_padding is given, which a transposed convolution alone has");
    if (more < std::max(g.stride[i], g.dilation[i])) continue;
    return invalid("[", op, "] output_padding is ", sizes_text(g.output_padding, g.rank),
                   ", needs to be less than stride ", sizes_text(g.stride, g.rank), " or dilation ",
                   sizes_text(g.dilation, g.rank));
  }
  return {};
}

Result<SpatialSizes> output_size(const char* op, const ConvGeometry& g, const SpatialSizes& size) {
  SpatialSizes out = {};
  for (size_t i = 0; i < static_cast<size_t>(g.rank); ++i) {
    if (size[i] < 1 || size[i] > kMost) {
      return invalid("[", op, "] an image of ", sizes_text(size, g.rank), ", sizes need to be 1 to ", kMost);
    }
    const int64_t extent = g.dilation[i] * (g.kernel[i] - 1) + 1, padding = g.padding_before[i] + g.padding_after[i];
    if (!g.transposed) {
      if (extent > size[i] + padding) {
        return invalid("[", op, "] kernel ", sizes_text(g.kernel, g.rank), " with dilation ",
                       sizes_text(g.dilation, g.rank), " covers ", extent, " pixels, more than the ", size[i] + padding,
                       " of an image of ", sizes_text(size, g.rank), " with its padding");
      }
      out[i] = (size[i] + padding - extent) / g.stride[i] + 1;
    } else {
      out[i] = (size[i] - 1) * g.stride[i] - padding + extent + g.output_padding[i];
      if (out[i] < 1 || out[i] > kMost) {
        return invalid("[", op, "] an image of ", sizes_text(size, g.rank), " would give one of size ", out[i],
                       ": stride ", g.stride[i], ", kernel ", g.kernel[i], ", padding ", padding, ", needs 1 to ",
                       kMost);
      }
    }
  }
  return out;
}

Result<Images> check_images(const Named& t, int64_t channels, int32_t rank, Orders& orders) {
  BS_RETURN_IF_ERROR(check_tensor(t));
  const ConstTensor& x = t.tensor;
  if (x.rank != rank + 2 || x.shape[1] != channels) {
    return invalid("[", t.op, "] ", t.name, " is ", shape_text(x), ", needs [n, ", channels, "] and ", rank,
                   rank == 1 ? " size" : " sizes");
  }
  Images images{.data = x.data, .n = x.shape[0], .channels = channels};
  for (int32_t i = 0; i < rank; ++i) {
    images.size[static_cast<size_t>(kMaxSizes - rank + i)] = x.shape[static_cast<size_t>(i) + 2];
  }
  // Strides say nothing in dimensions of size 1, nor in a tensor without elements.
  const auto has_strides = [&](int64_t channel, int64_t pixel) {
    int64_t expected = pixel;
    bool same = channels == 1 || x.stride[1] == channel;
    for (auto i = static_cast<size_t>(rank) + 1; i >= 2; --i) {
      same = same && (x.shape[i] == 1 || x.stride[i] == expected);
      expected *= x.shape[i];
    }
    return same && (images.n == 1 || x.stride[0] == images.image_stride());
  };
  const bool empty = images.n == 0 || images.image_stride() == 0;
  const Orders own{.channels_last = empty || has_strides(1, channels),
                   .channels_first = empty || has_strides(images.pixels(), 1)};
  if (!own.channels_last && !own.channels_first) {
    return invalid("[", t.op, "] ", t.name, " of ", shape_text(x), " has strides ", strides_text(x),
                   ", needs to be dense and channels-last, or contiguous");
  }
  const bool wanted_last = orders.channels_last;
  orders = {orders.channels_last && own.channels_last, orders.channels_first && own.channels_first};
  if (!orders.channels_last && !orders.channels_first) {
    return invalid("[", t.op, "] ", t.name, " of ", shape_text(x), " has strides ", strides_text(x), ", which are not ",
                   wanted_last ? "channels-last" : "contiguous", " as the other activations are");
  }
  return images;
}

Gather gather_of(const ConvGeometry& g, bool inverse) {
  Gather gather{.inverse = inverse};
  const auto skipped = static_cast<size_t>(kMaxSizes - g.rank);
  for (size_t i = 0; i < static_cast<size_t>(g.rank); ++i) {
    gather.kernel[skipped + i] = g.kernel[i];
    gather.stride[skipped + i] = g.stride[i];
    gather.dilation[skipped + i] = g.dilation[i];
    gather.padding[skipped + i] = g.padding_before[i];
  }
  return gather;
}

}  // namespace conv

Result<SpatialSizes> conv_output_size(const ConvGeometry& geometry, const SpatialSizes& size) {
  BS_RETURN_IF_ERROR(conv::check_geometry("conv", geometry));
  return conv::output_size("conv", geometry, size);
}

}  // namespace blocksparse
