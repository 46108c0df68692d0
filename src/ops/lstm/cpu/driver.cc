// Runs the steps on the CPU. A step is one parallel region, whose tasks are blocks of units times groups of tokens. A
// task multiplies the rows of W that make its units: all four gates, which read one set of tiles of h. It does the
// cell's arithmetic while the sums are in the cache, and packs its results for the next step's products.
#include <algorithm>
#include <array>

#include "core/ceil_div.h"
#include "core/text.h"
#include "cpu/threads.h"
#include "gemm/cpu/kernels.h"
#include "gemm/product.h"
#include "ops/lstm/cell.h"
#include "ops/lstm/lstm.h"

namespace blocksparse::lstm {

namespace {

constexpr int64_t kMaxBlock = 128;
constexpr int64_t kGroupBytes = 256;  // of tokens in the type of sums: a group, as product kernels divide tokens
constexpr int64_t kMostLanes = 16;
constexpr int64_t kAlignment = 64;
constexpr int64_t kCellFlops = 100;  // a gate costs as much as so many operations of a product

const char* advance(const void* data, int64_t elements, DType dtype) {
  return data == nullptr ? nullptr : static_cast<const char*>(data) + elements * size_of(dtype);
}
char* advance(void* data, int64_t elements, DType dtype) {
  return data == nullptr ? nullptr : static_cast<char*>(data) + elements * size_of(dtype);
}

// The parts of the workspace, in bytes from its first multiple of 64.
struct Plan {
  int64_t panel = 0;  // two of them
  int64_t state, pieces, total;

  // `inputs` features are packed, for products of `rows` rows of blocks.
  Plan(DType dtype, int64_t n, int64_t hidden, int64_t inputs, int64_t rows) {
    const int64_t sum = size_of(sum_dtype(dtype));
    const int64_t panel_bytes = n <= gemm::kUnpackedTokens ? 0 : round_up(n, kMostLanes) * inputs * sum;
    state = panel = 2 * round_up(panel_bytes, kAlignment);
    pieces = state + round_up(n * hidden * sum, kAlignment);
    total = pieces + round_up(rows * static_cast<int64_t>(sizeof(Piece)), kAlignment) + kAlignment;
  }
};

char* aligned(Workspace workspace) {
  return reinterpret_cast<char*>(round_up(reinterpret_cast<int64_t>(workspace.data), kAlignment));
}

// The products of a step, and the packing for the next step.
class Products {
 public:
  // A block of units needs the sums of four rows of blocks; by_in it needs those of one column.
  Products(const Sequence& s, const gemm::ProductKernel& kernel, bool by_in, char* memory, const Plan& plan)
      : kernel_(kernel), n_(s.n), gates_(by_in ? 1 : kGates), dtype_(s.dtype) {
    const int64_t inputs = by_in ? kGates * s.hidden : s.hidden;
    few_ = s.n <= gemm::kUnpackedTokens;
    group_ = kGroupBytes / size_of(sum_dtype(s.dtype));
    panels_ = {memory, memory + plan.panel / 2};
    auto* pieces = reinterpret_cast<Piece*>(memory + plan.pieces);
    const Header& header = header_of(s.layout);
    const IndexSections at = index_sections(header.out_blocks, header.in_blocks, s.layout.blocks);
    const int32_t* starts = s.layout.index + (by_in ? at.by_in.starts : at.by_out.starts);
    units_ = s.hidden / s.layout.block_size;
    for (int64_t i = 0; i < units_ * gates_; ++i) {  // the gates of a block of units follow each other
      const auto row = static_cast<int32_t>(i % gates_ * units_ + i / gates_);
      pieces[i] = {.to = row, .first = starts[row], .last = starts[row + 1], .slot = static_cast<int32_t>(i % gates_)};
    }
    args_ = {.block = s.layout.block_size,
             .by_in = by_in,
             .inputs = inputs,
             .outputs = gates_ * s.hidden,
             .x_token = inputs,
             .x_feature = 1,
             .w = s.w,
             .pieces = pieces,
             .piece_count = units_ * gates_,
             .refs = walk_of(s.layout, by_in).refs.data()};
  }

