// Takes aligned pieces out of a workspace that is known to be large enough.
#pragma once

#include <cstddef>
#include <cstdint>

#include "blocksparse/stream.h"
#include "core/ceil_div.h"

namespace blocksparse {

class Carver {
 public:
  explicit Carver(Workspace workspace) : next_(reinterpret_cast<uintptr_t>(workspace.data)) {}
  void* take(size_t bytes) {
    next_ = round_up(next_, 64);
    void* piece = reinterpret_cast<void*>(next_);
    next_ += bytes;
    return piece;
  }

 private:
  uintptr_t next_;
};

}  // namespace blocksparse
