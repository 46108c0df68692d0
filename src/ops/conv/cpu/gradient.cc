// Drives the convolution's wgrad on the CPU in rounds. A round packs a box of some images, features last, and
// multiplies it by the linear op's kernels. A tap is x some tokens further on.
#include <algorithm>

#include "core/ceil_div.h"
#include "core/text.h"
#include "cpu/carver.h"
#include "cpu/threads.h"
#include "gemm/cpu/kernels.h"
#include "ops/conv/conv.h"
#include "ops/conv/cpu/panels.h"

namespace blocksparse::conv {

namespace {

using gemm::GradientArgs;
using gemm::GradientKernel;
using gemm::Range;
using gemm::TokenRun;

constexpr int64_t kGradientBytes = 64 << 10;  // of sums that one task makes: few enough to balance threads

// The kernel of the first instruction set whose products have taps: kernels of token pairs cannot begin at any token.
const GradientKernel* find_taps_kernel(Isa isa, DType dtype) {
  const gemm::ProductKernel* product = nullptr;
  for (; isa != Isa::reference; isa = next_below(isa)) {
    product = gemm::find_product_kernel(isa, dtype);
    if (product == nullptr || product->multiply_taps != nullptr) break;
  }
  return gemm::find_gradient_kernel(isa, dtype);
}

class GradientRun {
 public:
  GradientRun(const WeightGradient& g, const GradientPlan& plan, const GradientKernel& kernel, Workspace workspace,
              int32_t threads)
      : g_(g), plan_(plan), kernel_(kernel), threads_(threads) {
    if (g.rows.n == 0) return;  // then there may be no workspace
    Carver carver(workspace);
    const auto rounds = static_cast<size_t>(plan.at_once);
    gathered_ = static_cast<char*>(carver.take(rounds * plan.gathered_bytes));
    plain_ = static_cast<char*>(carver.take(rounds * plan.plain_bytes));
    runs_ = static_cast<TokenRun*>(carver.take(rounds * plan.run_bytes));
    shifts_ = static_cast<int64_t*>(carver.take(plan.shift_bytes));
    sums_ = carver.take(plan.sum_bytes);
    if (!plan.far) list_shifts();
  }

  void all() {
    const int64_t rounds = plan_.rounds(g_.rows.n);
    const bool narrow = g_.dw_dtype != sum_dtype(g_.dtype);
    keeps_sums_ = narrow && (rounds > 1 || plan_.plain_round > kStepTokens);
    const int64_t blocks = g_.layout.blocks, step = keeps_sums_ ? plan_.blocks : blocks;
    const int64_t at_once = threads_ == 1 ? 1 : plan_.at_once;
    for (int64_t first = 0; first < blocks; first += step) {
      const int64_t last = std::min(first + step, blocks);
      if (rounds == 0) multiply({0, 1}, first, last);
      for (int64_t round = 0; round < rounds; round += at_once) {
        const Range some{round, std::min(round + at_once, rounds)};
        pack(some);
        if (plan_.far) multiply_far(round, first, last);
        else multiply(some, first, last);
      }
    }
  }

 private:
  // A box of some images.
  struct Round {
    Index begin, size;
    int64_t image, images;
    int64_t slot;  // its place among the rounds that are packed together
  };

  Round round_at(int64_t round) const {
    const AxisPlan &z = plan_.axis[0], &y = plan_.axis[1], &x = plan_.axis[2];
    const int64_t batches = ceil_div(g_.rows.n, plan_.images), image = round % batches * plan_.images;
    const Index b = index_of(round / batches, y.boxes(), x.boxes());
    const Index begin = {b.z * z.box, b.y * y.box, b.x * x.box};
    const Index size = {std::min(z.box, z.places - begin.z), std::min(y.box, y.places - begin.y),
                        std::min(x.box, x.places - begin.x)};
    return {begin, size, image, std::min(plan_.images, g_.rows.n - image), threads_ == 1 ? 0 : round % plan_.at_once};
  }

  // Threads share a single round; of several rounds each thread packs whole ones.
  void pack(Range rounds) const {
    const int64_t count = rounds.last - rounds.first;
    const int32_t within = count == 1 ? threads_ : 1;
    parallel_for(count == 1 ? 1 : threads_, 2 * count, [&](int64_t task) {
      const Round r = round_at(rounds.first + task / 2);
      if (task % 2 == 0) {
        panels_of(r, false, within).plain(r.begin, r.size, r.image, r.images);
        if (!plan_.far) list_runs(r);
        return;
      }
      const Panels gathered = panels_of(r, true, within);
      const auto& size = g_.gathered().size;
      if (plan_.far) gathered.plain({}, {size[0], size[1], size[2]}, r.image, r.images);
      else gathered.gathered(plan_.axis, plan_.positions, r.begin, r.image, r.images);
    });
  }