  // The next products multiply the first `tokens` rows of x [n, inputs].
  void set_input(const void* x, int64_t tokens) {
    args_.x = x;
    tokens_ = tokens;
  }
  // Packs all of x. Otherwise the tasks of the step that makes x pack it, with pack().
  void pack_all(int32_t threads) {
    if (few_) return;
    parallel_for(threads, ceil_div(tokens_, group_),
                 [&](int64_t i) { pack(panels_[0], args_.x, tokens_, i * group_, 0, args_.inputs); });
  }

  // Calls body(task) for each block of units and group of tokens, behind the products of the task. The body writes
  // `made` [n, columns], of which the next step reads the first `tokens` rows. `made` is null if there is nothing to
  // read.
  template <class Body>
  void run(int32_t threads, const void* made, int64_t columns, int64_t tokens, Body&& body) {
    const int64_t groups = ceil_div(n_, group_), parts = columns / (units_ * args_.block);
    parallel_for(threads, units_ * groups, [&](int64_t i) {
      alignas(64) char sums[kGates * kGroupBytes * kMaxBlock];
      const int64_t block = i % units_, first = i / units_ * group_;
      CellTask task{.unit = block * args_.block,
                    .first = first,
                    .last = std::min(first + group_, n_),
                    .summed = std::clamp<int64_t>(tokens_ - first, 0, group_),
                    .by_token = few_ || kernel_.by_token,
                    .sums = sums};
      task.gate = (few_ ? task.summed : round_up(task.summed, kernel_.lanes)) * args_.block;
      if (task.summed > 0) multiply(block, first, task.summed, sums);
      body(task);
      if (made == nullptr || few_) return;
      for (int64_t part = 0; part < parts; ++part) {
        const int64_t feature = (part * units_ + block) * args_.block;
        pack(panels_[1], made, tokens, first, feature, feature + args_.block);
      }
    });
    std::swap(panels_[0], panels_[1]);
    set_input(made, tokens);
  }

 private:
  // Sums all gates, for the tokens of a group that have an input.
  void multiply(int64_t block, int64_t first, int64_t tokens, char* sums) const {
    gemm::ProductArgs a = args_;
    a.n = tokens;
    a.partial = sums;
    a.panels = panel_of(panels_[0], first);
    const gemm::Range pieces{block * gates_, (block + 1) * gates_};
    if (few_) {
      for (int64_t piece = pieces.first; piece < pieces.last; ++piece) kernel_.few(a, piece);
    } else {
      kernel_.multiply(a, pieces, {0, ceil_div(tokens, kernel_.lanes)});
    }
  }

  // Packs features of a group's tokens, if these are among the first `tokens`.
  void pack(char* panels, const void* x, int64_t tokens, int64_t first, int64_t first_feature,
            int64_t last_feature) const {
    gemm::ProductArgs a = args_;
    a.x = advance(x, first * a.x_token, dtype_);
    a.n = std::min(group_, tokens - first);
    a.panels = panel_of(panels, first);
    for (int64_t vector = 0; vector * kernel_.lanes < a.n; ++vector) {
      kernel_.pack(a, vector, first_feature, last_feature);
    }
  }

  // Each group has a panel of its own, and a kernel orders the vectors in it as it likes.
  char* panel_of(char* panels, int64_t first) const {
    return panels + first * args_.inputs * size_of(sum_dtype(dtype_));
  }

