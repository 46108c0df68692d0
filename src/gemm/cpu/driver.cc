// Runs the CPU kernels as a plan says: rounds of tokens, each packed and multiplied by all threads.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/ceil_div.h"
#include "core/text.h"
#include "cpu/carver.h"
#include "cpu/threads.h"
#include "gemm/cpu/kernels.h"
#include "gemm/cpu/plan.h"
#include "gemm/product.h"
#include "gemm/reference.h"

namespace blocksparse::gemm {

namespace {

constexpr int64_t kTaskFeatures = 512;       // features of a vector of tokens that one task packs or finishes
constexpr int64_t kSideBySideFeatures = 64;  // features that are packed at a time for all vectors of a group
constexpr int64_t kRunsPerThread = 16;       // runs of pieces to hand out

const void* advance(const void* data, int64_t elements, DType dtype) {
  return data == nullptr ? nullptr : static_cast<const char*>(data) + elements * size_of(dtype);
}
void* advance(void* data, int64_t elements, DType dtype) {
  return static_cast<char*>(data) + elements * size_of(dtype);
}

Status missing_kernel(Isa isa, DType dtype) {
  return {StatusCode::unsupported, concat("[linear] there is no ", name_of(isa), " kernel for ", name_of(dtype))};
}

// The arguments of the round of tokens that begins at `token`.
ProductArgs args_of_round(const Product& p, const ProductArgs& whole, int64_t token, int64_t tokens) {
  ProductArgs a = whole;
  a.n = tokens;
  a.x = advance(p.x.data, token * p.x.token_stride, p.dtype);
  a.y = advance(const_cast<void*>(p.y.data), token * p.y.token_stride, p.dtype);
  a.residual = advance(p.residual.data, token * p.residual.token_stride, p.dtype);
  return a;
}

// One round of a product.
class Round {
 public:
  Round(const ProductKernel& kernel, const ProductArgs& a, const RowWalk& walk, int32_t threads)
      : kernel_(kernel),
        a_(a),
        pieces_(static_cast<int64_t>(walk.pieces.size())),
        splits_(static_cast<int64_t>(walk.splits.size())),
        threads_(threads),
        vectors_(ceil_div(a.n, kernel.lanes)) {}

  // Each thread does whole groups of tokens: what it packs, sums and writes stays in its own cache.
  void by_group(int64_t group) const {
    const int64_t group_vectors = group / kernel_.lanes;
    parallel_for(threads_, ceil_div(vectors_, group_vectors), [&](int64_t task) {
      const int64_t first = task * group_vectors;
      const Range vectors{first, std::min(first + group_vectors, vectors_)};
      const int64_t features = kernel_.side_by_side ? kSideBySideFeatures : a_.inputs;
      for (int64_t f = 0; f < a_.inputs; f += features) pack(vectors, f, features);
      kernel_.multiply(a_, {0, pieces_}, vectors);
      kernel_.combine(a_, {0, splits_}, vectors);
      if (a_.staged == nullptr) return;
      for (int64_t v = vectors.first; v < vectors.last; ++v) kernel_.finish_staged(a_, v, 0, a_.outputs);
    });
  }

  // All threads share the pieces of each group.
  void by_piece(int64_t group) const {
    const int64_t group_vectors = group / kernel_.lanes;
    const int64_t features = kernel_.side_by_side ? kSideBySideFeatures : kTaskFeatures;
    const int64_t slices = ceil_div(a_.inputs, features), vectors = kernel_.side_by_side ? group_vectors : 1;
    parallel_for(threads_, ceil_div(vectors_ - first_packed(), vectors) * slices, [&](int64_t task) {
      const int64_t first = first_packed() + task / slices * vectors;
      pack({first, std::min(first + vectors, vectors_)}, task % slices * features, features);
    });
    const int64_t at_once = a_.staged == nullptr ? vectors_ : group_vectors;
    for (int64_t first = 0; first < vectors_; first += at_once) {
      const Range vectors{first, std::min(first + at_once, vectors_)};
      for_each(vectors, group_vectors, pieces_, kernel_.multiply);
      for_each(vectors, group_vectors, splits_, kernel_.combine);
      if (a_.staged != nullptr) finish_staged(vectors);
    }
  }

 private:
  void pack(Range vectors, int64_t first, int64_t features) const {
    for (int64_t v = std::max(vectors.first, first_packed()); v < vectors.last; ++v) {
      kernel_.pack(a_, v, first, std::min(first + features, a_.inputs));
    }
  }

  int64_t first_packed() const {
    return a_.along_outputs ? (a_.tokens_packed ? 0 : vectors_) : a_.direct ? a_.n / kernel_.lanes : 0;
  }

