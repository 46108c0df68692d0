#include "card.h"

#include <cuda_runtime.h>

#include <algorithm>

#include "core/text.h"
#include "cuda/error.h"
#include "cuda/launch.h"
#include "cuda/memory.h"

namespace blocksparse::bench {

namespace {

constexpr Device kCard{DeviceType::cuda, 0};
constexpr double kReplayUs = 500;  // at least, so that the events' own time is lost in it
constexpr double kMostLaunches = 4096;

cudaStream_t stream() { return static_cast<cudaStream_t>(card_stream()); }

Status check(cudaError_t error, const char* what) { return cuda::status_of(error, what); }

struct Event {
  cudaEvent_t event = nullptr;
  Event() { (void)cudaEventCreate(&event); }
  ~Event() { (void)cudaEventDestroy(event); }
  Event(const Event&) = delete;
};

// us between two points of the stream.
template <class Body>
Result<double> time_us(Body&& body) {
  const Event begin, end;
  BS_RETURN_IF_ERROR(check(cudaEventRecord(begin.event, stream()), "cudaEventRecord"));
  body();
  BS_RETURN_IF_ERROR(check(cudaEventRecord(end.event, stream()), "cudaEventRecord"));
  BS_RETURN_IF_ERROR(check(cudaEventSynchronize(end.event), "a kernel failed"));
  float ms = 0;
  BS_RETURN_IF_ERROR(check(cudaEventElapsedTime(&ms, begin.event, end.event), "cudaEventElapsedTime"));
  return 1e3 * static_cast<double>(ms);
}

// Launches of one contender as a graph: with its copies in turn, or always with the first.
struct Replay {
  std::shared_ptr<CUgraphExec_st> graph;
  int launches = 0;
};

Result<Replay> capture(const Contender& c, int launches, bool rotate) {
  BS_RETURN_IF_ERROR(check(cudaStreamBeginCapture(stream(), cudaStreamCaptureModeThreadLocal), "capture"));
  for (int i = 0; i < launches; ++i) c.run(rotate ? i % c.copies : 0);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  BS_RETURN_IF_ERROR(check(cudaStreamEndCapture(stream(), &graph), "capture"));
  const Status made = check(cudaGraphInstantiate(&exec, graph, 0), "cudaGraphInstantiate");
  (void)cudaGraphDestroy(graph);
  if (!made.ok()) return made;
  return Replay{{exec, [](cudaGraphExec_t e) { (void)cudaGraphExecDestroy(e); }}, launches};
}

Result<double> us_a_launch(const Replay& replay) {
  const auto us = time_us([&] { (void)cudaGraphLaunch(replay.graph.get(), stream()); });
  if (!us.ok()) return us.status();
  return *us / replay.launches;
}

// Reads all of it; the store never happens, but the compiler cannot know.
__global__ void read_all(const uint4* from, int64_t count, uint32_t never, uint32_t* to) {
  uint32_t sum = 0;
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
#pragma unroll 8
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    const uint4 v = __ldcs(from + i);
    sum += v.x ^ v.y ^ v.z ^ v.w;
  }
  if (sum == never) *to = sum;
}

}  // namespace

void* card_stream() {
  static const cudaStream_t made = [] {
    cudaStream_t s = nullptr;
    (void)cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking);
    return s;
  }();
  return made;
}

std::string card_name() {
  cudaDeviceProp properties{};
  int driver = 0;
  (void)cudaGetDeviceProperties(&properties, kCard.index);
  (void)cudaDriverGetVersion(&driver);
  return concat(properties.name, ", CUDA ", CUDART_VERSION / 1000, ".", CUDART_VERSION % 1000 / 10, ", driver for ",
                driver / 1000, ".", driver % 1000 / 10);
}

Result<std::shared_ptr<void>> copies_on_card(const void* from, size_t bytes, int copies) {
  auto memory = cuda::allocate(kCard, bytes * static_cast<size_t>(copies));
  if (!memory.ok()) return memory;
  for (int i = 0; i < copies; ++i) {
    void* to = static_cast<char*>(memory->get()) + static_cast<size_t>(i) * bytes;
    BS_RETURN_IF_ERROR(check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream()), "cudaMemcpyAsync"));
  }
  BS_RETURN_IF_ERROR(cuda::synchronise(kCard));
  return memory;
}

Result<std::vector<Timing>> time_on_card(const std::vector<Contender>& contenders, const Options& options) {
  std::vector<Replay> cold, hot;
  for (const Contender& c : contenders) {
    BS_RETURN_IF_ERROR(cuda::synchronise(kCard));
    c.run(0);
    const auto one = time_us([&] {
      for (int i = 0; i < 5; ++i) c.run(0);
    });
    if (!one.ok()) return one.status();
    const double launches = std::clamp(kReplayUs / std::max(*one / 5, 0.5), 4.0, kMostLaunches);
    for (bool rotate : {true, false}) {
      if (rotate ? !options.cold : !options.hot) continue;
      auto replay = capture(c, std::max(static_cast<int>(launches), rotate ? c.copies : 1), rotate);
      if (!replay.ok()) return replay.status();
      (rotate ? cold : hot).push_back(*std::move(replay));
    }
  }
  std::vector<std::vector<double>> cold_us(contenders.size()), hot_us(contenders.size());
  for (int s = -1; s < options.samples; ++s) {  // the first warms up
    for (size_t i = 0; i < contenders.size(); ++i) {
      for (auto [replays, us] : {std::pair(&cold, &cold_us), std::pair(&hot, &hot_us)}) {
        if (replays->empty()) continue;
        const auto taken = us_a_launch((*replays)[i]);
        if (!taken.ok()) return taken.status();
        if (s >= 0) (*us)[i].push_back(*taken);
      }
    }
  }
  std::vector<Timing> timings;
  for (size_t i = 0; i < contenders.size(); ++i) timings.push_back({summary(cold_us[i]), summary(hot_us[i])});
  return timings;
}

Result<double> time_once_on_card(const std::function<void()>& body) {
  std::vector<double> all;
  body();
  for (int i = 0; i < 5; ++i) {
    const auto us = time_us(body);
    if (!us.ok()) return us.status();
    all.push_back(*us);
  }
  return summary(all).median;
}

Result<double> card_bandwidth() {
  static const Result<double> measured = []() -> Result<double> {
    constexpr size_t kBytes = size_t{2} << 30;
    auto memory = cuda::allocate(kCard, kBytes);
    if (!memory.ok()) return memory.status();
    BS_RETURN_IF_ERROR(check(cudaMemsetAsync(memory->get(), 1, kBytes, stream()), "cudaMemsetAsync"));
    const auto us = time_once_on_card([&] {
      (void)cuda::launch({.blocks = 132 * 16, .threads = 512, .stream = stream()}, read_all,
                         static_cast<const uint4*>(memory->get()), static_cast<int64_t>(kBytes / 16), 12345u,
                         static_cast<uint32_t*>(memory->get()));
    });
    if (!us.ok()) return us.status();
    return 1e6 * static_cast<double>(kBytes) / *us;
  }();
  return measured;
}

}  // namespace blocksparse::bench
