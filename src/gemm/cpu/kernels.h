// The CPU kernels: their arguments, and the table of them that kernels.inc spells out.
#pragma once

#include <cstdint>
#include <span>

#include "blocksparse/dtype.h"
#include "blocksparse/glu.h"
#include "blocksparse/ops.h"
#include "core/index.h"
#include "cpu/isa.h"

namespace blocksparse::gemm {

inline constexpr int64_t kUnpackedTokens = 4;       // features-last x of at most so many tokens is read in place
inline constexpr int64_t kGroupAlongOutputs = 128;  // tokens, at most
inline constexpr int64_t kMostRoundTokens = 1024;   // tokens that are packed at a time, at most: enough tasks for any
                                                    // number of threads

struct Range {
  int64_t first, last;
};

// Shape of a kernel's tile, fixed when it is compiled.
struct Tile {
  int outputs;  // of W: rows of sums
  int vectors;  // of tokens (product) or of input features (gradient): columns of sums
};

// The two tiles of a row of kernels.inc.
struct Tiles {
  Tile product, gradient;
};

// One round of fprop or dgrad: y[n, outputs] = x[n, inputs] W^T for up to kMostRoundTokens tokens. It is plain data,
// because kernels are compiled for instruction sets that their caller may not use.
struct ProductArgs {
  int32_t block = 0;
  bool by_in = false;  // W is read transposed
  int64_t inputs = 0, outputs = 0;
  int64_t n = 0;

  const void* x = nullptr;
  int64_t x_token = 0, x_feature = 0;  // strides
  bool asks_again = false;             // asks for W of the next block of 8 just before its use
  bool large_unasked = false;          // one token: does not ask for W of blocks of 32 and more
  bool along_outputs = false;          // vectors run along outputs; sums of slices are [slots][vectors][lanes][block]
  bool tokens_packed = false;          // along_outputs with packed x: [in blocks][tokens of a group][block]
  bool direct = false;  // x is features-first, of the type of sums, and complete vectors are read in place
  // Packed x: Sum [panel_vectors][inputs][lanes], with inputs of whole blocks, or the kernel's own form in no more
  // bytes. Vectors that are read in place do not count; vector v is the (v % panel_vectors)-th.
  void* panels = nullptr;
  int64_t panel_vectors = INT64_MAX;
  int64_t group_vectors = INT64_MAX;  // vectors that are multiplied at a time, if fewer than the kernel's own

  const void* w = nullptr;
  const void* gates = nullptr;

  void* y = nullptr;
  int64_t y_token = 0, y_feature = 0;
  const void* residual = nullptr;
  int64_t residual_token = 0, residual_feature = 0;
  const void* bias = nullptr;
  Activation activation = Activation::none;
  int64_t hidden = 0;  // features of y, if the outputs are gate and up of a gated linear unit; otherwise 0

