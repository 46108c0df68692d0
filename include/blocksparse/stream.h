// How an op runs: on which stream, with how many threads, in which arithmetic, with what workspace.
#pragma once

#include <cstddef>
#include <cstdint>

namespace blocksparse {

// How products of f32 may be computed.
//   ieee  every product and sum in f32
//   tf32  CUDA may round operands to tf32 (11 bits of f32's 24) and use tensor cores; sums stay f32. Other dtypes and
//         the CPU ignore it.
enum class Math : int32_t { ieee = 0, tf32 = 1 };

struct Stream {
  void* handle = nullptr;  // CUDA: a cudaStream_t, null is the default stream. CPU: unused, the op is done on return.
  int32_t threads = 0;     // CPU: threads that may work on the op. 0: OpenMP's current maximum.
  Math math = Math::ieee;
};

// Scratch memory for one call, in the device's memory. It may be reused as soon as the next call is queued on the
// stream. On a card its address is a multiple of 64. Every op that needs a workspace has functions of one form that say
// its size:
//
//   size_t <op>_<pass>_workspace_size(const <Op>Problem& problem, Device device = {});
//
//   problem   the call without its data: layouts, geometry, dtype and sizes. LinearProblem in ops.h, ConvProblem,
//             LstmProblem, DeepUpdateProblem and MultiplicativeProblem in the header of their op
//   device    where the tensors of the call, and so the tables of its layouts, lie
//
// The answer is in bytes. It suffices for any strides, gates, epilogue, dtype of dW, number of threads and Math. It is
// 0 where nothing is needed, and where the op would refuse the problem; the op itself then says why. Asking keeps no
// memory, waits for no card and reads nothing on it.
struct Workspace {
  void* data = nullptr;
  size_t bytes = 0;
};

}  // namespace blocksparse
