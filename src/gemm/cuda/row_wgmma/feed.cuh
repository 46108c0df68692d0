// The feeding side of the kernel `row_wgmma`: its jobs, and the warp that fills a ring of stages for them. A stage
// carries a note of what to do with it, for the warps that multiply look nothing up.
#pragma once

#include "cuda/ptx/bulk_copy.h"
#include "cuda/ptx/copy.h"
#include "cuda/ptx/griddepcontrol.h"
#include "cuda/ptx/shared.h"
#include "cuda/ring.h"
#include "gemm/cuda/finish.cuh"
#include "gemm/cuda/row_wgmma/pieces.cuh"
#include "gemm/cuda/row_wgmma/plan.h"

namespace blocksparse::gemm::row_wgmma {
namespace {

using ptx::shared_address;

// ---- Config ---------------------------------------------------------------------------------------------------------

inline constexpr int kBlock = 32, kTokens = 128;

struct Args {
  CUtensorMap x, w;
  DeviceWalk walk;
  int32_t jobs;
  int32_t slices;  // of tokens
  int32_t groups;  // where four rows are walked together: how many fours
  bool cut;        // some rows are several pieces
  float* partial;  // [slots][n][32]: what clusters add. Else rows are walked whole
  bool early;      // what the kernel in front has not written may be read before it is complete
  int32_t n;
  int64_t outputs;
  Finish finish;
  bool has_w = false;  // there are blocks, so that w is a map
};

// Group 4: the rows r, r + groups, ... of W are walked together, as the gates of an LSTM lie. Where their lists are the
// same, they share x. Clusters: rows are cut, and the thread blocks of a cluster take jobs side by side.
template <class T, bool ByIn, int Group, bool Plain, bool Clusters>
struct Kernel {
  using Element = T;
  static constexpr bool by_in = ByIn, plain = Plain, clusters = Clusters;
  static constexpr int together = Clusters ? kClusterPieces : 1;
  static constexpr int group = Group;
  static constexpr int kXBytes = kTokens * kBlock * 2, kWBytes = kBlock * kBlock * 2;
  static constexpr int kStageBytes = kXBytes + Group * kWBytes;
  // Three thread blocks an SM, or two, and room for the kernels in front and behind.
  static constexpr int kStages = Group == 1 ? 7 : 6, kResident = Group == 1 ? 3 : 2;
  static constexpr int kSharedBytes = kStages * kStageBytes;
  static constexpr int kConsumers = Group == 1 ? 1 : 2;  // warpgroups
  static constexpr int kHalves = 2 / kConsumers;         // of 64 tokens, of a warpgroup
  static constexpr int kSums = kBlock / 2;               // of a lane, for each half and row of blocks
  static constexpr int kThreads = 128 * kConsumers + 32;
  static_assert(Group == 1 || (Group == 4 && !ByIn && Plain && !Clusters));
};

enum Flag : int32_t { kData = 1, kShared = 2, kLast = 4, kExit = 8 };

template <class K>
struct Shared {
  cuda::Ring<K::kStages> ring;
  int4 notes[K::kStages];  // flags, row of blocks, first token, Job::slice
  uint64_t slices[2];      // of a row, in turn: all have left their sums
};

// The list of a row of blocks.
struct List {
  int first, last;
  __device__ int count() const { return last - first; }
};

template <class K>
struct Job {
  int to, token;  // the first row of blocks, and the first token
  bool shared;    // one list serves the group
  int slice;      // 16 * slot + slices of the row; 0: it is walked whole
  List lists[K::group];
};

// A warp. False: a later slice of a row that is done with the first one, or nothing at all.
template <class K>
__device__ inline bool find_job(const Args& p, int index, Job<K>& job) {
  const int of_cluster = index / K::together;
  const int item = of_cluster / p.slices * K::together + index % K::together;
  if (index >= p.jobs) return false;
  job.token = of_cluster % p.slices * kTokens;
  job.shared = true;
  job.slice = 0;
  if constexpr (K::clusters) {
    ClusterPiece found;
    if (!find_cluster_piece(p.walk, item, found)) return false;
    job.to = found.piece.to, job.lists[0] = {found.piece.first, found.piece.last};
    if (found.slices > 1) job.slice = 16 * found.piece.slot + found.slices;
  } else if constexpr (K::group == 1) {
    if (p.cut && item >= p.walk.counts[0]) return false;
    const Piece piece = p.walk.pieces[item];
    job.to = piece.to, job.lists[0] = {piece.first, piece.last};
    if (!p.cut || piece.slot < 0) return true;
    if (piece.first != p.walk.starts[piece.to]) return false;
    job.lists[0].last = p.walk.starts[piece.to + 1];
  } else {
    job.to = item;
#pragma unroll
    for (int g = 0; g < K::group; ++g) {
      const int row = item + g * p.groups;
      job.lists[g] = {p.walk.starts[row], p.walk.starts[row + 1]};
    }
#pragma unroll
    for (int g = 1; g < K::group; ++g) job.shared = job.shared && job.lists[g].count() == job.lists[0].count();
    bool same = true;
    for (int i = static_cast<int>(threadIdx.x) % 32; job.shared && i < job.lists[0].count(); i += 32) {
      const int from = p.walk.refs[job.lists[0].first + i].from;
#pragma unroll
      for (int g = 1; g < K::group; ++g) same = same && p.walk.refs[job.lists[g].first + i].from == from;
    }
    job.shared = job.shared && __all_sync(~0u, same);
  }
  return true;
}

// The warp that fills the ring.
template <class K>
class Feeder {
 public:
  __device__ Feeder(const Args& p, Shared<K>& shared, uint32_t stages) : p_(p), shared_(shared), stages_(stages) {}

