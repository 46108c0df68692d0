// A ring of stages in shared memory (sm_90). A producer fills the stages in turn, by copies in the background or by its
// own stores; consumers read them.
//
//   producer                                                  consumer
//     ring.wait_empty(place);                                   ring.wait_full(place);
//     ring.expect(place, bytes);                                ... reads at place.in(first, stage_bytes) ...
//     ptx::load_box(place.in(...), ..., ring.full(place));      ring.release(place);
//     place.advance(stages);                                    place.advance(stages);
//
// Each stage has two barriers.
//   full    complete when one thread has said how many bytes come (`expect`) and all of them have arrived
//   empty   complete when all consumers have given the stage back (`release`)
//
// Each thread keeps a place of its own: a stage, and the parity of the lap (0 in the first, 1 in the second, 0 in the
// third). A consumer waits for `full` of its lap. A producer waits for `empty` of the lap before, which has the other
// parity. A new barrier counts as complete with parity 1, so no producer waits in the first lap.
//
// A parity tells two laps apart, not three. A consumer is never a whole lap behind, because the producer waits for it.
// Several producing warps must keep within a lap of one another themselves. row_wgmma's fill the same stages in every
// lap, those of wgrad_wgmma a part of every stage, and those of wgmma wait for a stage's last data first.
#pragma once

#include <cstdint>

#include "cuda/ptx/copy.h"
#include "cuda/ptx/mbarrier.h"

namespace blocksparse::cuda {

// A place in a ring. The caller knows the number of stages, at compile time or not.
struct RingPlace {
  int stage = 0;
  uint32_t parity = 0;

  __device__ void advance(int stages) {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
  // Advances by `steps` at once.
  __device__ void skip(int steps, int stages) {
    parity ^= static_cast<uint32_t>((stage + steps) / stages) & 1;
    stage = (stage + steps) % stages;
  }
  // The address of this stage's data, if the stages begin at `first`.
  __device__ uint32_t in(uint32_t first, int stage_bytes) const {
    return first + static_cast<uint32_t>(stage * stage_bytes);
  }
};

// The barriers of at most `Most` stages. They lie in static shared memory: the compiler knows their addresses, so a
// place needs no pointer to them.
template <int Most>
class Ring {
 public:
  // Called by one thread. ptx::fence_mbarrier_init and a barrier of all threads must follow.
  __device__ void init(int stages, int consumers) {
    for (int s = 0; s < stages; ++s) {
      ptx::mbarrier_init(ptx::shared_address(&full_[s]), 1);
      ptx::mbarrier_init(ptx::shared_address(&empty_[s]), consumers);
    }
  }

  // Addresses of the barriers. Copies arrive at `full`. A consumer that gives a stage back later keeps the address of
  // `empty`.
  __device__ uint32_t full(const RingPlace& place) const { return ptx::shared_address(&full_[place.stage]); }
  __device__ uint32_t empty(const RingPlace& place) const { return ptx::shared_address(&empty_[place.stage]); }

  __device__ void wait_empty(const RingPlace& place) const { ptx::mbarrier_wait(empty(place), place.parity ^ 1); }
  __device__ void expect(const RingPlace& place, uint32_t bytes) const {
    ptx::mbarrier_arrive_expect(full(place), bytes);
  }
  // Replaces `expect` if no copies come: what the producer has stored is everything.
  __device__ void expect_nothing(const RingPlace& place) const { ptx::mbarrier_arrive(full(place)); }

  __device__ void wait_full(const RingPlace& place) const { ptx::mbarrier_wait(full(place), place.parity); }
  __device__ void release(const RingPlace& place) const { ptx::mbarrier_arrive(empty(place)); }
  // Called by all lanes of a warp that counts as one consumer.
  __device__ void release_warp(const RingPlace& place) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) release(place);
  }

 private:
  uint64_t full_[Most], empty_[Most];
};

}  // namespace blocksparse::cuda
