// The feeding side of the kernel `four_rows_wgmma`: its jobs, and the warp that fills a ring of stages for them. A note
// in each stage says what to do with it, so the multiplying warps look nothing up.
#pragma once

#include "cuda/ptx/bulk_copy.h"
#include "cuda/ptx/copy.h"
#include "cuda/ptx/griddepcontrol.h"
#include "cuda/ptx/shared.h"
#include "cuda/ring.h"
#include "gemm/cuda/finish.cuh"
#include "gemm/cuda/four_rows_wgmma/plan.h"

namespace blocksparse::gemm::four_rows_wgmma {
namespace {

using ptx::shared_address;

// ---- Config ---------------------------------------------------------------------------------------------------------

inline constexpr int kBlock = 32, kTokens = 128;

inline constexpr int kGroup = 4;  // rows of blocks of a job

struct Args {
  CUtensorMap x, w;
  DeviceWalk walk;
  int32_t jobs;
  int32_t slices;  // tiles of tokens
  int32_t groups;  // groups of four rows
  bool early;      // the kernel before writes x alone: everything else may be read before it is complete
  int32_t n;
  int64_t outputs;
  Finish finish;
  bool has_w = false;  // there are blocks, so w is a valid map
};

template <class T>
struct Kernel {
  using Element = T;
  static constexpr int kXBytes = kTokens * kBlock * 2, kWBytes = kBlock * kBlock * 2;
  static constexpr int kStageBytes = kXBytes + kGroup * kWBytes;
  // Two thread blocks an SM, and room for the kernels before and after.
  static constexpr int kStages = 6, kResident = 2;
  static constexpr int kSharedBytes = kStages * kStageBytes;
  static constexpr int kConsumers = 2;      // warpgroups of 64 tokens each
  static constexpr int kSums = kBlock / 2;  // sums of a lane, for each row of blocks
  static constexpr int kThreads = 128 * kConsumers + 32;
};

enum Flag : int32_t { kData = 1, kShared = 2, kLast = 4, kExit = 8 };

template <class K>
struct Shared {
  cuda::Ring<K::kStages> ring;
  int4 notes[K::kStages];  // flags, row of blocks, first token
};

// The list of a row of blocks.
struct List {
  int first, last;
  __device__ int count() const { return last - first; }
};

struct Job {
  int to, token;  // the first row of blocks, and the first token
  bool shared;    // one list serves all four rows
  List lists[kGroup];
};

// Called by all lanes of a warp.
__device__ inline Job find_job(const Args& p, int index) {
  Job job;
  job.to = index / p.slices, job.token = index % p.slices * kTokens;
#pragma unroll
  for (int g = 0; g < kGroup; ++g) {
    const int row = job.to + g * p.groups;
    job.lists[g] = {p.walk.starts[row], p.walk.starts[row + 1]};
  }
  job.shared = true;
#pragma unroll
  for (int g = 1; g < kGroup; ++g) job.shared = job.shared && job.lists[g].count() == job.lists[0].count();
  bool same = true;
  for (int i = static_cast<int>(threadIdx.x) % 32; job.shared && i < job.lists[0].count(); i += 32) {
    const int from = p.walk.refs[job.lists[0].first + i].from;
#pragma unroll
    for (int g = 1; g < kGroup; ++g) same = same && p.walk.refs[job.lists[g].first + i].from == from;
  }
  job.shared = job.shared && __all_sync(~0u, same);
  return job;
}

// The warp that fills the ring.
template <class K>
class Feeder {
 public:
  __device__ Feeder(const Args& p, Shared<K>& shared, uint32_t stages) : p_(p), shared_(shared), stages_(stages) {}

  __device__ void run() {
    for (auto index = static_cast<int>(blockIdx.x); index < p_.jobs; index += static_cast<int>(gridDim.x)) {
      job_ = find_job(p_, index);
#pragma unroll
      for (int walk = 0; walk < kGroup; ++walk) {
        if (walk == 0 || !job_.shared) send_list(job_.lists[walk], job_.to + walk * p_.groups);
      }
    }
    if (!waited_) wait();
    take_stage();
    if (lane() == 0) leave_note(kExit, 0), shared_.ring.expect_nothing(place_);
  }

 private:
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
  __device__ uint32_t data() const { return place_.in(stages_, K::kStageBytes); }
  __device__ BlockRef fetch(const List& list, int i) const {
    const int at = list.first + i + lane();
    return at < list.last ? p_.walk.refs[at] : BlockRef{0, 0};
  }
  __device__ void wait() {
    ptx::griddepcontrol_wait();
    ptx::griddepcontrol_launch_dependents();
    waited_ = true;
  }
  __device__ void take_stage() {
    if (lane() == 0) shared_.ring.wait_empty(place_);
    __syncwarp();
  }
  __device__ void leave_note(int flags, int to) {
    ptx::st_shared_16(shared_address(&shared_.notes[place_.stage]), int4{flags, to, job_.token, 0});
  }

  __device__ void send_list(const List& list, int to) {
    BlockRef batch = fetch(list, 0), ahead{0, 0};
    int sent = 0;
    if (!waited_) {  // the ring is empty: W first, x when it is complete
      sent = min(list.count(), K::kStages);
      for (int i = 0; i < sent; ++i) load_w(batch, list, to, i), place_.advance(K::kStages);
      wait();
      place_ = {};
      for (int i = 0; i < sent; ++i) load_x(batch, i), place_.advance(K::kStages);
    }
    if (list.count() == 0) {
      take_stage();
      // If the list is shared, zeros are stored in all rows of the group.
      if (lane() == 0) leave_note(kLast | (job_.shared ? kShared : 0), to), shared_.ring.expect_nothing(place_);
      place_.advance(K::kStages);
    }
    for (int i = sent; i < list.count(); ++i) {
      if (i % 32 == 0 && i > 0) batch = ahead;
      if (i % 32 == 0 || i == sent) ahead = fetch(list, i / 32 * 32 + 32);
      take_stage();
      load_w(batch, list, to, i);
      load_x(batch, i);
      place_.advance(K::kStages);
    }
  }
  // Also leaves the note and says how many bytes the stage waits for.
  __device__ void load_w(const BlockRef& batch, const List& list, int to, int i) {
    const int weight = __shfl_sync(~0u, batch.weight, i % 32);
    if (lane() != 0) return;
    const bool all = job_.shared;
    leave_note(kData | (all ? kShared : 0) | (i + 1 == list.count() ? kLast : 0), to);
    const uint32_t barrier = shared_.ring.full(place_), w = data() + K::kXBytes;
    shared_.ring.expect(place_, static_cast<uint32_t>(K::kXBytes + (all ? kGroup : 1) * K::kWBytes));
    ptx::load_box(w, &p_.w, barrier, 0, weight * kBlock);
#pragma unroll
    for (int g = 1; g < kGroup; ++g) {  // fprop: W lies in the order of the lists
      if (!all) break;
      const int other = weight + job_.lists[g].first - list.first;
      ptx::load_box(w + static_cast<uint32_t>(g * K::kWBytes), &p_.w, barrier, 0, other * kBlock);
    }
  }
  __device__ void load_x(const BlockRef& batch, int i) const {
    const int from = __shfl_sync(~0u, batch.from, i % 32);
    if (lane() == 0) ptx::load_box(data(), &p_.x, shared_.ring.full(place_), from * kBlock, job_.token);
  }

  const Args& p_;
  Shared<K>& shared_;
  Job job_{};
  uint32_t stages_;
  bool waited_ = false;
  cuda::RingPlace place_;
};

}  // namespace
}  // namespace blocksparse::gemm::four_rows_wgmma