  // Token groups are outermost: their panels stay in the cache.
  void for_each(Range vectors, int64_t group_vectors, int64_t items,
                void (*run)(const ProductArgs&, Range items, Range vectors)) const {
    const int64_t groups = ceil_div(vectors.last - vectors.first, group_vectors);
    const int64_t length = ceil_div(items, threads_ * kRunsPerThread), runs = items == 0 ? 0 : ceil_div(items, length);
    parallel_for(threads_, runs * groups, [&](int64_t task) {
      const int64_t item = task % runs * length, vector = vectors.first + task / runs * group_vectors;
      run(a_, {item, std::min(item + length, items)}, {vector, std::min(vector + group_vectors, vectors.last)});
    });
  }

  void finish_staged(Range vectors) const {
    static_assert(kTaskFeatures % kStagedOutputs == 0);
    const int64_t slices = ceil_div(a_.outputs, kTaskFeatures);
    parallel_for(threads_, (vectors.last - vectors.first) * slices, [&](int64_t task) {
      const int64_t first = task % slices * kTaskFeatures;
      kernel_.finish_staged(a_, vectors.first + task / slices, first, std::min(first + kTaskFeatures, a_.outputs));
    });
  }

  const ProductKernel& kernel_;
  const ProductArgs& a_;
  int64_t pieces_, splits_;
  int32_t threads_;
  int64_t vectors_;
};

// The number of rows before `task` of `tasks`, such that each task has about as many blocks and rows.
int64_t rows_before(const RowWalk& walk, int64_t rows, int64_t task, int64_t tasks) {
  const auto work = [&](int64_t row) { return walk.starts[static_cast<size_t>(row)] + row; };
  int64_t low = 0, high = rows;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (work(middle) * tasks < work(rows) * task) low = middle + 1;
    else high = middle;
  }
  return low;
}

// One token: rows of W in the order of memory, except rows with slices. The hardware fetches a row while the one before
// it is used.
void run_rows_in_order(const ProductKernel& kernel, ProductArgs a, const RowWalk& walk, Range rows) {
  int32_t cut = INT32_MAX;  // rows with at least so many blocks have slices
  for (const Split& split : walk.splits) {
    const auto row = static_cast<size_t>(split.to);
    cut = std::min(cut, walk.starts[row + 1] - walk.starts[row]);
  }
  for (auto row = static_cast<int32_t>(rows.first); row < rows.last; ++row) {
    const auto at = static_cast<size_t>(row);
    const Piece piece{.to = row, .first = walk.starts[at], .last = walk.starts[at + 1], .slot = -1};
    if (piece.last - piece.first >= cut) continue;
    a.pieces = &piece;
    kernel.few(a, 0);
  }
}

void run_few(const ProductKernel& kernel, ProductArgs a, const RowWalk& walk, int32_t threads) {
  const auto splits = static_cast<int64_t>(walk.splits.size()), pieces = static_cast<int64_t>(walk.pieces.size());
  if (a.n > 1) {
    parallel_for(threads, pieces, [&](int64_t piece) { kernel.few(a, piece); });
  } else {
    a.refs_in_order = static_cast<int64_t>(walk.refs.size());
    parallel_for(threads, walk.slots, [&](int64_t piece) { kernel.few(a, piece); });  // slices come first
    const int64_t tasks = threads == 1 ? 1 : 4 * threads, rows = static_cast<int64_t>(walk.starts.size()) - 1;
    parallel_for(threads, tasks, [&](int64_t task) {
      run_rows_in_order(kernel, a, walk,
                        {rows_before(walk, rows, task, tasks), rows_before(walk, rows, task + 1, tasks)});
    });
  }
  parallel_for(threads, splits, [&](int64_t split) { kernel.combine_few(a, split); });
}

// A position in the sequence of all tokens of all pairs.
struct Position {
  size_t pair = 0;
  int64_t token = 0;
};

// Packs `tokens` tokens from `begin` on of one slice of features, from all pairs that they span.
template <class Side>
void pack_tokens(const GradientKernel& kernel, const WeightGradient& g, RowsToPack rows, Position begin, int64_t tokens,
                 int64_t slice, Side side) {
  const int64_t blocks = ceil_div(rows.features, rows.block), per_slice = kTaskFeatures / rows.block;
  const int64_t first = slice * per_slice, last = std::min(first + per_slice, blocks);
  for (rows.first_token = 0; rows.first_token < tokens; ++begin.pair, begin.token = 0) {
    const Activations source = side(g.term(begin.pair));
    rows.tokens = std::min(source.n - begin.token, tokens - rows.first_token);
    rows.source = advance(source.data, begin.token * source.token_stride, g.dtype);
    rows.token_stride = source.token_stride;
    rows.feature_stride = source.feature_stride;
    rows.last = rows.first_token + rows.tokens == tokens;
    if (rows.tokens > 0) kernel.pack(rows, first, last);
    rows.first_token += rows.tokens;
  }
}

Position advance(const WeightGradient& g, Position at, int64_t tokens) {
  at.token += tokens;
  while (at.pair < g.pairs.size() && at.token >= g.term(at.pair).x.n) at.token -= g.term(at.pair++).x.n;
  return at;
}

// What all rounds of a product share.
ProductArgs args_of(const Product& p, const RowWalk& walk, const CpuPlan& plan, int64_t lanes, Workspace workspace) {
  Carver carver(workspace);
  ProductArgs a{.block = p.layout.block_size,
                .by_in = p.by_in,
                .inputs = p.x.features,
                .outputs = p.outputs(),
                .x_token = p.x.token_stride,
                .x_feature = p.x.feature_stride,
                .asks_again = plan.asks_again,
                .large_unasked = plan.large_unasked,
                .along_outputs = plan.form == ProductForm::along_outputs,
                .tokens_packed = plan.form == ProductForm::along_outputs && plan.packed,
                .direct = plan.form == ProductForm::tokens_as_vectors && !plan.packed,
                .panels = carver.take(plan.panel_bytes),
                .panel_vectors = plan.panel_tokens / lanes,
                .w = p.w,
                .gates = p.gates,
                .y_token = p.y.token_stride,
                .y_feature = p.y.feature_stride,
                .residual_token = p.residual.token_stride,
                .residual_feature = p.residual.feature_stride,
                .bias = p.bias,
                .activation = p.activation,
                .hidden = p.glu ? p.y.features : 0,
                .pieces = walk.pieces.data(),
                .piece_count = static_cast<int64_t>(walk.pieces.size()),
                .refs = walk.refs.data(),
                .splits = walk.splits.data(),
                .partial = carver.take(plan.partial_bytes)};
  if (plan.staged_tokens > 0) {
    a.staged = carver.take(plan.staged_bytes);
    a.staged_outputs = round_up(p.outputs(), kStagedOutputs);
  }
  return a;
}

void run_rounds(const ProductKernel& kernel, const Product& p, const ProductArgs& whole, const RowWalk& walk,
                const CpuPlan& plan) {
  for (int64_t token = 0; token < p.x.n; token += plan.round) {
    const int64_t tokens = std::min(plan.round, p.x.n - token);
    const RoundPlan& round_plan = tokens == plan.round ? plan.whole : plan.last;
    ProductArgs a = args_of_round(p, whole, token, tokens);
    a.group_vectors = round_plan.group / kernel.lanes;
    if (a.staged != nullptr) a.staged_vectors = round_plan.staged / kernel.lanes;
    const Round round(kernel, a, walk, plan.threads);
    if (round_plan.by_group) round.by_group(round_plan.group);
    else round.by_piece(round_plan.group);
  }
}

// wgrad by rounds of tokens that are packed, or read in place.
class GradientRun {
 public:
  GradientRun(const GradientKernel& kernel, const WeightGradient& g, const CpuGradientPlan& plan, int64_t n,
              Workspace workspace)
      : kernel_(kernel), g_(g), plan_(plan), n_(n) {
    Carver carver(workspace);
    const int64_t sum_bytes = size_of(sum_dtype(g.dtype)), in_features = round_up(g.layout.in_features, block());
    x_panels_ = static_cast<char*>(carver.take(plan.panel_bytes));
    dy_panels_ = x_panels_ + plan.round * in_features * sum_bytes;
    a_ = {.block = g.layout.block_size,
          .out_features = g.layout.out_features,
          .in_features = g.layout.in_features,
          .round = plan.round,
          .dy_round = plan.round,
          .x_panels = x_panels_,
          .dy_panels = dy_panels_,
          .out_of = out_of(g.layout).data(),
          .refs = walk_of(g.layout, false).refs.data(),
          .w = g.w,
          .gates = g.gates,
          .dw = g.dw,
          .dw_is_wide = g.dw_dtype == sum_dtype(g.dtype),
          .dgates = g.dgates,
          .sums = plan.sums_bytes > 0 ? carver.take(plan.sums_bytes) : nullptr};
  }

