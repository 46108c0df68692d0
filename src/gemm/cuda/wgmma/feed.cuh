// The feeding side of the kernel `many`: one warp hands out tiles, three walk their records and fill a ring of stages.
// A stage also carries a note for the warps that multiply. It is that of the NEXT record, for what arrives together
// with the data costs 300 clocks a record before the first branch on it.
#pragma once

#include "cuda/ptx/bulk_copy.h"
#include "cuda/ptx/copy.h"
#include "cuda/ptx/mbarrier.h"
#include "cuda/ptx/shared.h"
#include "cuda/ptx/warpgroup.h"
#include "cuda/ptx/wgmma.h"
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
  uint8_t* notes;  // null, or [token tiles][strips][4 warps] where a sum is not finite: see absent.cuh
};

enum Flag : int32_t { kGoesOn = 0, kEndsTile = 1, kExit = 2 };

// Warps that take turns with the records, the one behind them hands out tiles: one alone needs 370 clocks each, as much
// as two wide products.
inline constexpr int kFeeders = 3;
inline constexpr int kMostStages = 10;

struct Shared {
  uint64_t full[kMostStages], empty[kMostStages];
  uint64_t handed, taken;  // the next tile. More ahead, others cannot have them: 4 in a queue cost 13 to 17 %
  int4 notes[kMostStages];
  int4 strips[kMostStages];  // of this record: its tile's
  int32_t tokens[kMostStages];
  int4 tile, tile_strips;  // tile of tokens or -1, records first, last, -
};

// All threads. `consumers` arrive when they have used a stage.
__device__ inline void start_ring(Shared& shared, int stages, int consumers) {
  if (threadIdx.x == 0) {
    for (int s = 0; s < stages; ++s) {
      ptx::mbarrier_init(shared_address(&shared.full[s]), 1);
      ptx::mbarrier_init(shared_address(&shared.empty[s]), consumers);
    }
    ptx::mbarrier_init(shared_address(&shared.handed), 1);
    ptx::mbarrier_init(shared_address(&shared.taken), kFeeders);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
}

// What is multiplied next, in the order of memory.
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

// One lane. A thread block's first tile is its own, then each claims the next: rows differ in length.
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
  // So that its own last record shows that the stage's data before the last came: then parity tells the last.
  static_assert(K::kStages >= kFeeders);

 public:
  __device__ Feeder(Shared& shared, const Args& p, const typename K::Maps& maps, uint32_t ring, int id)
      : shared_(shared), p_(p), maps_(maps), ring_(ring), id_(id) {}

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
  static constexpr int kAhead = 4;  // records before the end of a tile at which the next one is asked for

  __device__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
  __device__ Record fetch(int first, int last) const {
    return first + lane() < last ? p_.tables.records[first + lane()] : K::no_record();
  }
  // Its strips are known to lane 0 alone.
  __device__ Work next() {
    ptx::mbarrier_wait(shared_address(&shared_.handed), tile_phase_);
    tile_phase_ ^= 1;
    __syncwarp();  // none still waits for a phase that could pass once lane 0 has answered
    Work work;
    if (lane() == 0) {  // one lane reads and says so
      work.tile = ptx::ld_shared_16(shared_address(&shared_.tile));
      work.strips = ptx::ld_shared_16(shared_address(&shared_.tile_strips));
      ptx::mbarrier_arrive(shared_address(&shared_.taken));
    }
    work.tile.x = __shfl_sync(~0u, work.tile.x, 0);
    work.tile.y = __shfl_sync(~0u, work.tile.y, 0);
    work.tile.z = __shfl_sync(~0u, work.tile.z, 0);
    return work;
  }
  // A record goes out when the one behind it is known; the very first has no data. Stages come back out of order: at
  // once from warps that skip a record, late from those that multiply. So this feeder could be a ring ahead of another
  // that still waits for this stage, and take, by its parity, an older phase of `empty` for that one's: it waits for
  // the stage's last data first.
  __device__ void send(const Record& record, const Work& work, Flag flag) {
    if (turn_ == id_ && lane() == 0) {
      const uint32_t full = shared_address(&shared_.full[stage_]);
      int4 note = K::note(record);
      note.w = flag;
      ptx::mbarrier_wait(full, phase_ ^ 1);
      ptx::mbarrier_wait(shared_address(&shared_.empty[stage_]), phase_ ^ 1);
      // Copies are started first, and announced behind the note.
      uint32_t bytes = 0;
      if (held_.chunk >= 0) bytes = K::load(p_, maps_, held_, held_tokens_, ring_ + stage_ * K::kStageBytes, full);
      ptx::st_shared_16(shared_address(&shared_.notes[stage_]), note);
      ptx::st_shared_16(shared_address(&shared_.strips[stage_]), held_strips_);
      shared_.tokens[stage_] = held_tokens_;
      ptx::mbarrier_arrive_expect(full, bytes);
    }
    __syncwarp();
    if (++turn_ == kFeeders) turn_ = 0;
    held_ = record, held_tokens_ = work.tile.x, held_strips_ = work.strips;
    if (++stage_ == K::kStages) stage_ = 0, phase_ ^= 1;
  }

  Shared& shared_;
  const Args& p_;
  const typename K::Maps& maps_;
  uint32_t ring_;
  int id_;
  int stage_ = 0, turn_ = 0;
  uint32_t tile_phase_ = 0, phase_ = 0;
  Record held_{-1, 0, 0, 0};
  int held_tokens_ = 0;
  int4 held_strips_{0, 0, 0, 0};
};

