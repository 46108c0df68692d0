// A simple undirected graph under construction, without loops or double edges.
#pragma once

#include <cstdint>
#include <vector>

#include "blocksparse/layout.h"
#include "graphs/place_set.h"

namespace blocksparse::graphs {

class UndirectedGraph {
 public:
  explicit UndirectedGraph(int64_t nodes, int64_t edges = 0)  // as many as are expected
      : nodes_(nodes), degree_(static_cast<size_t>(nodes), 0), edges_(edges) {}

  int64_t nodes() const { return nodes_; }
  int64_t degree(int64_t node) const { return degree_[static_cast<size_t>(node)]; }
  bool has(int64_t a, int64_t b) const { return a == b || edges_.contains(key(a, b)); }
  bool full(int64_t node) const { return degree(node) == nodes_ - 1; }

  bool add(int64_t a, int64_t b) {  // false if the edge exists
    if (a == b || !edges_.insert(key(a, b))) return false;
    ++count_;
    ++degree_[static_cast<size_t>(a)];
    ++degree_[static_cast<size_t>(b)];
    return true;
  }

  void remove(int64_t a, int64_t b) {
    if (!edges_.erase(key(a, b))) return;
    --count_;
    --degree_[static_cast<size_t>(a)];
    --degree_[static_cast<size_t>(b)];
  }

  // Both directions of every edge, and the diagonal.
  BlockCoordinates coordinates() const {
    BlockCoordinates c{.out_blocks = nodes_, .in_blocks = nodes_, .out = {}, .in = {}};
    c.out.reserve(static_cast<size_t>(nodes_ + 2 * count_));
    c.in.reserve(static_cast<size_t>(nodes_ + 2 * count_));
    for (int32_t i = 0; i < nodes_; ++i) {
      c.out.push_back(i);
      c.in.push_back(i);
    }
    edges_.for_each([&c](uint64_t edge) {
      const auto a = static_cast<int32_t>(edge >> 32), b = static_cast<int32_t>(edge & 0xffffffffu);
      c.out.insert(c.out.end(), {a, b});
      c.in.insert(c.in.end(), {b, a});
    });
    return c;
  }

 private:
  static uint64_t key(int64_t a, int64_t b) {
    const auto low = static_cast<uint64_t>(a < b ? a : b), high = static_cast<uint64_t>(a < b ? b : a);
    return low << 32 | high;
  }

  int64_t nodes_;
  std::vector<int64_t> degree_;
  PlaceSet edges_;
  int64_t count_ = 0;  // of edges
};

}  // namespace blocksparse::graphs
