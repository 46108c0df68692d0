#include "cpu/threads.h"

#include <omp.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <system_error>
#include <thread>
#include <vector>

namespace blocksparse {

namespace {

// libgomp's threads do not survive fork(): the next parallel region in the child waits for them for ever. A forked
// child therefore starts threads of its own for each call, some 20 us each.
std::atomic<bool> forked{false};
[[maybe_unused]] const int at_fork = pthread_atfork(nullptr, nullptr, [] { forked = true; });

void run_on_own_threads(int32_t threads, int64_t tasks, void (*body)(void*, int64_t), void* context) {
  std::atomic<int64_t> next{0};
  auto work = [&] {
    for (int64_t i = next++; i < tasks; i = next++) body(context, i);
  };
  std::vector<std::thread> helpers;
  try {
    for (int32_t t = 1; t < threads; ++t) helpers.emplace_back(work);
  } catch (const std::system_error&) {  // no more threads can be started: those that exist do the work
  }
  work();
  for (std::thread& helper : helpers) helper.join();
}

}  // namespace

int32_t default_threads() { return omp_get_max_threads(); }

int32_t most_threads() {
  static const int32_t processors = omp_get_num_procs();  // a system call, 0.5 us
  return std::max(omp_get_max_threads(), processors);
}

int32_t threads_for(int32_t wanted) { return wanted > 0 ? std::min(wanted, most_threads()) : default_threads(); }

int32_t worthwhile_threads(int32_t threads, double flops) {
  constexpr double kFlopsEach = 5e5;  // 10 us at 50 GFLOP/s
  return static_cast<int32_t>(std::clamp(flops / kFlopsEach, 1.0, static_cast<double>(std::max(threads, 1))));
}

void threads_detail::run(int32_t threads, int64_t tasks, void (*body)(void*, int64_t), void* context) {
  threads = static_cast<int32_t>(std::min<int64_t>(threads, tasks));
  if (forked) {
    run_on_own_threads(threads, tasks, body, context);
    return;
  }
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
  for (int64_t i = 0; i < tasks; ++i) body(context, i);
}

}  // namespace blocksparse