// What a warpgroup knows of the ring. Stages are given back one record late, when wgmma has read them.
// All lanes read the notes, and one answers for its warp behind a __syncwarp, of which nothing is left in the code: so
// racecheck reports the notes. With reads by that lane alone it is silent, but ptxas then takes addresses for different
// from lane to lane: 171 instead of 148 us (b = 16, density .25).
template <class K>
class Consumer {
 public:
  __device__ Consumer(Shared& shared, uint32_t ring, int group)
      : shared_(shared), ring_(ring), group_(group), arrives_(threadIdx.x % 32 == 0) {}

  // Past the record without data.
  __device__ void begin() {
    wait();
    __syncwarp();
    if (arrives_) ptx::mbarrier_arrive(empty());
    advance();
  }
  __device__ bool goes_on() const { return flag_ != kExit; }
  __device__ uint32_t mask() const { return mask_; }      // of this warpgroup's patches in the record
  __device__ uint32_t before() const { return before_; }  // patches of the record in front of them

  // All records of a tile, multiply(stage address) for those in which the warpgroup has a patch. Returns the
  // warpgroup's strip of outputs, and the tile of tokens.
  template <class Multiply>
  __device__ int2 tile(Multiply multiply) {
    while (true) {
      wait();
      const bool ends = flag_ == kEndsTile;
      int2 tile{0, 0};
      if (ends) tile = {reinterpret_cast<const int32_t*>(&shared_.strips[stage_])[group_], shared_.tokens[stage_]};
      if (mask_ != 0) {
        idle_ = 0;
        multiply(ring_ + static_cast<uint32_t>(stage_) * K::kStageBytes);
        ptx::wgmma_wait<1>();
        release_previous();
        previous_ = arrives_ ? empty() : 0;
      } else {  // each warp for itself; what an earlier record still reads must not be held for long
        if (++idle_ == 2) finish_previous();
        __syncwarp();
        if (arrives_) ptx::mbarrier_arrive(empty());
      }
      advance();
      if (!ends) continue;
      finish_previous();
      idle_ = 0;
      return tile;
    }
  }

 private:
  __device__ uint32_t empty() const { return shared_address(&shared_.empty[stage_]); }
  __device__ void wait() {
    ptx::mbarrier_wait(shared_address(&shared_.full[stage_]), phase_);
    note_ = ptx::ld_shared_16(shared_address(&shared_.notes[stage_]));
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
  // Conditions of wgmma come straight out of a shuffle: ptxas then knows that they are the same in all lanes.
  __device__ void advance() {
    if (++stage_ == K::kStages) stage_ = 0, phase_ ^= 1;
    mask_ = __shfl_sync(~0u, K::mask_of(note_, group_), 0);
    before_ = __shfl_sync(~0u, K::before_of(note_, group_), 0);
    flag_ = __shfl_sync(~0u, note_.w, 0);
  }

  Shared& shared_;
  uint32_t ring_;
  int group_;
  bool arrives_;
  int stage_ = 0, idle_ = 0, flag_ = kGoesOn;
  uint32_t phase_ = 0, previous_ = 0, mask_ = 0, before_ = 0;
  int4 note_{0, 0, 0, 0};
};

}  // namespace
}  // namespace blocksparse::gemm::wgmma