  void list_shifts() {
    const AxisPlan &z = plan_.axis[0], &y = plan_.axis[1], &x = plan_.axis[2];
    for (int64_t tap = 0; tap < g_.gather.taps(); ++tap) {
      const Index t = index_of(tap, y.kernel, x.kernel);
      const int64_t phase = (t.z % z.phases * y.phases + t.y % y.phases) * x.phases + t.x % x.phases;
      shifts_[tap] = phase * plan_.positions + plan_.offset(z.shift_of(t.z, 0), y.shift_of(t.y, 0), x.shift_of(t.x, 0));
    }
  }

  void* gathered_at(const Round& r) const { return gathered_ + r.slot * static_cast<int64_t>(plan_.gathered_bytes); }
  void* plain_at(const Round& r) const { return plain_ + r.slot * static_cast<int64_t>(plan_.plain_bytes); }
  TokenRun* runs_at(const Round& r) const {
    return runs_ + r.slot * static_cast<int64_t>(plan_.run_bytes / sizeof(TokenRun));
  }

  Panels panels_of(const Round& r, bool gathered, int32_t threads) const {
    return {.from = gathered ? g_.gathered() : g_.plain(),
            .order = gathered == g_.gathers_rows ? g_.row_channels : g_.column_channels,
            .dtype = g_.dtype,
            .block = g_.layout.block_size,
            .data = gathered ? gathered_at(r) : plain_at(r),
            .round = gathered ? plan_.gathered_round : plan_.plain_round,
            .pack = kernel_.pack,
            .threads = threads};
  }

  // Lists the rows of pixels, in runs of at most kStepTokens.
  void list_runs(const Round& r) const {
    TokenRun* run = runs_at(r);
    for (int64_t row = 0; row < r.images * r.size.z * r.size.y; ++row) {
      const int64_t i = row / (r.size.z * r.size.y), z = row / r.size.y % r.size.z, y = row % r.size.y;
      for (int64_t x = 0; x < r.size.x; x += kStepTokens) {
        const int64_t gathered = i * plan_.phases * plan_.positions + plan_.offset(z, y, x);
        const int64_t plain = row * r.size.x + x, tokens = std::min(kStepTokens, r.size.x - x);
        *run++ = g_.gathers_rows ? TokenRun{plain, gathered, tokens} : TokenRun{gathered, plain, tokens};
      }
    }
  }
  static int64_t runs_of(const Round& r) { return r.images * r.size.z * r.size.y * ceil_div(r.size.x, kStepTokens); }

  // Lists the runs of pixels for which one tap lies within the image.
  void list_runs_of(int64_t tap, int64_t images, GradientArgs& a) const {
    const auto &in = g_.gathered().size, &out = g_.plain().size;
    const Index t = index_of(tap, g_.gather.kernel[1], g_.gather.kernel[2]);
    const int64_t shift = t.x * g_.gather.dilation[2] - g_.gather.padding[2];
    const int64_t begin = std::max<int64_t>(0, -shift), end = std::min(out[2], in[2] - shift);
    int64_t count = 0;
    for (int64_t row = 0; row < images * out[0] * out[1]; ++row) {
      const auto z = g_.gather.source(0, row / out[1] % out[0], t.z, in[0]);
      const auto y = g_.gather.source(1, row % out[1], t.y, in[1]);
      if (!z || !y) continue;
      const int64_t from = ((row / (out[0] * out[1]) * in[0] + *z) * in[1] + *y) * in[2] + shift;
      for (int64_t x = begin; x < end; x += kStepTokens) {
        const int64_t gathered = from + x, plain = row * out[2] + x, tokens = std::min(kStepTokens, end - x);
        runs_[count++] = g_.gathers_rows ? TokenRun{plain, gathered, tokens} : TokenRun{gathered, plain, tokens};
      }
    }
    a.taps.runs = runs_;
    a.taps.run_count = count;
  }

  // Calls body(args) for as many runs as stay in L1 together.
  template <class Body>
  void for_each_step(const GradientArgs& a, Body body) const {
    GradientArgs step = a;
    for (int64_t run = 0; run == 0 || run < a.taps.run_count;) {
      const int64_t first = run;
      for (int64_t tokens = 0; run < a.taps.run_count; ++run) {
        tokens += a.taps.runs[run].tokens;
        if (tokens > kStepTokens) break;
      }
      step.taps.runs = a.taps.runs == nullptr ? nullptr : a.taps.runs + first;
      step.taps.run_count = run - first;
      const bool later = first > 0, last = run >= a.taps.run_count;
      step.accumulate = a.accumulate || (later && a.sums == nullptr);
      step.accumulate_gates = a.accumulate_gates || later;
      step.add_sums = a.add_sums || later;
      step.keep_sums = a.keep_sums || (a.sums != nullptr && !last);
      body(step);
      if (last) break;
    }
  }

