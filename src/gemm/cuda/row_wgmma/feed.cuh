// The feeding side of the kernel `row_wgmma`: which jobs a thread block has, and the warps that fill a ring of stages
// for them.
#pragma once

#include "cuda/divider.h"
#include "cuda/ptx/bulk_copy.h"
#include "cuda/ptx/copy.h"
#include "cuda/ptx/griddepcontrol.h"
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
  int32_t waves;  // jobs of a thread block, if they are not dealt
  // Neighbouring jobs are the tiles of tokens of a row of blocks or, rows_inside, the rows of a tile.
  cuda::Divider inside;
  bool rows_inside;
  int32_t last_input;  // the block of inputs that is not whole; -1: none
  bool cut;            // some rows are several pieces
  float* partial;      // [slots][n][block]: sums of slices. null: rows are walked whole
  // Whole rows as index_for_card() has dealt them to groups of 2^log2_tiles thread blocks: core/schedule.h.
  const uint16_t* schedule;
  const int32_t* scheduled;  // has the bits `direction` if they are there, which tables made by a card have not
  int32_t direction, groups, schedule_waves, log2_tiles;
  bool early;  // what the kernel in front has not written may be read before it is complete
  bool plain;  // sums are stored as they are
  int32_t n;
  int64_t outputs;
  Finish finish;
};

template <class T, int Block, int Tokens, bool ByIn, bool Dealt>
struct Kernel {
  using Element = T;
  static constexpr int block = Block, tokens = Tokens;
  static constexpr bool by_in = ByIn;
  // May have jobs that were dealt. Kernels of their own: with that code all others took up to 6 % longer.
  static constexpr bool dealt = Dealt;
  // Warps. One alone is late with small stages; with four the first stage of all is late, for they share the bandwidth.
  static constexpr int kFeeders = 2;
  static constexpr int kDepth = Block < 64 ? Block : 64;  // inputs of a stage
  static constexpr int kSteps = Block / kDepth;           // stages of a block
  static constexpr int kXBytes = Tokens * kDepth * 2, kWBytes = Block * kDepth * 2;
  static constexpr int kStageBytes = kXBytes + kWBytes;
  // Of a warpgroup: 64 tokens on their way to y. Rows of 32 outputs go there from registers.
  static constexpr int kStoreBytes = Block < 64 ? 0 : 64 * Block * 2;
  static constexpr int kRoom = (224 * 1024 - 2 * kStoreBytes) / kStageBytes;
  // A stage is always the same feeder's, which has seen it empty in every lap. With 13 stages two feeders took turns at
  // a stage. One could be a lap ahead and take an older release of the stage for its own: after some thousand calls a
  // training of ba(288,3,blocks=2448) stopped with a launch failure.
  static constexpr int kStages = (kRoom < 32 ? kRoom : 32) / kFeeders * kFeeders;
  static constexpr int kSharedBytes = kStages * kStageBytes + 2 * kStoreBytes;
  static constexpr int kHalves = Tokens / 64;  // of 64 tokens: wgmma's rows
  static constexpr int kSums = Block / 2;      // of a lane, for each half
  // With 128 sums of a lane those who multiply need more registers than there are for each of 320 threads. Who loads
  // gives his away, as a whole warpgroup.
  static constexpr bool kGivesRegisters = kHalves * kSums == 128;
  static constexpr int kFeedRegisters = 40, kRegisters = 232;
  static constexpr int kThreads = kGivesRegisters ? 384 : 256 + 32 * kFeeders;
};

template <class K>
struct Shared {
  cuda::Ring<K::kStages> ring;
};

// ---- Device ---------------------------------------------------------------------------------------------------------

__device__ inline int lane() { return static_cast<int>(threadIdx.x) % 32; }

// A row of blocks, or a slice of one, times the tokens from `token` on.
struct Job {
  int first = 0, last = 0;  // its list
  int to = -1, token = 0;   // to: the block of outputs. -1: there is none
  int slot = -1;            // of the slice; -1: the row is whole
};

