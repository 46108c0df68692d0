// Where and with what help an op runs.
#pragma once

#include <cstddef>
#include <cstdint>

namespace blocksparse {

// How products of f32 may be computed.
//   ieee  every product and sum in f32
//   tf32  on CUDA, operands may first be rounded to tf32, 11 bits of f32's 24: then tensor cores do it. Sums are of f32
//         all the same. Other dtypes and the CPU take no notice.
enum class Math : int32_t { ieee = 0, tf32 = 1 };

struct Stream {
  void* handle = nullptr;  // CUDA: a cudaStream_t, null is the default stream. CPU: unused, the op is done on return.
  int32_t threads = 0;     // CPU: threads that may work on the op. 0: OpenMP's current maximum.
  Math math = Math::ieee;
};

// Scratch memory for one call, in the device's memory; may be reused as soon as the next call is queued on the same
// stream. The *_workspace_size() functions say how much a call needs. Alignment on a card 64.
struct Workspace {
  void* data = nullptr;
  size_t bytes = 0;
};

}  // namespace blocksparse
