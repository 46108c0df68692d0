// The deep-update op inside: a call that is checked, and how its memory is divided.
#pragma once

#include <array>
#include <cstdint>

#include "blocksparse/deep_update.h"
#include "core/gates.h"
#include "ops/sequence/steps.h"

namespace blocksparse::deep_update {

inline constexpr int kLeastMatrices = 3, kMostMatrices = 64;

using sequence::part_bytes;

struct Matrix : sequence::Weight {
  const void *gain = nullptr, *shift = nullptr;
};

// What both passes share. A pointer is null if its tensor is not given.
struct Sequence : sequence::Steps {
  int count = 0;  // of matrices
  std::array<Matrix, kMostMatrices> matrices = {};
  const void* term = nullptr;
  double epsilon = 0;

  int last() const { return count - 1; }
  int64_t groups(int matrix) const { return matrix == last() ? kGates : 1; }
};

struct Forward : Sequence {
  void *y = nullptr, *h = nullptr, *c = nullptr;
  char* saved = nullptr;
};

struct MatrixGrads {
  void *w = nullptr, *gain = nullptr, *shift = nullptr;
  DType w_dtype = DType::f32;
};

struct Backward : Sequence {
  const void* y = nullptr;
  const char* saved = nullptr;
  const void *dy = nullptr, *dh = nullptr, *dc = nullptr;
  std::array<MatrixGrads, kMostMatrices> grads = {};
  void *dfactor = nullptr, *dterm = nullptr, *dh0 = nullptr, *dc0 = nullptr;
};

// ---- Memory, in bytes; every tensor begins at a multiple of 64 ------------------------------------------------------

// Tensors of `steps` steps: one for each matrix, like its product. The last one is four times as wide.
struct Stack {
  int64_t one, four;  // [steps, n, H], [steps, n, 4, H]
  int last;

  Stack(const Sequence& s, int64_t steps)
      : one(part_bytes(steps * s.n * s.hidden * size_of(s.dtype))),
        four(part_bytes(kGates * steps * s.n * s.hidden * size_of(s.dtype))),
        last(s.last()) {}
  int64_t at(int matrix) const { return matrix * one; }
  int64_t total() const { return last * one + four; }
};

// The results of the forward pass over `steps` steps, or of one step that nobody needs afterwards.
struct Made {
  Stack products;          // W u
  int64_t normed;          // u behind each matrix but the last one
  int64_t stats, of_four;  // of the norms; of the gates' norm
  int64_t gates, cells, total;

  Made(const Sequence& s, int64_t steps) : Made(s, steps, false) {}
  // On the CPU all matrices of a step that is not kept have the same memory, which stays in the cache.
  static Made of_passing_step(const Sequence& s) { return Made(s, 1, s.device.type != DeviceType::cuda); }

  int64_t product_at(int matrix) const { return matrix * stride_; }
  int64_t normed_at(int matrix) const { return normed + matrix * stride_; }
  int64_t stats_at(int matrix) const { return stats + matrix * of_one_; }

 private:
  Made(const Sequence& s, int64_t steps, bool shares) : products(s, steps), stride_(shares ? 0 : products.one) {
    const int64_t sum = size_of(sum_dtype(s.dtype));
    of_one_ = part_bytes(2 * steps * s.n * sum);
    normed = shares ? products.four : products.total();
    stats = normed + (shares ? products.one : products.last * products.one);
    of_four = stats + products.last * of_one_;
    gates = of_four + part_bytes(2 * kGates * steps * s.n * sum);
    cells = gates + (shares ? 0 : products.four);
    total = cells + part_bytes(steps * s.n * s.hidden * sum);
  }

  int64_t stride_, of_one_ = 0;
};

// The workspace of the forward pass: z, and if nothing is saved, the results of one step.
struct ForwardSpace {
  int64_t made, linear;

  explicit ForwardSpace(const Sequence& s)
      : made(part_bytes(kGates * s.n * s.hidden * size_of(s.dtype))), linear(made + Made::of_passing_step(s).total) {}
};

// The workspace of the backward pass: the gradients of all steps' products, and of what the norms give. On the CPU the
// norms' gains and shifts get their gradients step by step, because a step lies in the cache. On a card they get them
// from all steps at once.
struct BackwardSpace {
  Stack products, normed;
  int64_t of_normed, dh, dc, linear;

  explicit BackwardSpace(const Sequence& s)
      : products(s, s.steps),
        normed(s, keeps_steps(s) ? s.steps : 1),
        of_normed(products.total()),
        dh(of_normed + normed.total()),
        dc(dh + part_bytes(s.n * s.hidden * size_of(s.dtype))),
        linear(dc + part_bytes(s.n * s.hidden * size_of(sum_dtype(s.dtype)))) {}
  static bool keeps_steps(const Sequence& s) { return s.device.type == DeviceType::cuda; }
};

Status run_forward(const Forward& f, Workspace workspace, Stream stream);
Status run_backward(const Backward& b, Workspace workspace, Stream stream);

}  // namespace blocksparse::deep_update
