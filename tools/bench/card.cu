#include "card.h"

#include <cuda_runtime.h>
#include <dlfcn.h>

#include <algorithm>
#include <chrono>

#include "core/text.h"
#include "cuda/error.h"
#include "cuda/launch.h"
#include "cuda/memory.h"
#include "report.h"

namespace blocksparse::bench {

namespace {

constexpr Device kCard{DeviceType::cuda, 0};
constexpr double kReplayUs = 500;  // the least, so that the events' own time does not count
constexpr double kMostLaunches = 4096;
constexpr double kLongUs = 20e3;  // of the longest replay
constexpr int kFewestSamples = 3;

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

// Launches of one contender, which takes its copies in turn, or always the first one. They are a graph, if they can be
// captured.
struct Replay {
  std::shared_ptr<CUgraphExec_st> graph;
  std::function<void()> launch;
  int launches = 0;
};

// Null if a call could not be captured. Some libraries return an error then, and launch nothing.
std::shared_ptr<CUgraphExec_st> capture(const std::function<void()>& launch, int launches) {
  if (cudaStreamBeginCapture(stream(), cudaStreamCaptureModeThreadLocal) != cudaSuccess) return nullptr;
  launch();
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  size_t nodes = 0;
  const bool captured = cudaStreamEndCapture(stream(), &graph) == cudaSuccess && graph != nullptr &&
                        cudaGraphGetNodes(graph, nullptr, &nodes) == cudaSuccess &&
                        nodes >= static_cast<size_t>(launches) && cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess;
  if (graph != nullptr) (void)cudaGraphDestroy(graph);
  if (!captured) (void)cudaGetLastError();  // the next call shall not see this error
  return {captured ? exec : nullptr,
          [](cudaGraphExec_t e) { (void)(e == nullptr ? cudaSuccess : cudaGraphExecDestroy(e)); }};
}

Replay replay_of(const Contender& c, int launches, bool rotate) {
  auto launch = [&c, launches, rotate] {
    for (int i = 0; i < launches; ++i) c.run(rotate ? i % c.copies : 0);
  };
  return {capture(launch, launches), launch, launches};
}

Result<double> us_a_launch(const Replay& replay) {
  const auto us = time_us([&] {
    if (replay.graph == nullptr) replay.launch();
    else (void)cudaGraphLaunch(replay.graph.get(), stream());
  });
  if (!us.ok()) return us.status();
  return *us / replay.launches;
}

// Enough launches that the events' own time does not count and all copies take their turn. If the copies take very
// long, fewer do: then it matters little whether the weights are in the cache.
int launches_of(const Contender& c, double us, bool rotate) {
  const double enough = std::clamp(kReplayUs / us, 4.0, kMostLaunches);
  const double most = std::max(kLongUs / us, 4.0);
  return static_cast<int>(rotate ? std::min(std::max<double>(enough, c.copies), most) : enough);
}

// Such as "580.159.04", by NVIDIA's management library; without it the CUDA version that the driver is for.
std::string driver_version() {
  if (void* library = dlopen("libnvidia-ml.so.1", RTLD_LAZY)) {
    const auto init = reinterpret_cast<int (*)()>(dlsym(library, "nvmlInit_v2"));
    const auto get = reinterpret_cast<int (*)(char*, unsigned)>(dlsym(library, "nvmlSystemGetDriverVersion"));
    char text[96] = "";
    if (init != nullptr && get != nullptr && init() == 0 && get(text, sizeof(text)) == 0) return text;
  }
  int version = 0;
  (void)cudaDriverGetVersion(&version);
  return concat("for CUDA ", version / 1000, ".", version % 1000 / 10);
}

// Reads all of it. The store never happens, but the compiler cannot know.
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
  (void)cudaGetDeviceProperties(&properties, kCard.index);
  return properties.name;
}

std::string card_facts() {
  cudaDeviceProp p{};
  (void)cudaGetDeviceProperties(&p, kCard.index);
  return concat("\"driver\": ", json_string(driver_version()), ", \"cuda\": \"", CUDART_VERSION / 1000, ".",
                CUDART_VERSION % 1000 / 10, "\", \"compute_capability\": \"", p.major, ".", p.minor,
                "\", \"multiprocessors\": ", p.multiProcessorCount, ", \"memory_gb\": ", p.totalGlobalMem >> 30,
                ", \"l2_mb\": ", p.l2CacheSize >> 20);
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

Result<Timings> time_on_card(const std::vector<Contender>& contenders, const Options& options) {
  std::vector<Replay> cold, hot;
  for (const Contender& c : contenders) {
    BS_RETURN_IF_ERROR(cuda::synchronise(kCard));
    c.run(0);
    const auto one = time_us([&] {
      for (int i = 0; i < 5; ++i) c.run(0);
    });
    if (!one.ok()) return one.status();
    for (bool rotate : {true, false}) {
      if (rotate ? !options.cold : !options.hot) continue;
      (rotate ? cold : hot).push_back(replay_of(c, launches_of(c, std::max(*one / 5, 0.5), rotate), rotate));
    }
  }
  std::vector<std::vector<double>> cold_us(contenders.size()), hot_us(contenders.size());
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  auto over = [&] {
    return options.budget_s > 0 && std::chrono::duration<double>(Clock::now() - begin).count() > options.budget_s;
  };
  int samples = 0;
  for (int s = -1; s < options.samples && (s < kFewestSamples || !over()); ++s) {  // the first warms up
    samples = s + 1;
    for (size_t i = 0; i < contenders.size(); ++i) {
      for (auto [replays, us] : {std::pair(&cold, &cold_us), std::pair(&hot, &hot_us)}) {
        if (replays->empty()) continue;
        const auto taken = us_a_launch((*replays)[i]);
        if (!taken.ok()) return taken.status();
        if (s >= 0) (*us)[i].push_back(*taken);
      }
    }
  }
  Timings timings;
  timings.samples = samples;
  for (size_t i = 0; i < contenders.size(); ++i) {
    const bool launched = (cold.empty() ? hot : cold)[i].graph == nullptr;
    timings.contenders.push_back({summary(cold_us[i]), summary(hot_us[i]), launched});
  }
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
    int multiprocessors = 0;
    BS_RETURN_IF_ERROR(check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, kCard.index),
                             "cudaDeviceGetAttribute"));
    const auto us = time_once_on_card([&] {
      (void)cuda::launch({.blocks = int64_t{16} * multiprocessors, .threads = 512, .stream = stream()}, read_all,
                         static_cast<const uint4*>(memory->get()), static_cast<int64_t>(kBytes / 16), 12345u,
                         static_cast<uint32_t*>(memory->get()));
    });
    if (!us.ok()) return us.status();
    return 1e6 * static_cast<double>(kBytes) / *us;
  }();
  return measured;
}

}  // namespace blocksparse::bench