// The jobs of this thread block, a wave each: longest first, there and back, so that who begins with a long list ends
// with a short one. The last wave, which may not be for all, goes back in any case: its jobs are for those who have had
// less. 288 rows of random blocks, two tiles: the most that one has is 1.15 of the mean, there and back 1.29. Hubs
// need more: where rows were dealt, a thread block takes its tile of each row that its group has.
template <class K>
class Jobs {
 public:
  __device__ explicit Jobs(const Args& p) : p_(p) {
    if constexpr (K::dealt) {
      if ((*p.scheduled & p.direction) == 0) return;
      const int group = static_cast<int>(blockIdx.x) >> p.log2_tiles;
      if (lane() < p.schedule_waves) row_ = p.schedule[lane() * p.groups + group];
      dealt_ = __popc(__ballot_sync(~0u, row_ > 0));
    }
  }

  __device__ int waves() const { return K::dealt && dealt_ > 0 ? dealt_ : p_.waves; }

  // None: there are no more, or it is a later slice of a row that is done with the first one.
  __device__ Job find(int wave) const {
    if constexpr (K::dealt) {
      if (dealt_ > 0) return dealt(wave);
    }
    const int grid = static_cast<int>(gridDim.x), place = static_cast<int>(blockIdx.x);
    const bool there = wave == 0 || (wave % 2 == 0 && wave + 1 < p_.waves);
    const int index = wave * grid + (there ? place : grid - 1 - place), outer = p_.inside.quotient(index);
    const int inner = index - outer * static_cast<int>(p_.inside.by), item = p_.rows_inside ? inner : outer;
    if (index >= p_.jobs || (p_.cut && item >= p_.walk.counts[0])) return {};
    const Piece piece = p_.walk.pieces[item];
    Job job{piece.first, piece.last, piece.to, (p_.rows_inside ? outer : inner) * K::tokens, piece.slot};
    if (!p_.cut || piece.slot < 0 || p_.partial != nullptr) return job;
    if (piece.first != p_.walk.starts[piece.to]) return {};
    job.last = p_.walk.starts[piece.to + 1], job.slot = -1;
    return job;
  }

  // The stages that a job takes.
  __device__ int stages_of(const Job& job) const {
    return __shfl_sync(~0u, job.last - job.first, 0) *
           K::kSteps;  // the same in all lanes, as wgmma's conditions want it
  }

 private:
  __device__ Job dealt(int wave) const {
    if (wave >= dealt_) return {};
    const int row = __shfl_sync(~0u, row_, wave) - 1, tile = static_cast<int>(blockIdx.x) & ((1 << p_.log2_tiles) - 1);
    return {p_.walk.starts[row], p_.walk.starts[row + 1], row, tile * K::tokens, -1};
  }

  const Args& p_;
  int row_ = 0;    // 1 + the row that this thread block takes in the wave that is the lane
  int dealt_ = 0;  // how many of them it takes; 0: they are not dealt
};

// A warp that fills every so many stages of the ring: all see all jobs.
template <class K>
class Feeder {
 public:
  __device__ Feeder(const Args& p, Shared<K>& shared, uint32_t stages, int feeder)
      : p_(p), jobs_(p), shared_(shared), stages_(stages), ahead_(feeder) {
    place_.stage = feeder;
  }

  __device__ void run() {
    if (p_.last_input < 0) run_in<false>();
    else run_in<true>();
  }

 private:
  template <bool Ragged>
  __device__ void run_in() {
    // What is next comes from memory while this is sent.
    Job job = jobs_.find(0), next = jobs_.find(1);
    Batch batch = fetch(job, job.first);
    if (p_.early) begin_early<Ragged>(job, batch);
    for (int wave = 0; wave < jobs_.waves(); ++wave) {
      const Batch of_next = fetch(next, next.first);
      const Job after = jobs_.find(wave + 2);
      send<Ragged>(job, batch);
      job = next, batch = of_next, next = after;
    }
  }

