// Dense products by OpenBLAS, in single and double precision. Versions before 0.3.28 pick slow kernels on new AMD CPUs.
#include <dlfcn.h>

#include "core/text.h"
#include "opponents.h"

namespace blocksparse::bench {

namespace {

// The part of CBLAS that the bench uses. PyPI's builds put a prefix before the names.
enum { kRowMajor = 101, kNoTrans = 111, kTrans = 112 };
using Sgemm = void (*)(int, int, int, int, int, int, float, const float*, int, const float*, int, float, float*, int);
using Dgemm = void (*)(int, int, int, int, int, int, double, const double*, int, const double*, int, double, double*,
                       int);

struct OpenBlas {
  std::string version;
  Sgemm sgemm = nullptr;
  Dgemm dgemm = nullptr;
  void (*set_threads)(int) = nullptr;
};

Result<OpenBlas> load() {
  const Result<void*> library = open_library("BLOCKSPARSE_OPENBLAS", {"libopenblas.so.0", "libopenblas.so"});
  if (!library.ok()) return library.status();
  for (const std::string prefix : {"", "scipy_"}) {
    auto find = [&](const char* name) { return dlsym(*library, (prefix + name).c_str()); };
    if (find("cblas_sgemm") == nullptr) continue;
    OpenBlas blas;
    blas.sgemm = reinterpret_cast<Sgemm>(find("cblas_sgemm"));
    blas.dgemm = reinterpret_cast<Dgemm>(find("cblas_dgemm"));
    blas.set_threads = reinterpret_cast<void (*)(int)>(find("openblas_set_num_threads"));
    if (auto config = reinterpret_cast<const char* (*)()>(find("openblas_get_config"))) {
      const std::string text = config();  // "OpenBLAS 0.3.30 ..."
      const size_t space = text.find(' ');
      blas.version = text.substr(space + 1, text.find(' ', space + 1) - space - 1);
    }
    return blas;
  }
  return Status(StatusCode::unavailable, "libopenblas has no cblas_sgemm");
}

// Row-major C [m, n] = op(A) op(B) with k products.
struct Gemm {
  int trans_a, trans_b, m, n, k, lda, ldb, ldc;
};

void call(const OpenBlas& blas, DType dtype, const Gemm& g, const void* a, const void* b, void* c) {
  if (dtype == DType::f64) {
    blas.dgemm(kRowMajor, g.trans_a, g.trans_b, g.m, g.n, g.k, 1, static_cast<const double*>(a), g.lda,
               static_cast<const double*>(b), g.ldb, 0, static_cast<double*>(c), g.ldc);
  } else {
    blas.sgemm(kRowMajor, g.trans_a, g.trans_b, g.m, g.n, g.k, 1, static_cast<const float*>(a), g.lda,
               static_cast<const float*>(b), g.ldb, 0, static_cast<float*>(c), g.ldc);
  }
}

}  // namespace

Result<Contender> prepare_openblas(linear::LinearData& data, size_t rotate_bytes) {
  static const Result<OpenBlas> loaded = load();
  if (!loaded.ok()) return loaded.status();
  const OpenBlas& blas = *loaded;
  const linear::LinearCase& c = data.spec();
  if (c.dtype != DType::f32 && c.dtype != DType::f64)
    return Status(StatusCode::unsupported, "openblas: f32 and f64 only");
  BS_RETURN_IF_ERROR(check_plain("openblas", c));
  if (blas.set_threads != nullptr) blas.set_threads(static_cast<int>(std::max<int64_t>(c.threads, 1)));

  DenseProduct product = dense_product(data);
  if (!product.c.row_major) product = product.t();
  auto trans = [](const Matrix& m) -> int { return m.row_major ? kNoTrans : kTrans; };
  auto number = [](int64_t value) { return static_cast<int>(value); };
  const auto& [a, b, y, memory] = product;
  const Gemm gemm{trans(a),       trans(b),     number(y.rows), number(y.cols),
                  number(a.cols), number(a.ld), number(b.ld),   number(y.ld)};
  Contender contender{.name = concat("openblas ", blas.version), .run = nullptr, .copies = 1};
  if (c.pass != gemm::Pass::wgrad) contender.copies = copies_for(memory->size(), rotate_bytes);
  const auto weights = std::make_shared<std::vector<gemm::Bytes>>(static_cast<size_t>(contender.copies), *memory);
  contender.run = [=, &blas, dtype = c.dtype](int copy) {
    const void* w = (*weights)[static_cast<size_t>(copy)].data();
    auto data_of = [w](const Matrix& m) { return m.data == nullptr ? w : m.data; };
    call(blas, dtype, gemm, data_of(product.a), data_of(product.b), product.c.data);
  };
  BS_RETURN_IF_ERROR(check_output(contender, data, &product));
  return contender;
}

}  // namespace blocksparse::bench
