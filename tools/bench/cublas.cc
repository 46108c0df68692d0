// Dense products by cuBLAS on the card, in the problem's type, or f32 through tf32. cuBLAS is found at run time,
// without its headers.
#include <dlfcn.h>

#include <array>

#include "card.h"
#include "core/text.h"
#include "cuda/memory.h"
#include "opponents.h"

namespace blocksparse::bench {

namespace {

// The part of cuBLAS's interface that the bench uses.
using Handle = void*;
enum { kNoTrans = 0, kTrans = 1 };
enum { kF32 = 0, kF64 = 1, kF16 = 2, kBf16 = 14 };             // cudaDataType
enum { kCompute32 = 68, kCompute64 = 70, kComputeTf32 = 77 };  // cublasComputeType_t
constexpr int kDefaultAlgorithm = -1;
constexpr size_t kWorkspace = size_t{64} << 20;

struct Cublas {
  Handle handle = nullptr;
  std::string version;
  std::shared_ptr<void> workspace;
  int (*gemm)(Handle, int, int, int, int, int, const void*, const void*, int, int, const void*, int, int, const void*,
              void*, int, int, int, int) = nullptr;
};

Result<Cublas> load() {
  const Result<void*> library = open_library("BLOCKSPARSE_CUBLAS", {"libcublas.so.13", "libcublas.so.12"});
  if (!library.ok()) return library.status();
  if (card_stream() == nullptr) return Status(StatusCode::unavailable, "cublas: no card");
  const char* missing = nullptr;
  auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(*library, name));
    if (function == nullptr) missing = name;
  };
  Cublas blas;
  int (*create)(Handle*) = nullptr;
  int (*set_stream)(Handle, void*) = nullptr;
  int (*set_workspace)(Handle, void*, size_t) = nullptr;
  int (*get_version)(Handle, int*) = nullptr;
  find(create, "cublasCreate_v2");
  find(set_stream, "cublasSetStream_v2");
  find(set_workspace, "cublasSetWorkspace_v2");
  find(get_version, "cublasGetVersion_v2");
  find(blas.gemm, "cublasGemmEx");
  if (missing != nullptr) return Status(StatusCode::unavailable, concat("libcublas has no ", missing));
  auto workspace = cuda::allocate({DeviceType::cuda, 0}, kWorkspace);  // cuBLAS may not allocate its own while a graph
                                                                       // is captured
  if (!workspace.ok()) return workspace.status();
  blas.workspace = *std::move(workspace);
  int version = 0;
  if (create(&blas.handle) != 0 || set_stream(blas.handle, card_stream()) != 0 ||
      set_workspace(blas.handle, blas.workspace.get(), kWorkspace) != 0 || get_version(blas.handle, &version) != 0) {
    return Status(StatusCode::unavailable, "cublas: no handle could be made");
  }
  blas.version = concat(version / 10000, ".", version / 100 % 100, ".", version % 100);
  return blas;
}

Result<const Cublas*> cublas() {
  static const Result<Cublas> loaded = load();
  if (!loaded.ok()) return loaded.status();
  return &*loaded;
}

int code_of(DType dtype) {
  switch (dtype) {
    case DType::f32: return kF32;
    case DType::f64: return kF64;
    case DType::bf16: return kBf16;
    case DType::f16: return kF16;
  }
  return -1;
}

// C [m, n] = A B, with each matrix in either order.
struct Gemm {
  DType dtype, c_dtype;
  bool tf32;
  DenseProduct product;  // c column-major

  int run(const Cublas& blas, const void* a, const void* b, void* c) const {
    const float one = 1, zero = 0;
    const double wide_one = 1, wide_zero = 0;
    const bool wide = dtype == DType::f64;
    auto number = [](int64_t value) { return static_cast<int>(value); };
    auto trans = [](const Matrix& m) -> int { return m.row_major ? kTrans : kNoTrans; };
    const Matrix &ma = product.a, &mb = product.b, &mc = product.c;
    return blas.gemm(blas.handle, trans(ma), trans(mb), number(mc.rows), number(mc.cols), number(ma.cols),
                     wide ? static_cast<const void*>(&wide_one) : &one, a, code_of(dtype), number(ma.ld), b,
                     code_of(dtype), number(mb.ld), wide ? static_cast<const void*>(&wide_zero) : &zero, c,
                     code_of(c_dtype), number(mc.ld), wide ? kCompute64 : (tf32 ? kComputeTf32 : kCompute32),
                     kDefaultAlgorithm);
  }
};

