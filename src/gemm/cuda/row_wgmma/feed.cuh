// The feeding side of the kernel `row_wgmma`: its jobs, and the warp that fills a ring of stages for them. The first
// stage of a job carries a note of what the job is, for the warps that multiply look nothing up.
#pragma once

#include "cuda/ptx/bulk_copy.h"
#include "cuda/ptx/copy.h"
#include "cuda/ptx/griddepcontrol.h"
#include "cuda/ptx/shared.h"
#include "cuda/ring.h"
#include "gemm/cuda/finish.cuh"
#include "gemm/cuda/row_wgmma/plan.h"

namespace blocksparse::gemm::row_wgmma {
namespace {

using ptx::shared_address;

// ---- Config ---------------------------------------------------------------------------------------------------------

struct Args {
  CUtensorMap x, w, w_last;  // w_last: of blocks of inputs that are not whole; what lies beyond is 0
  DeviceWalk walk;
  int32_t jobs;
  int32_t tiles;       // of tokens
  int32_t last_input;  // the block of inputs that is not whole; -1: none
  bool cut;            // some rows are several pieces
  float* partial;      // [slots][n][block]: sums of slices. null: rows are walked whole
  const float* gates;
  bool early;  // what the kernel in front has not written may be read before it is complete
  bool plain;  // sums are stored as they are
  int32_t n;
  int64_t outputs;
  Finish finish;
};

template <class T, int Block, int Tokens, bool ByIn, bool XFirst, bool Gated>
struct Kernel {
  using Element = T;
  static constexpr int block = Block, tokens = Tokens;
  static constexpr bool by_in = ByIn, x_first = XFirst, gated = Gated;
  static constexpr int kDepth = Block < 64 ? Block : 64;  // inputs of a stage
  static constexpr int kSteps = Block / kDepth;           // stages of a block
  static constexpr int kXBytes = Tokens * kDepth * 2, kWBytes = Block * kDepth * 2;
  static constexpr int kStageBytes = kXBytes + kWBytes;
  static constexpr int kRoom = 224 * 1024 / kStageBytes;
  static constexpr int kStages = kRoom < 32 ? kRoom : 32;
  static constexpr int kSharedBytes = kStages * kStageBytes;
  static constexpr int kHalves = Tokens / 64;  // of 64 tokens: wgmma's rows
  static constexpr int kSums = Block / 2;      // of a lane, for each half
  static constexpr int kConsumers = 2;         // warpgroups
  // Warps: one starts the copies of a stage in 0.33 us.
  static constexpr int kFeeders = 4;
  static constexpr int kThreads = 128 * kConsumers + 32 * kFeeders;
  static_assert(kFeeders <= kStages);
};

// What a job's first stage says.
struct Note {
  int stages;  // 0: an empty row; below: no more jobs, as the -stages-th warpgroup is told
  int to, token;
  int slot;  // of the slice; -1: the row is whole
};

template <class K>
struct Shared {
  cuda::Ring<K::kStages> ring;
  int4 notes[K::kStages];
  cuda::RingPlace turn;  // where the job begins whose turn it is
  float gates[K::gated ? K::kStages : 1];
};

// ---- Device ---------------------------------------------------------------------------------------------------------

// A warp that fills every so many stages of the ring: all see all jobs.
template <class K>
class Feeder {
 public:
  __device__ Feeder(const Args& p, Shared<K>& shared, uint32_t stages, int feeder)
      : p_(p), shared_(shared), stages_(stages), ahead_(feeder) {
    place_.stage = feeder;
  }

  __device__ void run() {
    const int grid = static_cast<int>(gridDim.x), waves = (p_.jobs + grid - 1) / grid;
    // What is next comes from memory while this is sent.
    Job job = find_job(0), next = find_job(1);
    Batch batch = fetch(job, job.first);
    for (int wave = 0; wave < waves; ++wave) {
      const Batch of_next = fetch(next, next.first);
      const Job after = find_job(wave + 2);
      if (job.exists) send_job(job, batch);
      job = next, batch = of_next, next = after;
    }
    if (!waited_) wait();
    for (int i = 1; i <= K::kConsumers; ++i) send_note({.stages = -i});
  }

 private:
  struct Job {
    bool exists = false;
    int first = 0, last = 0;  // its list
    Note note{};
  };
  struct Batch {  // 32 blocks of the list, one a lane: those whose gates are not 0
    BlockRef ref{0, 0};
    float gate = 1;
    int count = 0;
  };

  // Longest first, there and back, so that who begins with a long list ends with a short one.
  __device__ int job_of(int wave) const {
    const int grid = static_cast<int>(gridDim.x), place = static_cast<int>(blockIdx.x);
    return wave * grid + (wave % 2 == 0 ? place : grid - 1 - place);
  }

  // None: there are no more, or it is a later slice of a row that is done with the first one.
  __device__ Job find_job(int wave) const {
    const int index = job_of(wave), item = index / p_.tiles;
    if (index >= p_.jobs || (p_.cut && item >= p_.walk.counts[0])) return {};
    const Piece piece = p_.walk.pieces[item];
    Job job{true, piece.first, piece.last, {0, piece.to, index % p_.tiles * K::tokens, -1}};
    if (!p_.cut || piece.slot < 0) return job;
    if (p_.partial != nullptr) {
      job.note.slot = piece.slot;
      return job;
    }
    job.exists = piece.first == p_.walk.starts[piece.to];
    job.last = p_.walk.starts[piece.to + 1];
    return job;
  }