  const Piece* pieces = nullptr;
  int64_t piece_count = 0;
  const BlockRef* refs = nullptr;
  int64_t refs_in_order = 0;  // number of refs, if the pieces of one token follow one another in refs
  const Split* splits = nullptr;
  void* partial = nullptr;  // sums of slices: Sum [slots][vectors][block][lanes]
  // Null, or Sum [staged_vectors][staged_outputs][lanes]: the sums of vector v wait at v % staged_vectors until those
  // of all other outputs are complete.
  void* staged = nullptr;
  int64_t staged_outputs = 0, staged_vectors = 1;
};

inline constexpr int kMaxBlock = 128;
inline constexpr int64_t kStagedOutputs = 64;
inline constexpr int64_t kInPlaceTokens = 64;  // tokens that wgrad reads in place at a time

// Convolutions read this many inputs at all taps before the next ones: a group of 3 x 3 taps then fits into L1.
inline constexpr int64_t kTapInputs = 32;

// A tap of a convolution: x read `shift` positions further meets the `index`-th [b, b] of each block.
struct Tap {
  int64_t shift;
  int64_t index;
};

// A round of a convolution: sums over blocks and taps for pixels of y. Row `row` of blocks has refs[starts[row]] to
// refs[starts[row + 1] - 1]. gates has one entry a block, W has `taps` [b, b] a block.
struct TapArgs {
  ProductArgs product;  // block, by_in, inputs, outputs, w, gates, bias, activation; y and residual of the first image
  int64_t y_image = 0;
  const int32_t* y_channels = nullptr;  // null, or where each output goes; then there is no epilogue
  const void* panels = nullptr;         // Sum [in blocks][round][b], blocks of at most kTapInputs
  int64_t round = 0, image = 0;         // positions of a panel; distance from one image to the next
  void* weights = nullptr;              // null, or Sum [blocks][taps * b * b]: W in the order of use
  const int32_t* starts = nullptr;
  const BlockRef* refs = nullptr;
  int64_t taps = 0;
  const Tap* tap = nullptr;  // the taps that count in this round
  int64_t tap_count = 0;
  int64_t places = 0;                  // pixels of y in an image
  const int64_t* positions = nullptr;  // [places]: where in the panel an unshifted tap reads
  const int64_t* pixels = nullptr;     // [places]: the pixel of y
  // Used if `positions` is null. For each tap, by its index, [places]: where the tap reads, or -1 for `nothing`, a
  // position of zeros.
  const int64_t* sources = nullptr;
  int64_t nothing = 0;
};

// Vectors are runs of `lanes` tokens; the last one of a round may be incomplete.
struct ProductKernel {
  Isa isa;
  DType dtype;
  Tile tile;
  int lanes;
  bool by_token;      // sums of slices are [lanes][block]
  bool side_by_side;  // x is packed for tiles of vectors: better many vectors and few features at a time
  void (*pack)(const ProductArgs&, int64_t vector, int64_t first_feature, int64_t last_feature);
  void (*multiply)(const ProductArgs&, Range pieces, Range vectors);
  void (*combine)(const ProductArgs&, Range splits, Range vectors);
  // Finishes staged outputs from a multiple of kStagedOutputs on. Null: the kernel stages nothing.
  void (*finish_staged)(const ProductArgs&, int64_t vector, int64_t first_output, int64_t last_output);
  // One piece for up to kUnpackedTokens tokens of features-last x, without packing.
  void (*few)(const ProductArgs&, int64_t piece);
  void (*combine_few)(const ProductArgs&, int64_t split);
  int along_outputs;  // smallest block whose outputs may be the vectors of features-last x and y; 0: none
  // Pixels of a group in convolutions, whose x is packed as for wgrad. 0: vectors are of pairs, and there is no such
  // kernel.
  int tap_group;
  void (*pack_tap_weights)(const TapArgs&, int64_t first_block, int64_t last_block);
  void (*multiply_taps)(const TapArgs&, Range rows, Range pixels);
};

// Tokens to pack as [blocks of features][tokens][block], with zeros beyond the last feature.
struct RowsToPack {
  const void* source = nullptr;
  int64_t token_stride = 0, feature_stride = 0;
  int64_t tokens = 0, features = 0;
  int32_t block = 0;
  const int32_t* order = nullptr;   // null, or the feature of the source for each feature; not for pairs
  const int32_t* starts = nullptr;  // null, or blocks of features that nobody reads have starts[i] == starts[i + 1]
  void* panels = nullptr;   // Sum [blocks of features][round][block], or pairs of bf16 [..][round, half used][block]
  int64_t round = 0;        // tokens of a panel
  int64_t first_token = 0;  // where in the panel these tokens go
  bool last = false;        // no tokens follow in this round
};

// Tokens that lie side by side in the panels of x and of dy.
struct TokenRun {
  int64_t x, dy, tokens;
};

// What a convolution adds to wgrad: dW has `taps` [b, b] a block. Tap t of [first, last) reads the panels of x
// x_shift[t] tokens further and those of dy dy_shift tokens further.
struct GradientTaps {
  int64_t taps = 1, first = 0, last = 1;
  const int64_t* x_shift = nullptr;  // null: 0
  int64_t dy_shift = 0;
  const TokenRun* runs = nullptr;  // null: all tokens are one run
  int64_t run_count = 0;
  int64_t first_sum = 0;  // the block whose sums come first
};

// One round of wgrad: dW[i] (+)= gates[i] * dy_panel[out_of[i]]^T x_panel[in_of[i]], and the gradient of the gates.
struct GradientArgs {
  int32_t block = 0;
  int64_t out_features = 0, in_features = 0;
  int64_t n = 0;         // tokens in this round
  int64_t round = 0;     // tokens of a panel of x
  int64_t dy_round = 0;  // tokens of a panel of dy
  const void* x_panels = nullptr;
  const void* dy_panels = nullptr;
  bool direct = false;     // x is read in place: blocks side by side, tokens x_token apart
  bool dy_direct = false;  // dy is read in place: so, or with tokens side by side and features dy_feature apart
  int64_t x_token = 0, dy_token = 0, dy_feature = 1;
  bool copies_dy = false;  // copies dy of each row of blocks; in place only, at most kInPlaceTokens tokens

  const int32_t* out_of = nullptr;
  const BlockRef* refs = nullptr;  // refs[i].from is the in block of block i

  const void* w = nullptr;
  const void* gates = nullptr;
  void* dw = nullptr;
  bool dw_is_wide = false;  // dw has the type of sums, not that of the activations
  bool accumulate = false;
  void* dgates = nullptr;
  bool accumulate_gates = false;

  void* sums = nullptr;                      // Sum [blocks][block][block], for a narrow dW made in several rounds
  bool add_sums = false, keep_sums = false;  // this is not the first round; not the last

  GradientTaps taps = {};
};

struct GradientKernel {
  Isa isa;
  DType dtype;
  Tile tile;
  int lanes;
  void (*pack)(const RowsToPack&, int64_t first_feature_block, int64_t last_feature_block);
  void (*multiply)(const GradientArgs&, int64_t first_block, int64_t last_block);
};

std::span<const ProductKernel> product_kernels();
std::span<const GradientKernel> gradient_kernels();
// The kernel of this instruction set, or of the next one below that has the type.
const ProductKernel* find_product_kernel(Isa isa, DType dtype);
const GradientKernel* find_gradient_kernel(Isa isa, DType dtype);

#define BS_KERNEL(isa, dtype, ...)         \
  ProductKernel product_##isa##_##dtype(); \
  GradientKernel gradient_##isa##_##dtype();
#include "gemm/cpu/kernels.inc"
#undef BS_KERNEL

}  // namespace blocksparse::gemm