  // 32 blocks of the list, one a lane. Nothing is made of `ref` before it is needed, so that nobody waits for it: b =
  // 64, 10 %, 1024 tokens, tiles of 64 took 16.3 us instead of 16.9 (H100, 2026-11-25).
  struct Batch {
    BlockRef ref{0, 0};
    int count = 0;
  };

  __device__ Batch fetch(const Job& job, int first) const {
    Batch batch;
    const int at = first + lane();
    if (at < job.last) batch.ref = p_.walk.refs[at];
    batch.count = min(max(job.last - first, 0), 32);
    return batch;
  }

  template <bool Ragged>
  __device__ void send(const Job& job, Batch batch) {
    for (int first = job.first; first < job.last; first += 32) {
      const Batch next = fetch(job, first + 32);
      const int count = batch.count * K::kSteps;
      for (; sent_early_ > 0 && ahead_ < count; advance()) --sent_early_;
      for (; ahead_ < count; advance()) fill<Ragged>(job, batch, true, true);
      ahead_ -= count;
      batch = next;
    }
  }

  // The ring is empty: W first, and x when it is there.
  template <bool Ragged>
  __device__ void begin_early(const Job& job, const Batch& batch) {
    const int count = min(batch.count * K::kSteps, K::kStages), mine = ahead_;
    const cuda::RingPlace place = place_;
    for (; ahead_ < count; advance()) fill<Ragged>(job, batch, true, false), ++sent_early_;
    ptx::griddepcontrol_wait();
    ptx::griddepcontrol_launch_dependents();
    for (ahead_ = mine, place_ = place; ahead_ < count; advance()) fill<Ragged>(job, batch, false, true);
    ahead_ = mine, place_ = place;
  }

  __device__ void advance() {
    ahead_ += K::kFeeders;
    place_.stage += K::kFeeders;
    if (place_.stage >= K::kStages) place_.stage -= K::kStages, place_.parity ^= 1;
  }

  // The stage that is ahead_ of the batch.
  template <bool Ragged>
  __device__ __forceinline__ void fill(const Job& job, const Batch& batch, bool w, bool x) const {
    const int block = ahead_ / K::kSteps, step = ahead_ % K::kSteps * K::kDepth;
    const int from = __shfl_sync(~0u, batch.ref.from, block), weight = __shfl_sync(~0u, batch.ref.weight, block);
    if (lane() == 0) {
      const uint32_t data = place_.in(stages_, K::kStageBytes), full = shared_.ring.full(place_);
      if (w) {
        shared_.ring.wait_empty(place_);
        shared_.ring.expect(place_, K::kStageBytes);
        load_w<Ragged>(data + K::kXBytes, full, from, weight, step);
      }
      if (x) ptx::load_box(data, &p_.x, full, from * K::block + step, job.token);
    }
    __syncwarp();
  }

  // Maps of two dimensions are faster: b = 64, 25 %, 256 tokens 8.8 instead of 9.4 us (H100, 2026-11-25).
  template <bool Ragged>
  __device__ void load_w(uint32_t to, uint32_t full, int from, int weight, int step) const {
    constexpr int kBoxes = K::by_in ? K::block / K::kDepth : 1;  // by_in: outputs are contiguous, boxes of 64
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      const uint32_t at = to + static_cast<uint32_t>(box * K::kDepth * K::kDepth * 2);
      const int inner = K::by_in ? box * K::kDepth : step, outer = K::by_in ? step : 0;
      if (Ragged && from == p_.last_input) ptx::load_box(at, &p_.w_last, full, inner, outer, weight);
      else ptx::load_box(at, &p_.w, full, inner, weight * K::block + outer);
    }
  }

  const Args& p_;
  Jobs<K> jobs_;
  Shared<K>& shared_;
  uint32_t stages_;
  int ahead_;  // stages from the next one that anybody fills to the next that is this warp's
  int sent_early_ = 0;
  cuda::RingPlace place_;
};

}  // namespace
}  // namespace blocksparse::gemm::row_wgmma
