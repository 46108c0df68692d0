// A linear problem, given by a line of text. It makes the data, runs the op on any kernel and compares with the
// reference in f64. Tests, fuzzing and benchmarks share it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "blocksparse/ops.h"
#include "core/random.h"
#include "cuda/card.h"
#include "gemm/problem_data.h"
#include "gemm/product.h"

namespace blocksparse::linear {

using namespace gemm;  // NOLINT(google-build-using-namespace): a problem is a product and its data

// linear:<fprop|dgrad|wgrad> <dtype> <graph> and any of
//   n=64 b=32 seed=0 threads=1          tokens (of each pair), block size, seed of graph and data, threads
//   out=125 in=125                      ragged feature counts
//   empty_row=2 empty_col=0             blocks of that row or column are taken out
//   full_row=3 full_col=1               all blocks of that row or column are there
//   stack=4                             so many times the same blocks, one below the other
//   t                                   the layout's transposed view
//   x=first y=first r=first             features-first x, y (dx, dy), residual; the default is last
//   pad=3 rpad=5 offset=1               elements between rows (poisoned; rpad: of the residual), and before the first
//   w_offset=1                          elements before W
//   bias residual act=gelu              epilogue (fprop)
//   glu=61                              y = f(gate) * up of so many hidden features (glu.h; fprop)
//   gates                               a factor for each block, some of them 0
//   pairs=8 accumulate dw=f32 dgates    wgrad: how many (x, dy), add to dW, type of dW, make the gates' gradient
//   tf32                                f32 on a card may be computed in tf32
//   values=int                          small whole numbers: results must be exact. Default: normal
//   odd=4                               so many elements of x, and of dy in wgrad, are Inf, -Inf or NaN; W is NaN
//                                       behind gates of 0
//   device=cuda                         everything lies on the first CUDA card
struct LinearCase {
  Pass pass = Pass::fprop;
  DType dtype = DType::f32;
  std::string graph;
  int64_t n = 64, block = 32, seed = 0, threads = 1;
  int64_t out_features = 0, in_features = 0;
  int64_t empty_row = -1, empty_col = -1, full_row = -1, full_col = -1;
  int64_t stack = 1;
  bool transposed = false;
  Order x_order = Order::features_last, y_order = Order::features_last, residual_order = Order::features_last;
  int64_t pad = 0, residual_pad = -1, offset = 0, w_offset = 0;  // residual_pad -1: pad
  int64_t odd = 0;
  bool bias = false, residual = false, gates = false;
  Activation activation = Activation::none;
  int64_t hidden = 0;  // of a gated linear unit; 0: none
  int64_t pairs = 1;
  bool accumulate = false, dgates = false, integers = false, tf32 = false;
  std::optional<DType> dw_dtype;
  Device device;
};

Result<LinearCase> parse_linear_case(std::string_view line);
std::string to_string(const LinearCase& c);
Result<Layout> layout_of(const LinearCase& c);  // as the op is given it
// The family of CUDA kernels that does it on such a card, which need not be there.
std::string_view family_on(const cuda::Card& card, const LinearCase& c, const LayoutView& layout);

// Memory with poison around and between the rows of a matrix.
struct Buffer {
  Bytes bytes;
  Tensor tensor;
  std::shared_ptr<void> device;  // a copy of `bytes` on a card, if the problem lies there
  Buffer wide() const;           // the same values in f64, without padding
};

// Calls body(offset in elements) for a tensor of rank 1 to 3.
template <class Body>
void for_each_element(const Tensor& t, Body&& body) {
  const int64_t d0 = t.shape[0], d1 = t.rank > 1 ? t.shape[1] : 1, d2 = t.rank > 2 ? t.shape[2] : 1;
  for (int64_t i = 0; i < d0; ++i) {
    for (int64_t j = 0; j < d1; ++j) {
      for (int64_t k = 0; k < d2; ++k) body(i * t.stride[0] + j * t.stride[1] + k * t.stride[2]);
    }
  }
}

class LinearData {
 public:
  static Result<LinearData> make(const LinearCase& c);

  const LinearCase& spec() const { return case_; }
  const Layout& layout() const { return layout_; }

  // Poisons the outputs and runs the op through its public function, on the instruction set in use.
  Status run();
  void poison();
  // Runs without poisoning, and without restoring what wgrad accumulates into: for timing. `w` replaces the weights.
  Status run_again(const void* w);
  // On a card: the stream to queue on, and the copies that belong around run_again().
  void set_stream(void* stream) { stream_ = stream; }
  Status upload_outputs();
  Status download_outputs();
  // Makes other activations, and copies them to the card.
  Status refill(uint64_t seed);

  using Error = ResultError;
  // Compares with the reference, which runs on first use.
  Error compare();
  // Compares `count` elements of the output, chosen at random and computed one by one: for problems too large for
  // compare().
  Error spot_check(int64_t count);
  // Empty, or a message that names what was written outside of the outputs.
  std::string overrun() const;

  // What runs the problem: "avx2", or the name of a CUDA kernel.
  Result<std::string> kernel() const;
  // How a CPU's kernels are driven: see gemm/cpu/plan.h.
  std::string plan() const;

  double flops() const;  // of live blocks
  double bytes() const;  // unique bytes of operands
  // Operands of the first pair. fprop and dgrad read x() alone, which is dy for dgrad.
  const Tensor& x() const { return x_[0].tensor; }
  const Tensor& dy() const { return dy_[0].tensor; }
  const Tensor& weights() const { return w_.tensor; }
  // A tensor as the op finds it: on the card, if the problem lies there.
  Tensor placed(const Tensor& tensor) const;
  const void* weights_on_device() const { return placed(w_).data; }
  const Tensor& output() const { return y_.tensor; }
  // All bytes of the outputs, the gates' gradient with them.
  Bytes output_bits() const {
    Bytes bits = y_.bytes;
    bits.insert(bits.end(), dgates_.bytes.begin(), dgates_.bytes.end());
    return bits;
  }

  LinearData(LinearData&&) = default;
  LinearData(const LinearData&) = delete;

 private:
  LinearData(const LinearCase& c, Layout layout) : case_(c), layout_(std::move(layout)) {}
  void make_data();
  void make_odd(Random& rng);
  size_t workspace_size() const;
  Status move_to_device();
  Tensor placed(const Buffer& buffer) const;
  // How far results may be off, before they are rounded.
  struct Bounds {
    double output, gates;
  };
  Bounds bounds() const;
  void check(double got, double expected, double bound, DType dtype, int64_t at, Error& error) const;
  LayoutView plain_layout() const;
  Product host_product() const;
  std::vector<GradPair> host_pairs() const;
  WeightGradient host_gradient(const std::vector<GradPair>& pairs) const;
  void run_reference();

  LinearCase case_;
  Layout layout_;
  Buffer w_, gates_, bias_, residual_;
  std::vector<Buffer> x_, dy_;    // fprop and dgrad use x_[0] as input
  Buffer y_, dgates_;             // y, dx or dw
  Buffer before_, gates_before_;  // what wgrad adds to
  std::optional<Buffer> expected_, expected_gates_;
  double max_x_ = 0, max_w_ = 0, max_dy_ = 0, max_epilogue_ = 0;
  Bytes workspace_;  // and a guard behind it
  // On a card: what lies there besides the buffers, and the layout's view of it.
  std::shared_ptr<void> device_index_, device_workspace_;
  LayoutView view_;
  void* stream_ = nullptr;
};

}  // namespace blocksparse::linear
