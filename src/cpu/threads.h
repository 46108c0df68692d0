// Spreads tasks over threads.
#pragma once

#include <cstdint>
#include <type_traits>

namespace blocksparse {

// OpenMP's current maximum for this thread: OMP_NUM_THREADS, omp_set_num_threads(), torch.set_num_threads().
int32_t default_threads();

// The number of threads of an op that was asked for `wanted`; 0 stands for the default.
int32_t threads_for(int32_t wanted);

// How many of `threads` are worth waking for `flops` floating-point operations: a parallel region costs some 5 us.
int32_t worthwhile_threads(int32_t threads, double flops);

// The larger of the default and the number of processors. No more are ever started: libgomp ends the process if it
// cannot start a thread.
int32_t most_threads();

namespace threads_detail {
void run(int32_t threads, int64_t tasks, void (*body)(void*, int64_t), void* context);
}

// Calls body(i) once for each i in [0, tasks), on the calling thread and up to threads - 1 others, in roughly rising
// order. Returns when all calls are done. The bodies must not throw.
template <class Body>
void parallel_for(int32_t threads, int64_t tasks, Body&& body) {
  using Plain = std::remove_reference_t<Body>;
  if (threads <= 1 || tasks <= 1) {
    for (int64_t i = 0; i < tasks; ++i) body(i);
    return;
  }
  threads_detail::run(
      threads, tasks, [](void* context, int64_t i) { (*static_cast<Plain*>(context))(i); },
      const_cast<void*>(static_cast<const void*>(&body)));
}

}  // namespace blocksparse
