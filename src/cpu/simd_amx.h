// AMX: AVX-512 with bf16, and eight tiles of up to 16 rows of 64 bytes. One instruction, one function.
#pragma once

#include "cpu/simd_avx512_bf16.h"

namespace blocksparse {
namespace {

// What ldtilecfg reads.
struct TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  constexpr void set(int tile, int tile_rows, int bytes) {
    rows[tile] = static_cast<uint8_t>(tile_rows);
    row_bytes[tile] = static_cast<uint16_t>(bytes);
  }
};
static_assert(sizeof(TileShapes) == 64);

#if defined(BLOCKSPARSE_EMULATE)

struct EmulatedTiles {
  TileShapes shapes;
  char data[8][16][64];
};
thread_local EmulatedTiles emulated_tiles;

BS_INLINE void tile_configure(const TileShapes& shapes) {
  __builtin_memset(emulated_tiles.data, 0, sizeof(emulated_tiles.data));
  emulated_tiles.shapes = shapes;
}
BS_INLINE void tile_release() { emulated_tiles.shapes = {}; }
template <int Tile>
BS_INLINE void tile_zero() {
  __builtin_memset(emulated_tiles.data[Tile], 0, sizeof(emulated_tiles.data[Tile]));
}
template <int Tile>
BS_INLINE void tile_load(const void* from, int64_t stride) {
  tile_zero<Tile>();
  for (int r = 0; r < emulated_tiles.shapes.rows[Tile]; ++r) {
    __builtin_memcpy(emulated_tiles.data[Tile][r], static_cast<const char*>(from) + r * stride,
                     emulated_tiles.shapes.row_bytes[Tile]);
  }
}
template <int Tile>
BS_INLINE void tile_store(void* to, int64_t stride) {
  for (int r = 0; r < emulated_tiles.shapes.rows[Tile]; ++r) {
    __builtin_memcpy(static_cast<char*>(to) + r * stride, emulated_tiles.data[Tile][r],
                     emulated_tiles.shapes.row_bytes[Tile]);
  }
}
template <int Sum, int A, int B>
BS_INLINE void tile_multiply() {
  const TileShapes& s = emulated_tiles.shapes;
  if (s.row_bytes[A] != 4 * s.rows[B] || s.row_bytes[Sum] != s.row_bytes[B] || s.rows[Sum] != s.rows[A]) {
    __builtin_trap();  // as the instruction would
  }
  auto& t = emulated_tiles.data;
  for (int m = 0; m < s.rows[A]; ++m) {
    Vec<float, 16> sum;
    __builtin_memcpy(&sum, t[Sum][m], sizeof(sum));
    for (int k = 0; k < s.rows[B]; ++k) {
      BFloat16Pair a;
      Pairs16 b;
      __builtin_memcpy(&a, t[A][m] + 4 * k, sizeof(a));
      __builtin_memcpy(&b, t[B][k], sizeof(b));
      sum = multiply_add<float, 16>(sum, broadcast<BFloat16Pair, 16>(a), b);
    }
    __builtin_memcpy(t[Sum][m], &sum, s.row_bytes[Sum]);
  }
}

#else

BS_INLINE void tile_configure(const TileShapes& shapes) { asm volatile("ldtilecfg %0" : : "m"(shapes)); }
BS_INLINE void tile_release() { asm volatile("tilerelease"); }
template <int Tile>
BS_INLINE void tile_zero() {
  asm volatile("tilezero %%tmm%c0" : : "i"(Tile));
}
template <int Tile>
BS_INLINE void tile_load(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(Tile) : "memory");
}
template <int Tile>
BS_INLINE void tile_store(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(Tile) : "memory");
}
// Sum [m][n] += A [m][k pairs] B [k pairs][n]
template <int Sum, int A, int B>
BS_INLINE void tile_multiply() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(Sum), "i"(A), "i"(B));
}

#endif

}  // namespace
}  // namespace blocksparse
