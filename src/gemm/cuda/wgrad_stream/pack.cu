#include "gemm/cuda/wgrad_stream/pack.h"

#include <algorithm>

#include "core/ceil_div.h"
#include "cuda/launch.h"
#include "cuda/number.h"
#include "cuda/ptx/griddepcontrol.h"
#include "cuda/ptx/load.h"
#include "cuda/ptx/movmatrix.h"

namespace blocksparse::gemm::wgrad_stream {
namespace {

constexpr int kPackThreads = 128;

__device__ int term_of(const Pack& p, int token) {
  int low = 0;
  for (int high = p.terms; high - low > 1;) {
    const int middle = (low + high) / 2;
    if (p.term[middle].first <= token) low = middle;
    else high = middle;
  }
  return low;
}

// Reads an element; outside of the operand it is 0.
template <class Bits>
__device__ Bits element(const Pack& p, const Term& of, int side, int64_t token, int64_t feature) {
  if (token < 0 || token >= of.n || feature >= p.features[side]) return 0;
  const auto* data = static_cast<const Bits*>(of.data[side]);
  return data[of.features_first[side] ? feature * of.stride[side] + token : token * of.stride[side] + feature];
}

template <int Words>
__device__ void load_words(uint32_t (&to)[Words], const uint16_t* from) {
  if constexpr (Words == 4) ptx::ld_16(to, from);
  else if constexpr (Words == 2) ptx::ld_8(to, from);
  else ptx::ld_4(to, from);
}

// The work of one warp: a patch of x or dy and a chunk of tokens.
template <class Bits, int U>
struct PackWork {
  static constexpr int kGroups = U / 8, kTokens = chunk_tokens(sizeof(Bits));
  const Pack& p;
  int side;
  int64_t first_feature;
  int first_token, term;
  int g = static_cast<int>(threadIdx.x) % 32 / 4, t = static_cast<int>(threadIdx.x) % 4;

  __device__ int64_t feature(int group) const { return first_feature + U / 4 * (g / 2) + 2 * group + g % 2; }
  __device__ const uint16_t* data(const Term& of) const { return static_cast<const uint16_t*>(of.data[side]); }
  __device__ uint32_t pair(const Term& low, const Term& high, int token, int64_t feature) const {
    return element<uint16_t>(p, low, side, token - low.first, feature) |
           static_cast<uint32_t>(element<uint16_t>(p, high, side, token + 1 - high.first, feature)) << 16;
  }

  // Reads rows of features that are whole and aligned.
  __device__ void read_rows(const Term& of, uint32_t (&words)[kGroups][4]) const {
    uint32_t row[4][kGroups] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = first_token - of.first + 8 * (g / 2) + 2 * i + g % 2;
      if (token < of.n) {
        load_words(row[i], data(of) + token * of.stride[side] + first_feature + U / 4 * t);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < kGroups; ++j) words[j][i] = ptx::movmatrix_trans(row[i][j]);
    }
  }
  // Reads rows of tokens.
  __device__ void read_columns(const Term& of, uint32_t (&words)[kGroups][4]) const {
    const int64_t token = first_token - of.first + 8 * t;
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
      if (token + 8 <= of.n && feature(j) < p.features[side]) {
        ptx::ld_16(words[j], data(of) + feature(j) * of.stride[side] + token);
        continue;
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        words[j][i] = pair(of, of, of.first + static_cast<int>(token) + 2 * i, feature(j));
      }
    }
  }
  // Reads one element after the other, in any order of memory and over the edges of terms.
  __device__ void read_elements(uint32_t (&words)[kGroups][4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = first_token + 8 * t + 2 * i;
      const Term &low = p.term[term_of(p, token)], &high = p.term[term_of(p, token + 1)];
#pragma unroll
      for (int j = 0; j < kGroups; ++j) words[j][i] = pair(low, high, token, feature(j));
    }
  }

  // Reads f32 of any terms, one element after the other. A patch's are 16 lines, which stay in L1.
  __device__ void read_wide(bool alone, uint32_t (&words)[kGroups][4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = first_token + 4 * t + i;
      const Term& of = p.term[alone ? term : term_of(p, token)];
#pragma unroll
      for (int j = 0; j < kGroups; ++j) {
        words[j][i] = rounded_to_tf32(__uint_as_float(element<uint32_t>(p, of, side, token - of.first, feature(j))));
      }
    }
  }

  __device__ void read(uint32_t (&words)[kGroups][4]) const {
    const Term& of = p.term[term];
    const bool alone = term + 1 == p.terms || p.term[term + 1].first >= first_token + kTokens;
    if constexpr (sizeof(Bits) == 4) read_wide(alone, words);
    else if (!alone || !of.vectors[side]) read_elements(words);
    else if (!of.features_first[side] && first_feature + U <= p.features[side]) read_rows(of, words);
    else if (of.features_first[side] && (first_token - of.first) % 8 == 0) read_columns(of, words);
    else read_elements(words);
  }
};

template <class Work>
__global__ void __launch_bounds__(kPackThreads) wgrad_stream_pack(const __grid_constant__ Pack p) {
  // The kernel in front is complete before the kernel behind begins: see stream_w/pack.cu.
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  constexpr int kGroups = Work::kGroups, kPatch = 8 * kGroups;
  const int64_t warp = (int64_t{blockIdx.x} * kPackThreads + threadIdx.x) / 32;
  const auto both = static_cast<int>(warp / p.chunks), chunk = static_cast<int>(warp % p.chunks);
  if (both >= p.patches[0] + p.patches[1]) return;
  const int side = both >= p.patches[0] ? 1 : 0, patch = both - (side == 1 ? p.patches[0] : 0);
  const int first_token = chunk * Work::kTokens;
  const Work work{p, side, int64_t{patch} * kPatch, first_token, term_of(p, first_token)};
  uint32_t words[kGroups][4];
  work.read(words);
  auto* to = static_cast<uint4*>(p.to[side]) + (int64_t{patch} * p.all_chunks + p.first_chunk + chunk) * kGroups * 32 +
             threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < kGroups; ++j) to[32 * j] = {words[j][0], words[j][1], words[j][2], words[j][3]};
}

template <class Body>
Status with_pack(int64_t element_size, int32_t patch, Body body) {
  const auto with = [&]<int U>() {
    return element_size == 4 ? body(wgrad_stream_pack<PackWork<uint32_t, U>>)
                             : body(wgrad_stream_pack<PackWork<uint16_t, U>>);
  };
  return patch == 8    ? with.template operator()<8>()
         : patch == 16 ? with.template operator()<16>()
                       : with.template operator()<32>();
}

}  // namespace

Status pack_operands(const Pack& p, int64_t element_size, int32_t patch, bool overlap, cudaStream_t stream) {
  const int64_t warps = (int64_t{p.patches[0]} + p.patches[1]) * p.chunks;
  return with_pack(element_size, patch, [&](auto kernel) {
    return cuda::launch(
        {.blocks = ceil_div(warps * 32, kPackThreads), .threads = kPackThreads, .stream = stream, .overlap = overlap},
        kernel, p);
  });
}

Status prepare_pack() {
  for (int32_t patch : {8, 16, 32}) {
    for (int64_t element_size : {2, 4}) {
      BS_RETURN_IF_ERROR(with_pack(element_size, patch, [](auto kernel) { return cuda::prepare(kernel, 0); }));
    }
  }
  return {};
}

}  // namespace blocksparse::gemm::wgrad_stream