  __device__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
  __device__ uint32_t data() const { return place_.in(stages_, K::kStageBytes); }
  __device__ void take_stage() {
    if (lane() == 0) shared_.ring.wait_empty(place_);
    __syncwarp();
  }
  __device__ void wait() {
    ptx::griddepcontrol_wait();
    ptx::griddepcontrol_launch_dependents();
    waited_ = true;
  }
  __device__ void leave(const Note& note) {
    ptx::st_shared_16(shared_address(&shared_.notes[place_.stage]), int4{note.stages, note.to, note.token, note.slot});
  }
  __device__ void send_note(const Note& note) {
    if (ahead_ == 0) {
      take_stage();
      if (lane() == 0) leave(note), shared_.ring.expect_nothing(place_);
      advance();
    }
    pass(1);
  }

  __device__ void advance() {
    ahead_ += K::kFeeders;
    place_.stage += K::kFeeders;
    if (place_.stage >= K::kStages) place_.stage -= K::kStages, place_.parity ^= 1;
  }
  __device__ void pass(int count) { ahead_ -= count; }

  __device__ Batch fetch(const Job& job, int first) const {
    Batch batch;
    const int at = first + lane();
    if (at < job.last) batch.ref = p_.walk.refs[at];
    batch.count = min(max(job.last - first, 0), 32);
    if constexpr (K::gated) {
      if (at < job.last) batch.gate = p_.gates[batch.ref.weight];
      const unsigned live = __ballot_sync(~0u, at < job.last && batch.gate != 0);
      batch.count = __popc(live);
      const int source = lane() < batch.count ? static_cast<int>(__fns(live, 0, lane() + 1)) : 0;
      batch.ref = {__shfl_sync(~0u, batch.ref.from, source), __shfl_sync(~0u, batch.ref.weight, source)};
      batch.gate = __shfl_sync(~0u, batch.gate, source);
    }
    return batch;
  }
  __device__ int stages_of(const Job& job) const {
    if constexpr (!K::gated) return (job.last - job.first) * K::kSteps;
    int count = 0;
    for (int first = job.first; first < job.last; first += 32) {
      const int at = first + lane();
      const bool live = at < job.last && p_.gates[p_.walk.refs[at].weight] != 0;
      count += __popc(__ballot_sync(~0u, live));
    }
    return count * K::kSteps;
  }

  __device__ void send_job(Job& job, Batch batch) {
    job.note.stages = stages_of(job);
    first_stage_ = ahead_ == 0;
    if (!waited_) {  // the ring is empty: W first, and x when it is there
      const int count = min(batch.count * K::kSteps, K::kStages), mine = ahead_;
      const cuda::RingPlace place = place_;
      for (; ahead_ < count; advance()) send_w(job, batch);
      wait();
      const int end = ahead_;
      const cuda::RingPlace behind = place_;
      place_ = place, ahead_ = mine;
      for (; ahead_ < end; advance()) send_x(job, batch);
      place_ = behind;
    }
    if (job.note.stages == 0) return send_note(job.note);
    for (int first = job.first; first < job.last; first += 32) {
      const Batch next = fetch(job, first + 32);
      const int count = batch.count * K::kSteps;
      for (; ahead_ < count; advance()) {
        take_stage();
        send_w(job, batch);
        send_x(job, batch);
      }
      pass(count);
      batch = next;
    }
  }

  // Of the stage that is ahead_ of the batch: W, with the note, and the bytes that the stage waits for.
  __device__ void send_w(const Job& job, const Batch& batch) {
    const int block = ahead_ / K::kSteps, weight = __shfl_sync(~0u, batch.ref.weight, block);
    const int from = __shfl_sync(~0u, batch.ref.from, block);
    const float gate = K::gated ? __shfl_sync(~0u, batch.gate, block) : 1;
    if (lane() == 0) {
      if (first_stage_) leave(job.note);
      if constexpr (K::gated) shared_.gates[place_.stage] = gate;
      shared_.ring.expect(place_, K::kStageBytes);
      load_w(data() + K::kXBytes, shared_.ring.full(place_), from, weight, ahead_ % K::kSteps * K::kDepth);
    }
    first_stage_ = false;
  }
  __device__ void send_x(const Job& job, const Batch& batch) const {
    const int from = __shfl_sync(~0u, batch.ref.from, ahead_ / K::kSteps);
    if (lane() != 0) return;
    load_x(data(), shared_.ring.full(place_), from * K::block + ahead_ % K::kSteps * K::kDepth, job.note.token);
  }

  __device__ void load_w(uint32_t to, uint32_t full, int from, int weight, int step) const {
    const CUtensorMap* map = from == p_.last_input ? &p_.w_last : &p_.w;
    if constexpr (K::by_in) {  // outputs are contiguous: boxes of 64, one behind the other
#pragma unroll
      for (int output = 0; output < K::block; output += K::kDepth) {
        ptx::load_box(to + static_cast<uint32_t>(output * K::kDepth * 2), map, full, output, step, weight);
      }
    } else {
      ptx::load_box(to, map, full, step, 0, weight);
    }
  }
  __device__ void load_x(uint32_t to, uint32_t full, int input, int token) const {
    if constexpr (K::x_first) {
#pragma unroll
      for (int half = 0; half < K::kHalves; ++half) {
        ptx::load_box(to + static_cast<uint32_t>(half * K::kDepth * 128), &p_.x, full, token + 64 * half, input);
      }
    } else {
      ptx::load_box(to, &p_.x, full, input, token);
    }
  }

  const Args& p_;
  Shared<K>& shared_;
  uint32_t stages_;
  bool waited_ = false, first_stage_ = false;  // of a job, which is this warp's
  int ahead_;  // stages from the next one that anybody fills to the next that is this warp's
  cuda::RingPlace place_;
};

}  // namespace
}  // namespace blocksparse::gemm::row_wgmma
