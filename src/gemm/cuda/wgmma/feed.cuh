// The feeding side of the kernel `wgmma`: one warp hands out tiles, three walk their records and fill a ring of stages.
// A stage also carries a note for the multiplying warps. It is the note of the NEXT record: a note that arrives with
// its own data costs 300 clocks a record before the first branch on it.
#pragma once

#include "cuda/ptx/bulk_copy.h"
#include "cuda/ptx/copy.h"
#include "cuda/ptx/mbarrier.h"
#include "cuda/ptx/shared.h"
#include "cuda/ptx/warpgroup.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/ring.h"
#include "gemm/cuda/finish.cuh"
#include "gemm/cuda/wgmma/tables.h"

namespace blocksparse::gemm::wgmma {
namespace {

using ptx::shared_address;

struct Args {
  Tables tables;
  int32_t out_tiles, token_tiles;
  int32_t group;  // token tiles that are walked together, so that their x stays in L2
  int32_t n;
  int64_t outputs;
  bool boxes;  // y can be stored in boxes
  Finish finish;
  uint8_t* notes;  // null, or [token tiles][strips][4 warps]: whether a sum is not finite, see absent.cuh
};

enum Flag : int32_t { kGoesOn = 0, kEndsTile = 1, kExit = 2 };

// Warps that take turns with the records; the warp after them hands out tiles. One warp alone would need 370 clocks a
// record, as much as two wide products.
inline constexpr int kFeeders = 3;
inline constexpr int kMostStages = 10;

struct Shared {
  cuda::Ring<kMostStages> ring;
  uint64_t handed, taken;  // a single next tile: tiles in a queue are lost to other thread blocks, and 4 in it cost 13
                           // to 17 %
  int4 notes[kMostStages];
  int4 strips[kMostStages];  // strips of the record's tile
  int32_t tokens[kMostStages];
  int4 tile, tile_strips;  // tile of tokens or -1, first and last record, -
};

// Called by all threads. `consumers` arrive when they have used a stage.
__device__ inline void start_ring(Shared& shared, int stages, int consumers) {
  if (threadIdx.x == 0) {
    shared.ring.init(stages, consumers);
    ptx::mbarrier_init(shared_address(&shared.handed), 1);
    ptx::mbarrier_init(shared_address(&shared.taken), kFeeders);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
}

// A tile to multiply, in the layout of shared memory.
struct Work {
  int4 tile{-1, 0, 0, 0}, strips{0, 0, 0, 0};
};

__device__ inline Work work_at(const Args& p, int index) {
  if (index >= p.out_tiles * p.token_tiles) return {};
  const int size = p.group * p.out_tiles, group = index / size, in_group = index % size;
  const int tokens = min(p.group, p.token_tiles - group * p.group);
  const auto* tile = reinterpret_cast<const int4*>(p.tables.tiles + in_group / tokens);
  const int4 records = tile[0];
  return {{group * p.group + in_group % tokens, records.x, records.y, 0}, tile[1]};
}

// Called by one lane. A thread block's first tile follows from its number. Then it claims tile after tile, because rows
// differ in length.
__device__ inline void hand_out_tiles(Shared& shared, const Args& p) {
  uint32_t phase = 0;
  for (int index = static_cast<int>(blockIdx.x);;) {
    const Work work = work_at(p, index);
    ptx::st_shared_16(shared_address(&shared.tile), work.tile);
    ptx::st_shared_16(shared_address(&shared.tile_strips), work.strips);
    ptx::mbarrier_arrive(shared_address(&shared.handed));
    if (work.tile.x < 0) return;
    ptx::mbarrier_wait(shared_address(&shared.taken), phase);
    phase ^= 1;
    index = static_cast<int>(gridDim.x) + atomicAdd(p.tables.counter, 1);
  }
}

// A feeding warp. K::load(...) starts the copies of a stage and returns their bytes.
template <class K>
class Feeder {
  // A feeder's own last record then proves that the stage's data before the last came, so the parity tells which data
  // is the last.
  static_assert(K::kStages >= kFeeders);

 public:
  __device__ Feeder(Shared& shared, const Args& p, const typename K::Maps& maps, uint32_t stages, int id)
      : shared_(shared), p_(p), maps_(maps), stages_(stages), id_(id) {}

  __device__ void run() {
    Work work = next();
    Record batch = fetch(work.tile.y, work.tile.z);
    while (work.tile.x >= 0) {
      Work following;
      Record ahead = K::no_record();
      const int first = work.tile.y, last = work.tile.z;
      int i = first;
      do {
        const Record now = batch;
        if (i + 32 < last) batch = fetch(i + 32, last);
        const int count = max(1, min(32, last - i));  // an empty tile has one record without data
        for (int j = 0; j < count; ++j) {
          if (i + j == max(last - kAhead, first)) {
            following = next();
            ahead = fetch(following.tile.y, following.tile.z);
          }
          const Record record{__shfl_sync(~0u, now.chunk, j), __shfl_sync(~0u, now.a, j), __shfl_sync(~0u, now.b, j),
                              __shfl_sync(~0u, now.c, j)};
          send(record, work, i + j + 1 >= last ? kEndsTile : kGoesOn);
        }
        i += 32;
      } while (i < last);
      work = following, batch = ahead;
    }
    send(K::no_record(), {}, kExit);
  }

 private:
  static constexpr int kAhead = 4;  // records before the end of a tile at which the next tile is asked for

  __device__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
  __device__ Record fetch(int first, int last) const {
    return first + lane() < last ? p_.tables.records[first + lane()] : K::no_record();
  }
  // Only lane 0 knows the strips.
  __device__ Work next() {
    ptx::mbarrier_wait(shared_address(&shared_.handed), tile_phase_);
    tile_phase_ ^= 1;
    __syncwarp();  // no lane still waits for a phase that could pass once lane 0 has answered
    Work work;
    if (lane() == 0) {  // one lane reads and answers
      work.tile = ptx::ld_shared_16(shared_address(&shared_.tile));
      work.strips = ptx::ld_shared_16(shared_address(&shared_.tile_strips));
      ptx::mbarrier_arrive(shared_address(&shared_.taken));
    }
    work.tile.x = __shfl_sync(~0u, work.tile.x, 0);
    work.tile.y = __shfl_sync(~0u, work.tile.y, 0);
    work.tile.z = __shfl_sync(~0u, work.tile.z, 0);
    return work;
  }
  // Sends a record when the one after it is known; the very first has no data. Stages come back out of order: at once
  // from warps that skip a record, late from those that multiply. This feeder could therefore be a ring ahead of
  // another feeder that still waits for this stage, and could take an older phase of `empty` for its own by its parity.
  // So it waits for the stage's last data first.
  __device__ void send(const Record& record, const Work& work, Flag flag) {
    if (turn_ == id_ && lane() == 0) {
      const uint32_t full = shared_.ring.full(place_);
      int4 note = K::note(record);
      note.w = flag;
      ptx::mbarrier_wait(full, place_.parity ^ 1);
      shared_.ring.wait_empty(place_);
      // Copies start first. They are announced after the note.
      uint32_t bytes = 0;
      if (held_.chunk >= 0) bytes = K::load(p_, maps_, held_, held_tokens_, place_.in(stages_, K::kStageBytes), full);
      ptx::st_shared_16(shared_address(&shared_.notes[place_.stage]), note);
      ptx::st_shared_16(shared_address(&shared_.strips[place_.stage]), held_strips_);
      shared_.tokens[place_.stage] = held_tokens_;
      shared_.ring.expect(place_, bytes);
    }
    __syncwarp();
    if (++turn_ == kFeeders) turn_ = 0;
    held_ = record, held_tokens_ = work.tile.x, held_strips_ = work.strips;
    place_.advance(K::kStages);
  }

  Shared& shared_;
  const Args& p_;
  const typename K::Maps& maps_;
  uint32_t stages_;
  int id_, turn_ = 0;
  uint32_t tile_phase_ = 0;
  cuda::RingPlace place_;
  Record held_{-1, 0, 0, 0};
  int held_tokens_ = 0;
  int4 held_strips_{0, 0, 0, 0};
};

// A warpgroup's view of the ring. Stages are given back one record late, when wgmma has read them.
//
// All lanes read the notes, and one lane answers for its warp after a __syncwarp that leaves no trace in the code, so
// racecheck reports the notes. If only that lane reads, racecheck is silent, but ptxas assumes that addresses differ
// between lanes: 148 us -> 171 (b = 16, density .25).
template <class K>
class Consumer {
 public:
  __device__ Consumer(Shared& shared, uint32_t stages, int group)
      : shared_(shared), stages_(stages), group_(group), arrives_(threadIdx.x % 32 == 0) {}

  // Skips the record without data.
  __device__ void begin() {
    wait();
    shared_.ring.release_warp(place_);
    advance();
  }
  __device__ bool goes_on() const { return flag_ != kExit; }
  __device__ uint32_t mask() const { return mask_; }      // this warpgroup's patches in the record
  __device__ uint32_t before() const { return before_; }  // the record's patches before those

  // Walks all records of a tile and calls multiply(stage address) for those in which the warpgroup has a patch. Returns
  // the warpgroup's strip of outputs and the tile of tokens.
  template <class Multiply>
  __device__ int2 tile(Multiply multiply) {
    while (true) {
      wait();
      const bool ends = flag_ == kEndsTile;
      int2 tile{0, 0};
      if (ends) {
        tile = {reinterpret_cast<const int32_t*>(&shared_.strips[place_.stage])[group_], shared_.tokens[place_.stage]};
      }
      if (mask_ != 0) {
        idle_ = 0;
        multiply(place_.in(stages_, K::kStageBytes));
        ptx::wgmma_wait<1>();
        release_previous();
        previous_ = arrives_ ? shared_.ring.empty(place_) : 0;
      } else {  // each warp for itself; what an earlier record still reads must not be held for long
        if (++idle_ == 2) finish_previous();
        shared_.ring.release_warp(place_);
      }
      advance();
      if (!ends) continue;
      finish_previous();
      idle_ = 0;
      return tile;
    }
  }

 private:
  __device__ void wait() {
    shared_.ring.wait_full(place_);
    note_ = ptx::ld_shared_16(shared_address(&shared_.notes[place_.stage]));
  }
  __device__ void release_previous() {
    __syncwarp();
    if (previous_ != 0) ptx::mbarrier_arrive(previous_);
    previous_ = 0;
  }
  __device__ void finish_previous() {
    ptx::wgmma_wait<0>();
    release_previous();
  }
  // Conditions of wgmma come straight out of a shuffle: ptxas then knows that they are equal in all lanes.
  __device__ void advance() {
    place_.advance(K::kStages);
    mask_ = __shfl_sync(~0u, K::mask_of(note_, group_), 0);
    before_ = __shfl_sync(~0u, K::before_of(note_, group_), 0);
    flag_ = __shfl_sync(~0u, note_.w, 0);
  }

  Shared& shared_;
  uint32_t stages_;
  int group_;
  bool arrives_;
  cuda::RingPlace place_;
  int idle_ = 0, flag_ = kGoesOn;
  uint32_t previous_ = 0, mask_ = 0, before_ = 0;
  int4 note_{0, 0, 0, 0};
};

}  // namespace
}  // namespace blocksparse::gemm::wgmma
