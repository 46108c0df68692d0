// Memory for the workspaces of tests.
#pragma once

#include <cstring>
#include <memory>

#include "blocksparse/stream.h"
#include "core/ceil_div.h"

namespace blocksparse {

// Memory full of NaN: a test fails if anything is read before it was written.
struct Memory {
  std::unique_ptr<char[]> data;
  Workspace space;

  explicit Memory(size_t bytes) : data(new char[bytes + 64]), space{data.get(), bytes} {
    space.data = reinterpret_cast<void*>(round_up(reinterpret_cast<uintptr_t>(data.get()), 64));
    std::memset(data.get(), 0xff, bytes + 64);
  }
};

}  // namespace blocksparse
