// The part of cuSPARSE's interface that the bench uses: its sparse times dense product, found at run time.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "blocksparse/status.h"
#include "opponents.h"

namespace blocksparse::bench::cusparse {

using Handle = void*;
using Descriptor = void*;  // of a sparse or a dense matrix
enum Operation { kAsItIs = 0, kTransposed = 1 };
enum Order { kColumns = 1, kRows = 2 };
enum Direction { kBlocksByRow = 0 };
enum { kIndex32 = 2, kBaseZero = 0, kDefaultAlgorithm = 0 };
enum { kF32 = 0, kF64 = 1, kF16 = 2, kBf16 = 14 };  // cudaDataType

struct Library {
  Handle handle = nullptr;
  Descriptor general = nullptr;  // a matrix without special properties, for the older functions
  std::string version;
  const char* (*error_string)(int) = nullptr;
  // rows, columns and blocks in blocks; rows, columns and width of the padded rows in elements
  int (*create_bsr)(Descriptor*, int64_t, int64_t, int64_t, int64_t, int64_t, void* starts, void* columns, void* values,
                    int, int, int base, int dtype, int order) = nullptr;
  int (*create_ell)(Descriptor*, int64_t, int64_t, int64_t block, int64_t width, void* columns, void* values, int,
                    int base, int dtype) = nullptr;
  int (*create_dense)(Descriptor*, int64_t rows, int64_t cols, int64_t ld, void*, int dtype, int order) = nullptr;
  int (*destroy_sparse)(Descriptor) = nullptr;
  int (*destroy_dense)(Descriptor) = nullptr;
  int (*buffer_size)(Handle, int, int, const void* alpha, Descriptor, Descriptor, const void* beta, Descriptor, int,
                     int algorithm, size_t*) = nullptr;
  int (*multiply)(Handle, int, int, const void* alpha, Descriptor, Descriptor, const void* beta, Descriptor, int,
                  int algorithm, void*) = nullptr;
  // C [mb b, n] = A B, C by columns: cusparseSbsrmm, cusparseDbsrmm. Null if the library has dropped them.
  int (*bsrmm_f32)(Handle, int direction, int, int, int mb, int n, int kb, int blocks, const float*, Descriptor,
                   const float*, const int*, const int*, int b, const float*, int ldb, const float*, float*,
                   int ldc) = nullptr;
  int (*bsrmm_f64)(Handle, int direction, int, int, int mb, int n, int kb, int blocks, const double*, Descriptor,
                   const double*, const int*, const int*, int b, const double*, int ldb, const double*, double*,
                   int ldc) = nullptr;
};

Result<const Library*> library();

}  // namespace blocksparse::bench::cusparse
