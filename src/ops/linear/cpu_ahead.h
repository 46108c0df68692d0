// How W is asked for before cpu_product.h and cpu_tiles.h use it.
#pragma once

#include "ops/linear/cpu_finish.h"

namespace blocksparse::linear {
namespace {

constexpr int kUnroll = 8;  // inputs; divides every block size
constexpr int kLine = 64;

// Whether the inner loop asks for W itself. With 16 registers of each kind it has none to spare for that.
constexpr bool kAsksInLoop = kVectorBytes == 64;

// A part of a piece's list, blocks with gate 0 left out.
struct Chunk {
  const BlockRef* refs;
  int count;
  int64_t begin;  // bytes of W that the call has used before
};

// How many blocks of a list make a chunk.
template <class C>
int most_of_chunk(const ProductArgs& a) {
  return a.block <= C::most_shared ? C::chunk_inputs / a.block : 1;
}

// Asks for W some time before its use, line after line in the order of the lists: 16 KB ahead, or a whole chunk, all of
// whose blocks are read at its first strip. Zen 5, 1024 x 1024, N = 64, W from memory, each against one strip of each
// block of the next chunk: dgrad b = 8, 50 % 1.50 ms to 0.42; fprop b = 32, 10 % 163 us to 81. 4 KB and 8 KB ahead are
// slower by up to 15 %, into L2 only by a tenth.
template <class C>
class Ahead {
 public:
  Ahead(const ProductArgs& a, Range pieces)
      : w_(static_cast<const char*>(a.w)),
        block_(a.block * a.block * static_cast<int64_t>(sizeof(typename C::T))),
        distance_(block_ * most_of_chunk<C>(a) > kLeast ? block_ * most_of_chunk<C>(a) : kLeast),
        refs_(a.refs),
        piece_(a.pieces + pieces.first),
        end_(a.pieces + pieces.last),
        ref_(pieces.first < pieces.last ? piece_->first : 0) {}

  int64_t block_bytes() const { return block_; }

  // A strip of the chunk comes next: asks now.
  void ask(const ProductArgs& a, const Chunk& chunk, int strip) { until(target(a, chunk, strip)); }

  // The same, but with AVX-512 it gives the parts that the inner loop asks for, one at each kUnroll inputs: no burst
  // holds up the products, and from memory b = 8, 16, 32 and 64 are 7, 13, 10 and 5 % faster.
  const char* const* before(const ProductArgs& a, const Chunk& chunk, int strip) {
    if (asked_ == 0) until(distance_);
    const int64_t bytes = target(a, chunk, strip) - asked_;
    if (kInLoop && a.gates == nullptr && bytes >= kPart) return next(bytes / kPart);
    until(asked_ + bytes);
    return nullptr;
  }

 private:
  using P = typename C::P;
  static constexpr bool kInLoop = kAsksInLoop && sizeof(P) == kTogether<P> * sizeof(typename C::T);
  static constexpr int64_t kLeast = 16 << 10;
  static constexpr int64_t kPart = kUnroll * C::tile.outputs * static_cast<int64_t>(sizeof(typename C::T));
  static constexpr int kParts = (C::chunk_inputs > kMaxBlock ? C::chunk_inputs : kMaxBlock) / kUnroll;

  int64_t target(const ProductArgs& a, const Chunk& chunk, int strip) const {
    return chunk.begin + chunk.count * block_ * (strip + C::tile.outputs) / a.block + distance_;
  }

  // Finds the block of which the next byte is.
  bool find() {
    while (piece_ != end_ && ref_ == piece_->last) {
      if (++piece_ != end_) ref_ = piece_->first;
    }
    return piece_ != end_;
  }

  void step(int64_t bytes) {
    asked_ += bytes;
    at_ += bytes;
    if (at_ < block_) return;
    at_ = 0;
    ++ref_;
  }

  const char* const* next(int64_t parts) {
    for (int i = 0; i < kParts; ++i) {
      if (i < parts && find()) {
        parts_[i] = w_ + refs_[ref_].weight * block_ + at_;
        step(kPart);
      } else {
        parts_[i] = w_;
      }
    }
    return parts_;
  }

  void until(int64_t bytes) {
    while (asked_ < bytes && find()) {
      const char* w = w_ + refs_[ref_].weight * block_;
      const int64_t end = least(block_, at_ + bytes - asked_);
      for (int64_t byte = at_; byte < end; byte += kLine) __builtin_prefetch(w + byte);
      step(end - at_);
    }
  }

  const char* w_;
  int64_t block_, distance_;  // bytes
  const BlockRef* refs_;
  const Piece *piece_, *end_;
  int32_t ref_;
  int64_t at_ = 0, asked_ = 0;  // bytes, of the block and of the call
  const char* parts_[kParts];
};

// do_piece(piece, begin, ahead), where begin counts the bytes of W before it.
template <class C, class DoPiece>
void for_pieces(const ProductArgs& a, Range pieces, DoPiece do_piece) {
  Ahead<C> ahead(a, pieces);
  int64_t begin = 0;
  for (const Piece* piece = a.pieces + pieces.first; piece != a.pieces + pieces.last; ++piece) {
    do_piece(*piece, begin, ahead);
    begin += (piece->last - piece->first) * ahead.block_bytes();
  }
}

}  // namespace
}  // namespace blocksparse::linear
