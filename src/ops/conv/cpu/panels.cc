#include "ops/conv/cpu/panels.h"

#include <algorithm>
#include <cstring>

#include "core/ceil_div.h"
#include "cpu/threads.h"

namespace blocksparse::conv {

namespace {

constexpr int64_t kPackFeatures = 512;  // of one task

}  // namespace

gemm::RowsToPack Panels::rows() const {
  return {.token_stride = from.pixel_stride(),
          .feature_stride = from.channel_stride(),
          .features = from.channels,
          .block = static_cast<int32_t>(block),
          .order = order,
          .panels = data,
          .round = round};
}

const void* Panels::pixel(int64_t image, int64_t z, int64_t y, int64_t x) const {
  const int64_t at = (z * from.size[1] + y) * from.size[2] + x;
  return static_cast<const char*>(from.data) +
         (image * from.image_stride() + at * from.pixel_stride()) * size_of(dtype);
}

void Panels::zero(int64_t first_block, int64_t last_block, int64_t position, int64_t count) const {
  const int64_t bytes = block * size_of(sum_dtype(dtype));
  for (int64_t i = first_block; i < last_block && count > 0; ++i) {
    std::memset(static_cast<char*>(data) + (i * round + position) * bytes, 0, static_cast<size_t>(count * bytes));
  }
}

template <class Body>
void Panels::for_each_slice(int64_t count, Body body) const {
  const int64_t blocks = ceil_div(from.channels, block), per_slice = kPackFeatures / block;
  const int64_t slices = ceil_div(blocks, per_slice);
  parallel_for(threads, slices * count, [&](int64_t task) {
    const int64_t first = task % slices * per_slice;
    body(first, std::min(first + per_slice, blocks), task / slices);
  });
}

void Panels::gathered(const AxisPlan (&axis)[3], int64_t positions, const Index& begin, int64_t image,
                      int64_t images) const {
  const AxisPlan &z = axis[0], &y = axis[1], &x = axis[2];
  const int64_t phases = z.phases * y.phases * x.phases;
  for_each_slice(images * phases, [&](int64_t first, int64_t last, int64_t i) {
    const Index f = index_of(i % phases, y.phases, x.phases);
    gemm::RowsToPack to = rows();
    to.token_stride *= x.in_step();
    const int64_t x_first = x.first_pixel(f.x, begin.x);
    const int64_t lo = std::clamp<int64_t>(ceil_div(std::max<int64_t>(0, -x_first), x.in_step()), 0, x.reach);
    const int64_t hi =
        std::clamp<int64_t>(ceil_div(std::max<int64_t>(0, x.in_size - x_first), x.in_step()), lo, x.reach);
    for (int64_t row = 0; row < z.reach * y.reach; ++row) {
      const int64_t jz = row / y.reach, jy = row % y.reach;
      const int64_t position = i * positions + (jz * y.pitch + jy) * x.pitch;
      const int64_t iz = z.first_pixel(f.z, begin.z) + jz * z.in_step();
      const int64_t iy = y.first_pixel(f.y, begin.y) + jy * y.in_step();
      const bool exists = iz >= 0 && iz < z.in_size && iy >= 0 && iy < y.in_size && lo < hi;
      zero(first, last, position, exists ? lo : x.reach);
      if (!exists) continue;
      to.source = pixel(image + i / phases, iz, iy, x_first + lo * x.in_step());
      to.tokens = hi - lo;
      to.first_token = position + lo;
      pack(to, first, last);
      zero(first, last, position + hi, x.reach - hi);
    }
  });
}

void Panels::plain(const Index& begin, const Index& size, int64_t image, int64_t images) const {
  for_each_slice(images, [&](int64_t first, int64_t last, int64_t i) {
    gemm::RowsToPack to = rows();
    to.tokens = size.x;
    for (int64_t row = 0; row < size.z * size.y; ++row) {
      to.source = pixel(image + i, begin.z + row / size.y, begin.y + row % size.y, begin.x);
      to.first_token = (i * size.z * size.y + row) * size.x;
      pack(to, first, last);
    }
  });
}

}  // namespace blocksparse::conv
