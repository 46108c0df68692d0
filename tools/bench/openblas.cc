// Dense products by OpenBLAS, single and double precision. Versions before 0.3.28 pick slow kernels on new AMD CPUs.
#include <dlfcn.h>

#include "core/text.h"
#include "opponents.h"

namespace blocksparse::bench {

namespace {

// The part of CBLAS that is used here; PyPI's builds put a prefix before the names.
enum { kRowMajor = 101, kNoTrans = 111, kTrans = 112 };
using Sgemm = void (*)(int, int, int, int, int, int, float, const float*, int, const float*, int, float, float*, int);
using Dgemm = void (*)(int, int, int, int, int, int, double, const double*, int, const double*, int, double, double*, int);

struct OpenBlas {
  std::string version;
  Sgemm sgemm = nullptr;
  Dgemm dgemm = nullptr;
  void (*set_threads)(int) = nullptr;
};

Result<OpenBlas> load() {
  void* library = open_library("BLOCKSPARSE_OPENBLAS", {"libopenblas.so.0", "libopenblas.so"});
  if (library == nullptr) {
    return Status(StatusCode::unavailable, "no libopenblas.so.0 (BLOCKSPARSE_OPENBLAS may name the file)");
  }
  for (const std::string prefix : {"", "scipy_"}) {
    auto find = [&](const char* name) { return dlsym(library, (prefix + name).c_str()); };
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
  if (c.dtype != DType::f32 && c.dtype != DType::f64) return Status(StatusCode::unsupported, "openblas: f32 and f64 only");
  if (c.transposed || c.gates || c.residual || c.bias || c.pairs != 1 || c.accumulate || c.dgates || c.n == 0) {
    return Status(StatusCode::unsupported, "openblas: plain products only");
  }
  const auto n = static_cast<int>(c.n), in = static_cast<int>(data.layout().in_features()),
             out = static_cast<int>(data.layout().out_features());
  const auto x_ld = static_cast<int>(data.x().stride[c.x_order == Order::features_last ? 0 : 1]);
  const bool x_first = c.x_order == Order::features_first, y_first = c.y_order == Order::features_first;
  auto shared_weights = std::make_shared<std::vector<linear::Bytes>>();
  if (blas.set_threads != nullptr) blas.set_threads(static_cast<int>(std::max<int64_t>(c.threads, 1)));
  Contender contender{.name = concat("openblas ", blas.version), .run = nullptr, .copies = 1};
  const DType dtype = c.dtype;
  const void* x = data.x().data;

  if (c.pass == linear::Pass::wgrad) {  // dW [out, in] = dy^T x
    const auto dy_ld = static_cast<int>(data.dy().stride[y_first ? 1 : 0]);
    const Gemm g{y_first ? kNoTrans : kTrans, x_first ? kTrans : kNoTrans, out, in, n, dy_ld, x_ld, in};
    auto dw = std::make_shared<linear::Bytes>(static_cast<size_t>(out) * static_cast<size_t>(in * size_of(dtype)));
    const void* dy = data.dy().data;
    contender.run = [=, &blas](int) { call(blas, dtype, g, dy, x, dw->data()); };
    data.poison();
    contender.run(0);
    store_blocks(dw->data(), data);
    BS_RETURN_IF_ERROR(check_output(contender.name, data));
    return contender;
  }

  const bool forward = c.pass == linear::Pass::fprop;
  const int inputs = forward ? in : out, outputs = forward ? out : in;
  const auto y_ld = static_cast<int>(data.output().stride[y_first ? 1 : 0]);
  shared_weights->push_back(dense_weights(data));
  contender.copies = copies_for(shared_weights->front().size(), rotate_bytes);
  shared_weights->resize(static_cast<size_t>(contender.copies), shared_weights->front());
  // y [n, outputs] = x W^T, or features-first y [outputs, n] = W x^T; dgrad has W^T for W.
  Gemm g{};
  if (y_first) {
    g = {forward ? kNoTrans : kTrans, x_first ? kNoTrans : kTrans, outputs, n, inputs, in, x_ld, y_ld};
  } else {
    g = {x_first ? kTrans : kNoTrans, forward ? kTrans : kNoTrans, n, outputs, inputs, x_ld, in, y_ld};
  }
  void* y = data.output().data;
  contender.run = [=, &blas](int copy) {
    const void* w = (*shared_weights)[static_cast<size_t>(copy)].data();
    call(blas, dtype, g, y_first ? w : x, y_first ? x : w, y);
  };
  data.poison();
  contender.run(0);
  BS_RETURN_IF_ERROR(check_output(contender.name, data));
  return contender;
}

}  // namespace blocksparse::bench
