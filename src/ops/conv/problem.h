// A convolution, given by a line of text. It makes the data, runs the op where it lies and compares with the reference
// in f64. Tests, fuzzing and benchmarks share it.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "gemm/problem_data.h"
#include "ops/conv/conv.h"

namespace blocksparse::conv {

// conv:<fprop|dgrad|wgrad> <dtype> <graph> and any of
//   n=2 hw=8 dims=2                     images; their sizes; how many sizes they have. hw=4x8x9 are three
//   r=3 stride=1 dil=1 pad=1 after=1    of all axes, or 1x2x3 of each; pad and after keep the size unless given
//   transposed opad=0                   a transposed convolution; its output_padding
//   c=125 k=125                         ragged channels in, out
//   b=32 seed=0 threads=1               block size, seed of graph and data, threads
//   t                                   the layout's transposed view
//   first order                         contiguous (channels-first) activations; an order of the channels of x
//   bias residual act=gelu              epilogue (fprop)
//   gates                               a factor for each block, some of them 0
//   accumulate dw=f32 dgates            wgrad: add to dW, type of dW, make the gates' gradient
//   tf32                                f32 on a card may be computed in tf32
//   values=int                          small whole numbers: results must be exact. Default: normal
//   device=cuda                         everything lies on the first CUDA card
struct ConvCase {
  Pass pass = Pass::fprop;
  DType dtype = DType::f32;
  std::string graph;
  int64_t n = 2, block = 32, seed = 0, threads = 1;
  int64_t in_channels = 0, out_channels = 0;
  ConvGeometry geometry;
  SpatialSizes size = {8, 8, 8};
  bool transposed = false;  // the layout
  bool channels_last = true, order = false;
  bool bias = false, residual = false, gates = false;
  Activation activation = Activation::none;
  bool accumulate = false, dgates = false, integers = false, tf32 = false;
  std::optional<DType> dw_dtype;
  Device device;
};

Result<ConvCase> parse_conv_case(std::string_view line);
std::string to_string(const ConvCase& c);

// A dense tensor with poison around it.
struct Block {
  gemm::Bytes bytes;
  Tensor tensor;
  int64_t count = 0;
  std::shared_ptr<void> device;  // a copy of `bytes` on a card, if the problem lies there
};

class ConvData {
 public:
  static Result<ConvData> make(const ConvCase& c);

  const ConvCase& spec() const { return case_; }
  const Layout& layout() const { return layout_; }

  // Poisons the outputs and runs the op through its public function, on the instruction set in use.
  Status run();
  void poison();
  // Runs without poisoning, and without restoring what wgrad accumulates into: for timing. `w` replaces the weights.
  Status run_again(const void* w);
  void set_stream(void* stream) { stream_ = stream; }
  // Makes other inputs where the problem lies, which compare() then expects.
  Status change_inputs(uint64_t seed);
  Status set_order(std::vector<int32_t> order);  // with an entry for each channel; on a card any numbers
  Status silence(int64_t channel);               // makes it zero in x, or in dx for dgrad
  const std::vector<int32_t>& order() const { return order_; }
  Status upload_outputs();
  Status download_outputs();

  using Error = gemm::ResultError;
  // Compares with the reference, which runs on first use.
  Error compare();
  // Compares `count` elements of the output, chosen at random: for problems too large for compare().
  Error spot_check(int64_t count);
  // Empty, or a message that names what was written outside of the outputs.
  std::string overrun() const;

  // What runs the problem: "avx2", or the name of a CUDA way or kernel.
  Result<std::string> kernel() const;

  double flops() const;  // of live blocks
  double bytes() const;  // unique bytes of operands
  size_t workspace_bytes() const { return workspace_.size() - static_cast<size_t>(gemm::kGuard); }
  // x and dy of wgrad. fprop has x alone, dgrad dy alone.
  const Tensor& x() const { return x_.tensor; }
  const Tensor& dy() const { return dy_.tensor; }
  const Tensor& weights() const { return w_.tensor; }
  const Tensor& output() const { return y_.tensor; }
  // All bytes of the outputs, the gates' gradient with them.
  gemm::Bytes output_bits() const {
    gemm::Bytes bits = y_.bytes;
    bits.insert(bits.end(), dgates_.bytes.begin(), dgates_.bytes.end());
    return bits;
  }
  const LayoutView& view() const { return view_; }  // where the problem lies
  const void* weights_on_device() const { return placed(w_).data; }

  ConvData(ConvData&&) = default;
  ConvData(const ConvData&) = delete;

 private:
  ConvData(const ConvCase& c, Layout layout) : case_(c), layout_(std::move(layout)) {}
  Status make_data();
  void fill_inputs(uint64_t seed);
  Status upload_inputs();
  size_t workspace_size() const;
  Status move_to_device();
  Tensor placed(const Block& block) const;
  Convolution convolution() const;  // where the problem lies
  LayoutView plain_layout() const;
  Product host_product() const;
  WeightGradient host_gradient() const;
  void run_reference();
  double bound() const;
  double gate_bound() const;
  void check(double got, double expected, double bound, DType dtype, int64_t at, Error& error) const;

  ConvCase case_;
  Layout layout_;
  Block w_, gates_, bias_, residual_;
  Block x_, dy_;                 // fprop reads x_, dgrad dy_, wgrad both
  Block y_, dgates_;             // y, dx or dw
  Block before_, gates_before_;  // what wgrad adds to
  std::optional<Block> expected_, expected_gates_;
  std::vector<int32_t> order_;
  double max_w_ = 0, max_x_ = 0, max_dy_ = 0, max_epilogue_ = 0;
  gemm::Bytes workspace_;  // and a guard behind it
  std::shared_ptr<void> device_index_, device_workspace_, device_order_;
  LayoutView view_;
  void* stream_ = nullptr;
};

}  // namespace blocksparse::conv