  void in_place() {
    const GradTerm term = g_.term(0);
    a_.direct = a_.dy_direct = true;
    a_.x_token = term.x.token_stride;
    a_.dy_token = term.dy.token_stride;
    a_.copies_dy = plan_.copies_dy;
    for (int64_t token = 0; token < n_; token += plan_.round) {
      a_.x_panels = advance(term.x.data, token * a_.x_token, g_.dtype);
      a_.dy_panels = advance(term.dy.data, token * a_.dy_token, g_.dtype);
      multiply(token);
    }
  }

  void packed() {
    const bool dy_in_place = plan_.form == GradientForm::dy_in_place;
    const Activations dy = dy_in_place ? g_.term(0).dy : Activations{};
    if (dy_in_place) {
      a_.dy_direct = true;
      a_.dy_token = dy.token_stride;
      a_.dy_feature = dy.feature_stride;
    }
    Position at = advance(g_, {}, 0);
    for (int64_t token = 0; token == 0 || token < n_; token += plan_.round) {
      if (dy_in_place) a_.dy_panels = advance(dy.data, token * a_.dy_token, g_.dtype);
      pack(at, std::min(plan_.round, n_ - token));
      multiply(token);
      if (n_ == 0) break;
      at = advance(g_, at, plan_.round);
    }
  }

