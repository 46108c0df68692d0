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
// stream. Its address is a multiple of 64 on a card. Every op that needs one is asked for its size in one way:
//
//   size_t <op>_<pass>_workspace_size(const <Op>Problem& problem, Device device = {});
//
//   problem   the call without its data: layouts, geometry, dtype and sizes. LinearProblem in ops.h, ConvProblem,
//             LstmProblem, DeepUpdateProblem and MultiplicativeProblem in the header of their op
//   device    where the tensors of the call, and so the tables of its layouts, lie
//
// The answer is in bytes. It suffices whatever is not part of the problem: strides, gates, epilogue, dtype of dW,
// threads, Math. It is 0 where nothing is needed, and where the op would refuse the problem, which then says why.
// Asking allocates nothing that stays, and neither waits for a card nor reads what lies there.
struct Workspace {
  void* data = nullptr;
  size_t bytes = 0;
};

}  // namespace blocksparse