Result<Contender> prepare(linear::LinearData& data, size_t rotate_bytes, bool tf32) {
  const linear::LinearCase& c = data.spec();
  if (c.device.type != DeviceType::cuda) return Status(StatusCode::unsupported, "cublas: problems on a card only");
  if (tf32 && c.dtype != DType::f32) return Status(StatusCode::unsupported, "cublas_tf32: f32 only");
  const auto blas = cublas();
  if (!blas.ok()) return blas.status();
  BS_RETURN_IF_ERROR(check_plain("cublas", c));
  const bool gradient = c.pass == gemm::Pass::wgrad;
  Gemm gemm{c.dtype, gradient ? data.output().dtype : c.dtype, tf32, dense_product(data)};
  if (gemm.product.c.row_major) gemm.product = gemm.product.t();
  const size_t bytes = gemm.product.memory->size();
  Contender contender{.name = concat(tf32 ? "cublas_tf32 " : "cublas ", (*blas)->version), .run = nullptr, .copies = 1};
  if (!gradient) contender.copies = copies_for(bytes, rotate_bytes);
  auto dense = copies_on_card(gemm.product.memory->data(), bytes, contender.copies);
  if (!dense.ok()) return dense.status();
  contender.run = [=, blas = *blas, memory = *dense](int copy) {
    char* w = static_cast<char*>(memory.get()) + static_cast<size_t>(copy) * bytes;
    const void* host = gemm.product.memory->data();
    auto data_of = [w, host](const Matrix& m) { return m.data == nullptr || m.data == host ? w : m.data; };
    gemm.run(*blas, data_of(gemm.product.a), data_of(gemm.product.b), data_of(gemm.product.c));
  };
  BS_RETURN_IF_ERROR(check_output(contender, data, &gemm.product, dense->get(), tf32 ? kTf32Error : 1));
  return contender;
}

}  // namespace

Result<Contender> prepare_cublas(linear::LinearData& data, size_t rotate_bytes) {
  return prepare(data, rotate_bytes, false);
}
Result<Contender> prepare_cublas_tf32(linear::LinearData& data, size_t rotate_bytes) {
  return prepare(data, rotate_bytes, true);
}

// The FLOP/s of a large product.
Result<double> card_peak(DType dtype, bool tf32) {
  static std::array<Result<double>, 5> known{0.0, 0.0, 0.0, 0.0, 0.0};
  tf32 = tf32 && dtype == DType::f32;
  Result<double>& peak = known[tf32 ? 4 : static_cast<size_t>(dtype)];
  if (!peak.ok() || *peak > 0) return peak;
  peak = [&]() -> Result<double> {
    const auto blas = cublas();
    if (!blas.ok()) return blas.status();
    const int64_t side = dtype == DType::f32 || dtype == DType::f64 ? 4096 : 8192, count = side * side;
    auto made = linear::LinearData::make(*linear::parse_linear_case(
        concat("linear:fprop ", name_of(dtype), " n=", side, " b=128 diagonal(", side / 128, ")  device=cuda")));
    if (!made.ok()) return made.status();
    // Both operands are random, because the rate depends on the data through the card's power.
    auto b = copies_on_card(made->placed(made->x()).data, static_cast<size_t>(count * size_of(dtype)), 1);
    if (!b.ok()) return b.status();
    const Matrix m{nullptr, side, side, side, false};
    const Gemm gemm{dtype, dtype, tf32, {m, m, m, nullptr}};
    const auto us = time_once_on_card(
        [&] { gemm.run(**blas, made->placed(made->x()).data, b->get(), made->placed(made->output()).data); });
    if (!us.ok()) return us.status();
    return 2e6 * static_cast<double>(side) * static_cast<double>(count) / *us;
  }();
  return peak;
}

}  // namespace blocksparse::bench
