// How product.h and amx/ ask for W before they use it.
#pragma once

#include "gemm/cpu/finish.h"

namespace blocksparse::gemm {
namespace {

constexpr int kUnroll = 8;  // inputs a turn; divides every block size
constexpr int kLine = 64;

// Whether the inner loop asks for W itself. It does not if W is widened, nor with 16 registers of each kind.
template <class C>
constexpr bool kInLoop =
    kVectorBytes == 64 && sizeof(typename C::P) == kTogether<typename C::P> * sizeof(typename C::T);

constexpr int kMostOfChunk = 32;  // the most blocks of a chunk

// A part of a piece's list without the blocks whose gate is 0.
struct Chunk {
  const BlockRef* refs;
  int count;
};

// The number of blocks of a list that make a chunk. It must not depend on the number of threads, because it fixes the
// order of sums.
template <class C>
int most_of_chunk(const ProductArgs& a) {
  if (a.block > C::most_shared) return 1;
  const int64_t apart = a.direct ? a.x_feature * static_cast<int64_t>(sizeof(typename C::T)) : 0;
  const bool few = kVectorBytes == 32 && (apart > 2 * kLine || a.n <= C::group * C::lanes / 2);
  if (a.block == kSmallestBlock) {  // dgrad, whose blocks lie anywhere, is 4 % faster with fewer (25, 50 %, from
                                    // memory)
    const bool fewer = few || (kVectorBytes == 32 && a.by_in);
    return (fewer ? C::few_chunk_inputs_of_8 : C::chunk_inputs_of_8) / kSmallestBlock;
  }
  return (few ? C::few_chunk_inputs : C::chunk_inputs) / a.block;
}

// Asks for W before its use, in the order of the lists: each block asks for the block 16 KB later (or a chunk later, if
// a chunk is more), strip by strip. Zen 5, 1024 x 1024, 64 tokens, dgrad, b = 8, 50 %, from memory: 1.50 ms -> 0.42
// against asking for one strip of each block of the next chunk. 4 and 8 KB ahead are up to 15 % slower, into L2 only 10
// %.
//
// What to ask for is found once a chunk. Once for each strip and 8 inputs costs 10 % of a product at b = 8.
template <class C>
class Ahead {
 public:
  Ahead(const ProductArgs& a, Range pieces)
      : w_(static_cast<const char*>(a.w)),
        gates_(static_cast<const typename C::S*>(a.gates)),
        block_(a.block * a.block * static_cast<int64_t>(sizeof(typename C::T))),
        refs_(a.refs),
        piece_(a.pieces + pieces.first) {
    int64_t last = pieces.last;  // empty pieces come last
    while (last > pieces.first && a.pieces[last - 1].first == a.pieces[last - 1].last) --last;
    if (last == pieces.first) return;
    last_ = a.pieces + last - 1;
    ref_ = piece_->first;
    const int64_t chunk = block_ * most_of_chunk<C>(a), distance = chunk > kLeast ? chunk : kLeast;
    for (int64_t asked = 0; asked < distance; asked += block_) ask(next(), {0, block_});
  }

  // The block after those it has returned, closed gates left out; after the last one, the last piece again. step() has
  // no branch: pieces end anywhere, so it would be mispredicted once a piece.
  const char* next() {
    if (last_ == nullptr) return w_;
    int64_t weight = step();
    while (gates_ != nullptr && gates_[weight] == typename C::S{0} && piece_ != last_) weight = step();
    return w_ + weight * block_;
  }

  static void ask(const char* block, Range bytes) {
    for (int64_t byte = bytes.first; byte < bytes.last; byte += kLine) __builtin_prefetch(block + byte);
  }

 private:
  BS_INLINE int64_t step() {
    const int64_t weight = refs_[ref_].weight;
    const bool done = ++ref_ == piece_->last;
    piece_ += done && piece_ != last_ ? 1 : 0;
    ref_ = done ? piece_->first : ref_;
    return weight;
  }

  static constexpr int64_t kLeast = 16 << 10;

  const char* w_;
  const typename C::S* gates_;
  int64_t block_;  // bytes of a block
  const BlockRef* refs_;
  const Piece* piece_;
  const Piece* last_ = nullptr;  // the last piece with blocks
  int32_t ref_ = 0;
};

// The bytes of a block that belong to a strip. All strips together cover the block.
template <class C>
Range bytes_of_strip(const ProductArgs& a, int strip) {
  const int64_t row = a.block * static_cast<int64_t>(sizeof(typename C::T));
  return {strip * row, least(strip + C::tile.outputs, a.block) * row};
}

}  // namespace
}  // namespace blocksparse::gemm
