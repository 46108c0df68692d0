#include "gemm/cuda/row_wgmma/plan.h"

#include <algorithm>

#include "core/schedule.h"
#include "core/tables.h"
#include "gemm/cuda/stream_x/plan.h"

namespace blocksparse::gemm::row_wgmma {

namespace {
// With more tokens there are enough jobs without slices, and the sums of slices would be large.
constexpr int64_t kMostTokensOfSlices = 1024;
}  // namespace

bool supports(const CudaProblem& p) {
  constexpr int64_t kMost = int64_t{1} << 31;
  return p.pass != Pass::wgrad && size_of(p.dtype) == 2 && p.block >= 32 && p.n >= 1 && p.inputs >= 1 && p.x_in_rows &&
         p.w_aligned && !p.gated && !p.x_first && !p.glu && p.blocks * p.block < kMost && p.outputs < kMost &&
         p.n < kMost - 256 && (p.output_blocks() + p.slots) * ceil_div(p.n, int64_t{64}) < kMost / 2;
}

int64_t least_tokens(const CudaProblem& p) { return p.block == 64 ? 48 : p.block == 128 ? 57 : 65; }

// Larger tiles read W less often. A tile size pays if it leaves a job and a half for every SM, or six if rows are
// uneven. 4096 x 4096, b = 32, 10 %, n = 1024, H100: 30.3 us with 64 tokens, 22.9 with 256. NOTES.md has the other
// sizes. With b = 128, tiles of 256 tokens do not fit. Dealt rows are even, and b = 32 has kernels for them from 128
// on.
int32_t tokens_of_tile(const CudaProblem& p, const cuda::Card& card) {
  const int64_t half_jobs = p.slots > 0 ? 12 : 3;  // of an SM: uneven rows need more jobs to even out
  const auto pays = [&](int64_t tokens) {
    return p.n > tokens / 2 && 2 * p.output_blocks() * ceil_div(p.n, tokens) >= half_jobs * card.multiprocessors;
  };
  if (p.block == 32 && pays(256)) return 256;
  if (p.block == 32 && is_dealt(p, 128, card)) return 128;
  return pays(128) ? 128 : 64;
}

// Whether slices are jobs of their own. A row has at most as many blocks as there are blocks of inputs. If that is not
// far above an SM's share of all blocks, adding slices takes longer than one late row: ba(288,3,blocks=2448), b = 64,
// 256 tokens, H200: 26.2 us, with whole rows 20.1.
bool adds_slices(const CudaProblem& p) {
  constexpr int64_t kMultiprocessors = 132, kMostOfMean = 4;
  const int64_t tiles = ceil_div(p.n, int64_t{64});
  return p.n <= kMostTokensOfSlices && p.input_blocks() * kMultiprocessors > kMostOfMean * p.blocks * tiles;
}

bool is_dealt(const CudaProblem& p, int64_t tokens, const cuda::Card& card) {
  constexpr int64_t kMostBytes = 64 << 20;  // of x: all tiles of a row are read at once
  const int64_t tiles = ceil_div(p.n, tokens);
  return p.slots > 0 && !adds_slices(p) && may_be_dealt(p.block, tokens) && tiles <= 8 &&
         card.multiprocessors == kScheduleSms && p.n * p.inputs * 2 <= kMostBytes &&
         schedule_shape(p.output_blocks(), static_cast<int32_t>(tiles)).waves > 0;
}

// All tiles of a dealt row run at once, so a launch reads all of its x again and again: as much of it as L2 holds is
// best. NOTES.md has the figures. Elsewhere several launches were not measured.
int64_t tokens_of_launch(const CudaProblem& p) {
  constexpr int64_t kMostBytes = 24 << 20;  // of x
  if (p.slots == 0 || p.block == 128 || p.output_blocks() < 256 || p.density() >= 0.05) return p.n;
  return p.block == 32 && 1024 * p.inputs * 2 > kMostBytes ? 512 : 1024;
}

// Whether x stays in L2 and is read for few blocks. Then reading it once for each block takes less time than the tables
// that wgmma makes first. b = 64, us by this kernel and by the best other family, H100, 2026-11-26:
//   256 x 256, 4 blocks, 4096 tokens      4.1, 7.3
//   256 x 256, 4 blocks, 12544 tokens     6.2, 8.4
//   1024 x 1024, 102 blocks, 4096 tokens  13.7, 14.8
//   512 x 512, 32 blocks, 12544 tokens    15.1, 16.3
bool reads_little(const CudaProblem& p) {
  constexpr int64_t kMostTokens = 16384, kMostBytes = 13 << 20, kMostRead = 52 << 20;
  return p.n <= kMostTokens && p.n * p.inputs * 2 <= kMostBytes && p.blocks * p.block * p.n * 2 <= kMostRead;
}

// Many rows of blocks of 32, from 15 % of the blocks on, where stream_x does the call. Elsewhere this kernel is next.
bool is_for_stream_x(const CudaProblem& p, const cuda::Card& card) {
  return p.n >= stream_x::least_tokens(p) && stream_x::supports(p) && stream_x::pays(p, card);
}

int64_t most_splits(const CudaProblem& p) { return std::min(p.slots / 2, kMaxSplits); }

// It pays where other families read more than a row's operands once. b = 64, 4096 x 4096, n = 256, 25 %: 8.3 us, the
// best other family 20.3. Families that share x among outputs win with many tokens and enough blocks of each input: b =
// 32, n = 1024, 25 %: 51.0 us, stream_x 32.9. NOTES.md has the table behind each threshold.
bool pays(const CudaProblem& p, const cuda::Card& card) {
  const double density = p.density();
  const int64_t rows = p.output_blocks();
  if (p.n < 65 && p.block == 128) return density >= 0.05 && density < (rows >= 64 ? 0.3 : 0.15);
  if (p.n < 65) return density >= 0.08 || (p.n > 56 && p.slots > 0);
  if (p.block == 32) {
    if (p.n < 96) return density < (rows >= 256 ? 0.6 : 0.05);
    if (p.n <= 256) return density < 0.6 && !is_for_stream_x(p, card);
    if (p.n <= 640) return density < (rows < 64 ? 0.3 : p.n <= 448 ? 0.08 : 0.15);
    return p.n <= 2048 && density < (rows <= 32 ? 0.3 : rows < 256 ? 0.12 : 0.08);
  }
  if (p.n <= 512) return true;
  if (p.n <= 1024) return density < 0.05 || p.outputs <= 6144;
  if (p.block == 64 && p.n >= 1536 && tokens_of_launch(p) < p.n) return true;
  constexpr int64_t kMostBytes = 20 << 20;  // of x, which every row of blocks reads
  if (p.n > 2048) return reads_little(p);
  return p.n * p.inputs * 2 <= kMostBytes && density < (p.n > 1536 && p.block == 64 ? 0.12 : 0.3);
}

bool takes_rows_inside(const CudaProblem& p) { return p.n * p.inputs * 2 > (p.slots > 0 ? 32 << 20 : 64 << 20); }

// The sums of slices.
int64_t workspace_bytes(const CudaProblem& p) {
  return supports(p) ? p.slots * std::min(p.n, kMostTokensOfSlices) * p.block * 4 : 0;
}

}  // namespace blocksparse::gemm::row_wgmma