  const gemm::ProductKernel& kernel_;
  gemm::ProductArgs args_;
  int64_t n_, gates_;
  DType dtype_;
  bool few_;
  int64_t group_, units_;
  int64_t tokens_ = 0;
  std::array<char*, 2> panels_;  // read, written
};

struct Kernels {
  const gemm::ProductKernel* product;
  const CellKernel* cell;
};

Result<Kernels> kernels_for(Isa isa, DType dtype) {
  const Kernels k{gemm::find_product_kernel(isa, dtype), find_cell_kernel(isa, dtype)};
  if (k.product != nullptr && k.cell != nullptr) return k;
  return no_kernel("lstm", isa, dtype);
}

int32_t threads_of_step(const Sequence& s, int32_t threads) {
  const double area = static_cast<double>(s.layout.blocks) * s.layout.block_size * s.layout.block_size;
  return worthwhile_threads(
      threads, static_cast<double>(s.n) * (2 * area + static_cast<double>(kCellFlops * kGates * s.hidden)));
}

// Copies the state of sequences that have no step.
void copy_of_empty(const Sequence& s, const void* from, void* to, DType dtype) {
  if (s.steps > 0 && s.lengths == nullptr) return;
  cpu_copy({.n = s.n, .hidden = s.hidden, .lengths = s.steps > 0 ? s.lengths : nullptr, .from = from, .to = to}, dtype);
}

// dW is one product over all steps, of h before each step and dpre.
Status weight_gradient(const Backward& b, Isa isa, Workspace workspace, int32_t threads) {
  const int64_t four = kGates * b.hidden, later = std::max<int64_t>(b.steps - 1, 0) * b.n;
  const GradPair first{ConstTensor(b.h0, b.dtype, {b.n, b.hidden}), ConstTensor(b.dpre, b.dtype, {b.n, four})};
  const GradPair rest{ConstTensor(b.y, b.dtype, {later, b.hidden}),
                      ConstTensor(advance(b.dpre, b.n * four, b.dtype), b.dtype, {later, four})};
  std::array<GradPair, 2> pairs{rest, first};
  const bool starts = b.h0 != nullptr && b.steps > 0;
  return gemm::cpu_weight_gradient({.dtype = b.dtype,
                                    .dw_dtype = b.dw_dtype,
                                    .layout = b.layout,
                                    .pairs = std::span<const GradPair>(pairs.data(), starts ? 2 : 1),
                                    .w = b.w,
                                    .dw = b.dw,
                                    .accumulate = b.accumulate},
                                   isa, workspace, threads);
}

Status initial_state_gradient(const Backward& b, Isa isa, Workspace workspace, int32_t threads) {
  const int64_t four = kGates * b.hidden;
  if (b.dh0 != nullptr && b.steps > 0) {
    BS_RETURN_IF_ERROR(gemm::cpu_product({.dtype = b.dtype,
                                          .layout = b.layout,
                                          .by_in = true,
                                          .x = {b.dpre, b.n, four, four, 1},
                                          .y = {b.dh0, b.n, b.hidden, b.hidden, 1},
                                          .residual = {},
                                          .w = b.w},
                                         isa, workspace, threads));
  }
  copy_of_empty(b, b.dh, b.dh0, b.dtype);
  copy_of_empty(b, b.dc, b.dc0, sum_dtype(b.dtype));
  return {};
}

}  // namespace

int64_t Sequence::running(int64_t t) const {
  if (lengths == nullptr) return t < steps ? n : 0;
  int64_t count = n;
  while (count > 0 && lengths[count - 1] <= t) --count;
  return count;
}

Status cpu_forward(const Forward& f, Isa isa, Workspace workspace, int32_t threads) {
  if (isa == Isa::reference) {
    reference_forward(f);
    return {};
  }
  const auto kernels = kernels_for(isa, f.dtype);
  if (!kernels.ok()) return kernels.status();
  const DType state = sum_dtype(f.dtype);
  const Plan plan(f.dtype, f.n, f.hidden, f.hidden, kGates * f.hidden / f.layout.block_size);
  char* memory = aligned(workspace);
  threads = threads_of_step(f, threads);
  Products products(f, *kernels->product, false, memory, plan);
  if (f.h0 != nullptr) {
    products.set_input(f.h0, f.running(0));
    products.pack_all(threads);
  }
  const int64_t matrix = f.n * f.hidden;
  const void* before = f.c0;
  for (int64_t t = 0; t < f.steps; ++t) {
    ForwardStep step;
    step.block = f.layout.block_size;
    step.hidden = f.hidden;
    step.t = t;
    step.steps = f.steps;
    step.lengths = f.lengths;
    step.pre = advance(f.pre, t * kGates * matrix, f.dtype);
    step.c_before = before;
    step.c = f.cells != nullptr ? advance(f.cells, t * matrix, state) : memory + plan.state;
    step.y = advance(f.y, t * matrix, f.dtype);
    step.gates = advance(f.gates, t * kGates * matrix, f.dtype);
    step.h_end = f.h;
    step.c_end = f.c;
    products.run(threads, step.y, f.hidden, f.running(t + 1),
                 [&](const CellTask& task) { kernels->cell->forward(step, task); });
    before = step.c;
  }
  copy_of_empty(f, f.h0, f.h, f.dtype);
  copy_of_empty(f, f.c0, f.c, state);
  return {};
}

Status cpu_backward(const Backward& b, Isa isa, Workspace workspace, int32_t threads) {
  if (isa == Isa::reference) {
    reference_backward(b);
    return {};
  }
  const auto kernels = kernels_for(isa, b.dtype);
  if (!kernels.ok()) return kernels.status();
  const DType state = sum_dtype(b.dtype);
  const Plan plan(b.dtype, b.n, b.hidden, kGates * b.hidden, b.hidden / b.layout.block_size);
  char* memory = aligned(workspace);
  Products products(b, *kernels->product, true, memory, plan);
  const int64_t matrix = b.n * b.hidden;
  for (int64_t t = b.steps; t-- > 0;) {
    BackwardStep step;
    step.block = b.layout.block_size;
    step.hidden = b.hidden;
    step.t = t;
    step.steps = b.steps;
    step.lengths = b.lengths;
    step.gates = advance(b.gates, t * kGates * matrix, b.dtype);
    step.c = advance(b.cells, t * matrix, state);
    step.c_before = t > 0 ? advance(b.cells, (t - 1) * matrix, state) : static_cast<const char*>(b.c0);
    step.dy = advance(b.dy, t * matrix, b.dtype);
    step.dh_end = b.dh;
    step.dc_end = b.dc;
    step.dc = b.dc0 != nullptr ? b.dc0 : memory + plan.state;
    step.dpre = advance(b.dpre, t * kGates * matrix, b.dtype);
    products.run(threads_of_step(b, threads), step.dpre, kGates * b.hidden, b.running(t),
                 [&](const CellTask& task) { kernels->cell->backward(step, task); });
  }
  BS_RETURN_IF_ERROR(initial_state_gradient(b, isa, workspace, threads));
  return b.dw == nullptr ? Status() : weight_gradient(b, isa, workspace, threads);
}

size_t cpu_forward_workspace_size(const LayoutView& layout, DType dtype, int64_t n) {
  const Plan plan(dtype, n, layout.in_features, layout.in_features, layout.out_features / layout.block_size);
  return static_cast<size_t>(plan.total);
}

size_t cpu_backward_workspace_size(const LayoutView& layout, DType dtype, int64_t steps, int64_t n) {
  const Plan plan(dtype, n, layout.in_features, layout.out_features, layout.in_features / layout.block_size);
  return std::max({static_cast<size_t>(plan.total), gemm::workspace_size(gemm::Pass::dgrad, layout, dtype, n, {}),
                   gemm::workspace_size(gemm::Pass::wgrad, layout, dtype, steps * n, {})});
}

}  // namespace blocksparse::lstm