 private:
  int64_t block() const { return g_.layout.block_size; }

  void pack(Position at, int64_t tokens) const {
    const int64_t in_slices = ceil_div(a_.in_features, kTaskFeatures);
    const int64_t out_slices = a_.dy_direct ? 0 : ceil_div(a_.out_features, kTaskFeatures);
    parallel_for(plan_.threads, tokens > 0 ? in_slices + out_slices : 0, [&](int64_t task) {
      const bool of_x = task < in_slices;
      const RowsToPack rows{.features = of_x ? a_.in_features : a_.out_features,
                            .block = a_.block,
                            .starts = walk_of(g_.layout, of_x).starts.data(),
                            .panels = of_x ? x_panels_ : dy_panels_,
                            .round = plan_.round};
      if (of_x) pack_tokens(kernel_, g_, rows, at, tokens, task, [](const GradTerm& t) { return t.x; });
      else pack_tokens(kernel_, g_, rows, at, tokens, task - in_slices, [](const GradTerm& t) { return t.dy; });
    });
  }

  // The round that begins at `token`.
  void multiply(int64_t token) {
    a_.n = std::min(plan_.round, n_ - token);
    a_.accumulate = g_.accumulate || (token > 0 && a_.sums == nullptr);
    a_.accumulate_gates = g_.accumulate || token > 0;
    a_.add_sums = token > 0;
    a_.keep_sums = a_.sums != nullptr && token + plan_.round < n_;
    const int64_t blocks = g_.layout.blocks, some = plan_.task_blocks;
    parallel_for(plan_.threads, ceil_div(blocks, some),
                 [&](int64_t task) { kernel_.multiply(a_, task * some, std::min((task + 1) * some, blocks)); });
  }

  const GradientKernel& kernel_;
  const WeightGradient& g_;
  const CpuGradientPlan& plan_;
  int64_t n_;
  char *x_panels_, *dy_panels_;
  GradientArgs a_;
};

}  // namespace

Status cpu_product(const Product& p, Isa isa, Workspace workspace, int32_t threads) {
  if (isa == Isa::reference) {
    reference_product(p);
    return {};
  }
  const ProductKernel* kernel = find_product_kernel(isa, p.dtype);
  if (kernel == nullptr) return missing_kernel(isa, p.dtype);
  const RowWalk walk = walk_of(p.layout, p.by_in);
  const CpuPlan plan = plan_product(problem_of(p, traits_of(*kernel), walk.slots, threads), this_cpu());
  const ProductArgs whole = args_of(p, walk, plan, kernel->lanes, workspace);
  if (plan.form == ProductForm::few_tokens) run_few(*kernel, args_of_round(p, whole, 0, p.x.n), walk, plan.threads);
  else run_rounds(*kernel, p, whole, walk, plan);
  return {};
}

Status cpu_weight_gradient(const WeightGradient& g, Isa isa, Workspace workspace, int32_t threads) {
  if (isa == Isa::reference) {
    reference_weight_gradient(g);
    return {};
  }
  const GradientKernel* kernel = find_gradient_kernel(isa, g.dtype);
  if (kernel == nullptr) return missing_kernel(isa, g.dtype);
  const CpuGradientProblem problem = problem_of(g, kernel->lanes, threads);
  const CpuGradientPlan plan = plan_gradient(problem, this_cpu());
  GradientRun run(*kernel, g, plan, problem.n, workspace);
  if (plan.form == GradientForm::in_place) run.in_place();
  else run.packed();
  return {};
}

}  // namespace blocksparse::gemm
