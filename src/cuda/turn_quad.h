// Transposes words among four neighbouring lanes.
#pragma once

namespace blocksparse::cuda {

// Lane t of each four receives word t of each of them, in the order of lanes.
template <class Word>
__device__ inline void turn_quad(Word (&words)[4]) {
#pragma unroll
  for (int step = 2; step > 0; step /= 2) {
    const bool upper = (threadIdx.x & static_cast<unsigned>(step)) != 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int low = step == 2 ? i : 2 * i, high = low + step;
      const Word got = __shfl_xor_sync(~0u, upper ? words[low] : words[high], step);
      if (upper) words[low] = got;
      else words[high] = got;
    }
  }
}

}  // namespace blocksparse::cuda
