// Where the parts of a workspace lie. For the host alone.
#pragma once

#include <cstdint>

#include "core/ceil_div.h"

namespace blocksparse {

// A card reads lines of 128 bytes. A workspace begins at a multiple of 64; no part of it needs a larger alignment.
inline constexpr int64_t kLineBytes = 128;
constexpr int64_t whole_lines(int64_t bytes) { return round_up(bytes, kLineBytes); }

// Parts of a workspace, one after another, each of whole lines.
struct Places {
  int64_t end = 0;
  // Returns where a part of `bytes` bytes begins.
  int64_t next(int64_t bytes) {
    const int64_t begin = end;
    end += whole_lines(bytes);
    return begin;
  }
};

}  // namespace blocksparse
