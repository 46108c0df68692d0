// Libraries that are measured beside us, found at run time.
#pragma once

#include <functional>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "blocksparse/status.h"
#include "ops/conv/problem.h"
#include "ops/linear/problem.h"

namespace blocksparse::bench {

// A library that is ready to do the problem. run(i) uses copy i of its weights.
struct Contender {
  std::string name;  // such as "openblas 0.3.30"
  std::function<void(int copy)> run;
  int copies = 1;
  std::string note = {};  // what readers of its time should know
};

struct Opponent {
  std::string name;    // as in --vs
  bool dense = false;  // belongs to --vs dense
  // Returns a contender whose result is right, or why the library is missing or cannot do the problem.
  Result<Contender> (*prepare)(linear::LinearData& data, size_t rotate_bytes);
  DeviceType device = DeviceType::cpu;                                                     // where it computes
  Result<Contender> (*prepare_conv)(conv::ConvData& data, size_t rotate_bytes) = nullptr;  // null: no convolutions
};

const std::vector<Opponent>& opponents();

// A row-major matrix whose rows are `ld` elements apart, or a column-major one whose columns are.
struct Matrix {
  void* data = nullptr;  // null: the weights, of which there may be many copies
  int64_t rows = 0, cols = 0;
  int64_t ld = 0;
  bool row_major = true;
  Matrix t() const { return {data, cols, rows, ld, !row_major}; }
};

// C [m, n] = A [m, k] B [k, n]: the product that a dense library computes for a problem.
//   fprop   y [n, out] = x W^T      dgrad   dx [n, in] = dy W      wgrad   dW [out, in] = dy^T x
struct DenseProduct {
  Matrix a, b, c;
  std::shared_ptr<gemm::Bytes> memory;  // the one dense matrix [out, in]: W, or dW
  DenseProduct t() const { return {b.t(), a.t(), c.t(), memory}; }
};
DenseProduct dense_product(const linear::LinearData& data);

// Activations [n, features].
Matrix matrix_of(const Tensor& t, Order order);

// How many copies of so many bytes together exceed `rotate_bytes`: 1 to 4096.
int copies_for(size_t bytes, size_t rotate_bytes);

// Ok if the problem is one product and nothing more: no epilogue, gates, sum of pairs or transposed view, and n > 0.
Status check_plain(const std::string& library, const linear::LinearCase& c);

// Runs the contender once. Ok if the problem's output is right and nothing else was written. Dense libraries leave dW
// in their own memory, which on a card is at `on_card`. `allowed` is for libraries that are less precise than the
// problem asks.
inline constexpr double kTf32Error = 0x1p13;  // in units of f32's: tf32 keeps 11 bits of its 24
Status check_output(const Contender& contender, linear::LinearData& data, const DenseProduct* dense = nullptr,
                    const void* on_card = nullptr, double allowed = 1);

// Compares all results, or 2000 of them in large problems.
linear::LinearData::Error check_results(linear::LinearData& data);
linear::LinearData::Error check_results(conv::ConvData& data);

// The index of the way that takes the least time. All ways give one result.
size_t fastest(const std::vector<std::function<void(int copy)>>& ways, int copies);

// Opens the first of these shared libraries that exists. The environment's `variable` may name another.
Result<void*> open_library(const char* variable, std::initializer_list<const char*> names);

Result<Contender> prepare_cublas(linear::LinearData& data, size_t rotate_bytes);
Result<Contender> prepare_cublas_tf32(linear::LinearData& data, size_t rotate_bytes);
Result<double> card_peak(DType dtype, bool tf32);  // FLOP/s of a large product by cuBLAS
Result<Contender> prepare_cusparse_bsr(linear::LinearData& data, size_t rotate_bytes);
Result<Contender> prepare_cusparse_ell(linear::LinearData& data, size_t rotate_bytes);
Result<Contender> prepare_libxsmm(linear::LinearData& data, size_t rotate_bytes);
Result<Contender> prepare_openblas(linear::LinearData& data, size_t rotate_bytes);
Result<Contender> prepare_onednn(linear::LinearData& data, size_t rotate_bytes);
Result<Contender> prepare_onednn_conv(conv::ConvData& data, size_t rotate_bytes);

}  // namespace blocksparse::bench
