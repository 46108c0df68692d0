// Takes aligned pieces out of a workspace that is known to be large enough.
#pragma once

#include <cstddef>
#include <cstdint>

#include "blocksparse/stream.h"

namespace blocksparse {

class Carver {
 public:
  explicit Carver(Workspace workspace) : next_(reinterpret_cast<uintptr_t>(workspace.data)) {}
  void* take(size_t bytes) {
    next_ = (next_ + 63) / 64 * 64;
    void* piece = reinterpret_cast<void*>(next_);
    next_ += bytes;
    return piece;
  }

 private:
  uintptr_t next_;
};

}  // namespace blocksparse