  GradientArgs args(int64_t round, int64_t first_sum) const {
    const bool any = g_.rows.n > 0, last = round + 1 >= plan_.rounds(g_.rows.n);
    const Round r = any ? round_at(round) : Round{};
    void *gathered = any ? gathered_at(r) : nullptr, *plain = any ? plain_at(r) : nullptr;
    GradientArgs a{.block = g_.layout.block_size,
                   .out_features = g_.rows.channels,
                   .in_features = g_.columns.channels,
                   .round = g_.gathers_rows ? plan_.plain_round : plan_.gathered_round,
                   .dy_round = g_.gathers_rows ? plan_.gathered_round : plan_.plain_round,
                   .x_panels = g_.gathers_rows ? plain : gathered,
                   .dy_panels = g_.gathers_rows ? gathered : plain,
                   .out_of = out_of(g_.layout).data(),
                   .refs = walk_of(g_.layout, false).refs.data(),
                   .w = g_.w,
                   .gates = g_.gates,
                   .dw = g_.dw,
                   .dw_is_wide = g_.dw_dtype == sum_dtype(g_.dtype),
                   .accumulate = g_.accumulate || (round > 0 && !keeps_sums_),
                   .dgates = g_.dgates,
                   .accumulate_gates = g_.accumulate || round > 0,
                   .sums = keeps_sums_ ? sums_ : nullptr,
                   .add_sums = round > 0,
                   .keep_sums = keeps_sums_ && !last};
    a.taps.taps = g_.gather.taps();
    a.taps.first_sum = first_sum;
    if (any && !plan_.far) {
      a.taps.runs = runs_at(r);
      a.taps.run_count = runs_of(r);
    }
    return a;
  }

  // Calls body(first block, last) for shares of the blocks, in parallel.
  template <class Body>
  void for_each_share(int64_t first, int64_t last, Body body) const {
    const int64_t b = g_.layout.block_size, bytes = g_.gather.taps() * b * b * size_of(sum_dtype(g_.dtype));
    const int64_t step = threads_ == 1 ? last - first : std::max<int64_t>(1, kGradientBytes / bytes);
    parallel_for(threads_, ceil_div(last - first, step), [&](int64_t task) {
      const int64_t begin = first + task * step;
      body(begin, std::min(begin + step, last));
    });
  }

  // A share goes through its rounds in turn, so that sums do not depend on the number of threads.
  void multiply(Range rounds, int64_t first, int64_t last) const {
    for_each_share(first, last, [&](int64_t begin, int64_t end) {
      for (int64_t round = rounds.first; round < rounds.last; ++round) {
        for_each_step(args(round, first), [&](GradientArgs& some) { multiply_step(some, begin, end); });
      }
    });
  }

  void multiply_far(int64_t round, int64_t first, int64_t last) const {
    GradientArgs a = args(round, first);
    const bool accumulate_gates = a.accumulate_gates;
    for (int64_t tap = 0; tap < a.taps.taps; ++tap) {
      a.taps.first = tap;
      a.taps.last = tap + 1;
      a.accumulate_gates = accumulate_gates || tap > 0;
      list_runs_of(tap, round_at(round).images, a);
      for_each_share(first, last, [&](int64_t begin, int64_t end) {
        for_each_step(a, [&](GradientArgs& some) { kernel_.multiply(some, begin, end); });
      });
    }
  }

  void multiply_step(GradientArgs& a, int64_t first, int64_t last) const {
    const bool some = a.taps.runs != nullptr;
    if (!g_.gathers_rows) {
      a.taps.last = a.taps.taps;
      a.taps.x_shift = some ? shifts_ : nullptr;
      kernel_.multiply(a, first, last);
      return;
    }
    // The taps gather dy here, so each tap is a product of its own.
    const bool accumulate_gates = a.accumulate_gates;
    for (int64_t tap = 0; tap < a.taps.taps; ++tap) {
      a.taps.first = tap;
      a.taps.last = tap + 1;
      a.taps.dy_shift = some ? shifts_[tap] : 0;
      a.accumulate_gates = accumulate_gates || tap > 0;
      kernel_.multiply(a, first, last);
    }
  }

  const WeightGradient& g_;
  const GradientPlan& plan_;
  const GradientKernel& kernel_;
  int32_t threads_;
  char *gathered_ = nullptr, *plain_ = nullptr;  // of plan_.at_once rounds
  TokenRun* runs_ = nullptr;                     // of plan_.at_once rounds too
  void* sums_ = nullptr;
  int64_t* shifts_ = nullptr;
  bool keeps_sums_ = false;
};

}  // namespace

Status cpu_weight_gradient(const WeightGradient& g, Isa isa, Workspace workspace, int32_t threads) {
  const GradientPlan plan = plan_gradient(g);
  if (isa == Isa::reference || !plan.fits) {
    reference_weight_gradient(g);
    return {};
  }
  const GradientKernel* kernel = find_taps_kernel(isa, g.dtype);
  if (kernel == nullptr) {
    return {StatusCode::unsupported, concat("[conv] there is no ", name_of(isa), " kernel for ", name_of(g.dtype))};
  }
  const double flops = 2.0 * static_cast<double>(g.rows.n * g.plain().pixels()) * static_cast<double>(g.layout.blocks) *
                       static_cast<double>(g.gather.taps() * g.layout.block_size * g.layout.block_size);
  GradientRun(g, plan, *kernel, workspace, worthwhile_threads(threads, flops)).all();
  return {};
}

size_t cpu_workspace_size(const WeightGradient& g) { return plan_gradient(g).workspace_bytes(); }

}  // namespace blocksparse::conv
