// Which b x b blocks of a weight W [out_features, in_features] are non-zero, with every order that a kernel needs.
//
// A Layout is immutable, cheap to copy (it shares its tables) and safe to use from many threads. Blocks are numbered in
// the order of (out block, in block): values[blocks, b, b] in that order, each block row-major [out, in], is exactly
// the BSR of W. Feature counts need not be multiples of b: the last block of a row or column then sticks out, and
// whatever its values hold beyond the edge is ignored.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "blocksparse/export.h"
#include "blocksparse/status.h"
#include "blocksparse/tensor.h"

namespace blocksparse {

// The size of a block and of the matrix. A feature count of 0 stands for blocks * block_size.
struct Blocking {
  int32_t block_size = 32;  // 8, 16, 32, 64 or 128
  int64_t out_features = 0;
  int64_t in_features = 0;
};

BS_EXPORT bool is_block_size(int64_t b);  // 8, 16, 32, 64 or 128

// Coordinates of blocks in a grid of out_blocks x in_blocks, in any order: what a generator makes.
struct BlockCoordinates {
  int64_t out_blocks = 0;
  int64_t in_blocks = 0;
  std::vector<int32_t> out;
  std::vector<int32_t> in;
};

// What an op needs to know of a layout. Its tables are one array of int32 at `index`, in the memory of `device`; the
// view is valid as long as that memory is. src/core/index.h describes the tables.
struct BS_EXPORT LayoutView {
  const int32_t* index = nullptr;
  Device device = {};
  bool transposed = false;  // W^T is meant; the values stay where they are
  int32_t block_size = 0;
  int64_t out_features = 0;  // of the layout that the tables describe, whether transposed or not
  int64_t in_features = 0;
  int64_t blocks = 0;
  bool cut_by_out = false, cut_by_in = false;  // whether rows, columns of W are cut into slices: they need workspace

  // Rows and columns of the W that is meant: features of y and of x.
  int64_t outputs() const { return transposed ? in_features : out_features; }
  int64_t inputs() const { return transposed ? out_features : in_features; }

  LayoutView t() const {
    LayoutView other = *this;
    other.transposed = !transposed;
    return other;
  }

  // Reads and checks the header of tables that lie on the host, in O(1).
  static Result<LayoutView> from_index(std::span<const int32_t> index);

  // A view of tables that were copied to a device unchanged. The host cannot read them there, so `sizes` must be those
  // of the layout. They are checked against the number of words alone.
  struct Sizes {
    int32_t block_size = 0;
    int64_t out_features = 0, in_features = 0, blocks = 0;
  };
  static Result<LayoutView> on_device(std::span<const int32_t> index, const Sizes& sizes, Device device);
};

class BS_EXPORT Layout {
 public:
  // mask [out_blocks, in_blocks], row-major, every entry 0 or 1.
  static Result<Layout> from_mask(std::span<const uint8_t> mask, int64_t out_blocks, int64_t in_blocks,
                                  Blocking blocking);

  // One (out, in) pair for each block, in any order, none twice. O(blocks + out_blocks + in_blocks), and a sort of each
  // row whose columns do not rise.
  static Result<Layout> from_coordinates(const BlockCoordinates& coordinates, Blocking blocking);
  static Result<Layout> from_coordinates(std::span<const int32_t> out, std::span<const int32_t> in, int64_t out_blocks,
                                         int64_t in_blocks, Blocking blocking);

  // row_start [out_blocks + 1], columns [blocks] rising within each row: the index arrays of a BSR matrix.
  static Result<Layout> from_csr(std::span<const int64_t> row_start, std::span<const int64_t> columns,
                                 int64_t in_blocks, Blocking blocking);

  // A graph by its one-line name, such as "ba(384,8)" or "random(128,256,0.1)": see graphs.h.
  static Result<Layout> from_graph(std::string_view name, Blocking blocking, int64_t seed = 0);

  // What pattern() returned. Altered or truncated data is refused.
  static Result<Layout> from_pattern(std::span<const int32_t> pattern);

  int32_t block_size() const;
  int64_t out_features() const;
  int64_t in_features() const;
  int64_t out_blocks() const;
  int64_t in_blocks() const;
  int64_t blocks() const;
  double density() const;  // blocks / (out_blocks * in_blocks); 0 for an empty grid
  bool transposed() const { return transposed_; }

  // W^T over the same tables and the same values. values[i] is still the block [out, in] of W, read transposed.
  Layout t() const;

  // `times` copies of W, one below the other, with values[times, blocks, b, b]: the four gates of an LSTM, for example.
  // A transposed layout is refused, and so is one whose last block of outputs sticks out.
  Result<Layout> stack(int64_t times) const;

  // 64 bits computed from the content: equal layouts have equal hashes on every machine.
  uint64_t hash() const;
  friend bool operator==(const Layout& a, const Layout& b);

  // CSR of W (of the untransposed matrix): row_start [out_blocks + 1], columns [blocks].
  std::vector<int32_t> row_start() const;
  std::vector<int32_t> columns() const;

  // The smallest integer form, for files and state dicts: a header, row starts and columns.
  std::vector<int32_t> pattern() const;
  int64_t pattern_words() const;

  // All tables, as the CPU uses them. For a CUDA card prefer index_for_card() in device_index.h, which adds what its
  // kernels like.
  std::span<const int32_t> index() const;
  LayoutView view() const;
  operator LayoutView() const { return view(); }  // NOLINT(google-explicit-constructor)

  // "12288 x 12288 in blocks of 32: 6456 of 147456 (4.38 %)"
  std::string describe() const;

 private:
  explicit Layout(std::shared_ptr<const std::vector<int32_t>> index) : index_(std::move(index)) {}

  std::shared_ptr<const std::vector<int32_t>> index_;
  bool transposed_ = false;
};

}  // namespace blocksparse