  __device__ void run() {
    for (int wave = 0; wave * static_cast<int>(gridDim.x) < p_.jobs; ++wave) {
      if (!find_job(p_, job_of(wave), job_)) continue;
#pragma unroll
      for (int walk = 0; walk < K::group; ++walk) {
        if (walk == 0 || !job_.shared) send_list(job_.lists[walk], job_.to + walk * p_.groups);
      }
    }
    if (!waited_) wait();
    take_stage();
    if (lane() == 0) leave_note(kExit, 0), shared_.ring.expect_nothing(place_);
  }

 private:
  // There and back, so that who begins with a long list ends with a short one.
  __device__ int job_of(int wave) const {
    const int count = static_cast<int>(gridDim.x) / K::together, place = static_cast<int>(blockIdx.x) / K::together;
    const int cluster = wave * count + (wave % 2 == 0 ? place : count - 1 - place);
    return cluster * K::together + static_cast<int>(blockIdx.x) % K::together;
  }
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
    ptx::st_shared_16(shared_address(&shared_.notes[place_.stage]), int4{flags, to, job_.token, job_.slice});
  }

  __device__ void send_list(const List& list, int to) {
    BlockRef batch = fetch(list, 0), ahead{0, 0};
    int sent = 0;
    if (!waited_) {  // the ring is empty: W first, and x when it is there
      sent = min(list.count(), K::kStages);
      for (int i = 0; i < sent; ++i) load_w(batch, list, to, i), place_.advance(K::kStages);
      wait();
      place_ = {};
      for (int i = 0; i < sent; ++i) load_x(batch, i), place_.advance(K::kStages);
    }
    if (list.count() == 0) {
      take_stage();
      const bool all = K::group > 1 && job_.shared;  // then zeros are stored in all rows of the group
      if (lane() == 0) leave_note(kLast | (all ? kShared : 0), to), shared_.ring.expect_nothing(place_);
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
  // With the note, and the bytes that the stage waits for.
  __device__ void load_w(const BlockRef& batch, const List& list, int to, int i) {
    const int weight = __shfl_sync(~0u, batch.weight, i % 32);
    if (lane() != 0) return;
    const bool all = K::group > 1 && job_.shared;
    leave_note(kData | (all ? kShared : 0) | (i + 1 == list.count() ? kLast : 0), to);
    const uint32_t barrier = shared_.ring.full(place_), w = data() + K::kXBytes;
    shared_.ring.expect(place_, static_cast<uint32_t>(K::kXBytes + (all ? K::group : 1) * K::kWBytes));
    ptx::load_box(w, &p_.w, barrier, 0, weight * kBlock);
#pragma unroll
    for (int g = 1; g < K::group; ++g) {  // by_out, so W lies in the order of the lists
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
  Job<K> job_{};
  uint32_t stages_;
  bool waited_ = false;
  cuda::RingPlace place_;
};

}  // namespace
}  // namespace blocksparse::gemm::row_wgmma
