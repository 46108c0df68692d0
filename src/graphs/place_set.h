// A set of whole numbers, for generators that must not take a place twice.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "core/hash.h"

namespace blocksparse::graphs {

// Linear probing in one array that is at most three quarters full: 11 to 21 bytes a number, where std::unordered_set
// allocates a node of each.
class PlaceSet {
 public:
  explicit PlaceSet(int64_t expected = 0) { resize(expected); }

  bool contains(uint64_t number) const { return cells_[find(number)] != 0; }

  bool insert(uint64_t number) {  // false if it was there
    size_t cell = find(number);
    if (cells_[cell] != 0) return false;
    if (4 * static_cast<size_t>(count_ + 1) > 3 * cells_.size()) {
      resize(2 * count_);
      cell = find(number);
    }
    cells_[cell] = number + 1;
    ++count_;
    return true;
  }

  bool erase(uint64_t number) {  // false if it was not there
    size_t hole = find(number);
    if (cells_[hole] == 0) return false;
    // What lies behind moves up, unless it would then lie before the cell where the search for it begins.
    for (size_t next = (hole + 1) & mask(); cells_[next] != 0; next = (next + 1) & mask()) {
      const size_t from = first_cell(cells_[next] - 1);
      if (((next - from) & mask()) < ((next - hole) & mask())) continue;
      cells_[hole] = cells_[next];
      hole = next;
    }
    cells_[hole] = 0;
    --count_;
    return true;
  }

  // Has the number's cell on its way to the cache: a set of millions of numbers lies in none.
  void prefetch(uint64_t number) const { __builtin_prefetch(&cells_[first_cell(number)], 1); }

  template <class F>
  void for_each(F&& take) const {  // in no order that means anything
    for (uint64_t cell : cells_) {
      if (cell != 0) take(cell - 1);
    }
  }

 private:
  size_t mask() const { return cells_.size() - 1; }
  size_t first_cell(uint64_t number) const { return static_cast<size_t>(mix_bits(number)) & mask(); }

  size_t find(uint64_t number) const {  // its cell, or the empty one that it would take
    size_t cell = first_cell(number);
    while (cells_[cell] != 0 && cells_[cell] != number + 1) cell = (cell + 1) & mask();
    return cell;
  }

  void resize(int64_t expected) {
    size_t size = 16;
    while (3 * size < 4 * static_cast<size_t>(expected)) size *= 2;
    std::vector<uint64_t> old = std::exchange(cells_, std::vector<uint64_t>(size, 0));
    for (uint64_t cell : old) {
      if (cell != 0) cells_[find(cell - 1)] = cell;
    }
  }

  std::vector<uint64_t> cells_;  // number + 1; 0: empty
  int64_t count_ = 0;
};

}  // namespace blocksparse::graphs
