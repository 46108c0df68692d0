// How a product is done on the CPU: a pure function of the problem and the CPU, so it is tested for machines that are
// not at hand. The driver does what the plan says.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "blocksparse/dtype.h"
#include "cpu/isa.h"
#include "gemm/cpu/kernels.h"
#include "gemm/product.h"

namespace blocksparse::gemm {

// The number of tokens to pack at a time: as many as fit into the last-level cache, in whole groups, at most n.
int64_t round_tokens(int64_t n, int64_t bytes_per_token, int64_t group);

// What a plan needs to know of a kernel: see ProductKernel.
struct ProductTraits {
  int lanes = 1;
  bool by_token = false;
  bool side_by_side = false;
  bool stages = false;    // sums may wait for those of the other outputs
  int along_outputs = 0;  // the smallest block whose outputs may be the vectors; 0: none
};
ProductTraits traits_of(const ProductKernel& kernel);

// A call of fprop or dgrad.
struct CpuProblem {
  DType dtype = DType::f32;
  int32_t block = 32;
  bool by_in = false;  // W is read transposed
  int64_t n = 0;
  int64_t inputs = 0;   // features that the pass reads: in_features in fprop, out_features in dgrad
  int64_t outputs = 0;  // features that it makes
  int64_t blocks = 0;
  int64_t slots = 0;  // slices of split rows
  bool gated = false;
  int64_t x_feature = 1, y_feature = 1, y_token = 0;  // strides
  int32_t threads = 1;                                // at most
  ProductTraits kernel = {};

  int64_t weights() const { return blocks * block * block; }
};
CpuProblem problem_of(const Product& p, const ProductTraits& kernel, int64_t slots, int32_t threads);

enum class ProductForm : int8_t {
  few_tokens,         // few_tokens.h: vectors along features, x where it lies
  tokens_as_vectors,  // product.h: tokens as vectors
  along_outputs,      // outputs.h: outputs as vectors, x and y where they lie
  tiles               // amx/
};

// How threads share a round.
struct RoundPlan {
  int64_t group = 0;      // tokens of a task
  bool by_group = false;  // a thread does all pieces of a group, from packing to y; otherwise threads share its pieces
  int64_t staged = 0;     // tokens whose sums wait at a time, if they wait
};

struct CpuPlan {
  ProductForm form = ProductForm::tokens_as_vectors;
  bool packed = false;         // x is copied to panels; otherwise read in place, except an incomplete vector of tokens
  bool asks_again = false;     // W of the next block of 8 is asked for just before its use
  bool large_unasked = false;  // one token: W of blocks of 32 and more is left to the hardware
  int32_t threads = 1;
  int64_t round = 0;                // tokens that are packed and then multiplied
  RoundPlan whole = {}, last = {};  // the last round may have fewer tokens
  int64_t panel_tokens = 0;         // room of the panels
  int64_t staged_tokens = 0;        // tokens whose sums may wait for those of the other outputs; 0: none
  size_t panel_bytes = 0, partial_bytes = 0, staged_bytes = 0;

  size_t workspace_bytes() const;
};

CpuPlan plan_product(const CpuProblem& p, const Cpu& cpu);
// "along_outputs x=in_place threads=2 workspace=192 round=512 group=64 by_group"
std::string to_string(const CpuPlan& plan);

// Enough for any kernel and any order of x and y.
size_t cpu_workspace_bytes(const CpuProblem& p);

// A call of wgrad.
struct CpuGradientProblem {
  DType dtype = DType::f32, dw_dtype = DType::f32;
  int32_t block = 32;
  int64_t n = 0;  // tokens of all pairs
  int64_t inputs = 0, outputs = 0, blocks = 0;
  int64_t pairs = 1;
  int64_t x_feature = 1, dy_feature = 1, dy_token = 0;  // strides of the first pair
  int32_t threads = 1;                                  // at most
  int lanes = 1;                                        // of the kernel
};
CpuGradientProblem problem_of(const WeightGradient& g, int lanes, int32_t threads);

enum class GradientForm : int8_t {
  packed,
  dy_in_place,  // x is packed, features-first dy is read in place
  in_place      // features-last x and dy are read in place
};

struct CpuGradientPlan {
  GradientForm form = GradientForm::packed;
  bool copies_dy = false;  // of each row of blocks, if dy is read in place
  int32_t threads = 1;
  int64_t round = 0;        // tokens that are packed and summed at a time
  int64_t task_blocks = 0;  // blocks of a task
  size_t panel_bytes = 0;
  size_t sums_bytes = 0;  // sums of all blocks, if dW is narrower and there is more than one round

  size_t workspace_bytes() const;
};

CpuGradientPlan plan_gradient(const CpuGradientProblem& p, const Cpu& cpu);
std::string to_string(const CpuGradientPlan& plan);

size_t cpu_workspace_bytes(const CpuGradientProblem& p);

// The plan of a call on this CPU; "" if the reference does the call.
std::string cpu_choice(const Product& p, Isa isa, int32_t threads);
std::string cpu_choice(const WeightGradient& g, Isa isa, int32_t threads);

}  // namespace blocksparse::gemm
