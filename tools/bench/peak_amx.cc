#include "cpu/simd_amx.h"
#include "peak_generic.h"

namespace blocksparse::bench {
double fma_rate_bf16_amx(double seconds) {
  constexpr int kSteps = 20000;
  TileShapes shapes;
  for (int i = 0; i < 8; ++i) shapes.set(i, 16, 64);
  tile_configure(shapes);
  const double rate = best_rate(seconds, 4.0 * 2 * 16 * 16 * 32 * kSteps, [] {
    for (int step = 0; step < kSteps; ++step) {
      tile_multiply<0, 4, 6>();
      tile_multiply<1, 4, 7>();
      tile_multiply<2, 5, 6>();
      tile_multiply<3, 5, 7>();
    }
  });
  tile_release();
  return rate;
}
}  // namespace blocksparse::bench
