// Sparse products by cuSPARSE on the card: BSR and Blocked-ELL.
//
//   fprop   y^T  [out, n] = W   x^T        dgrad   dx^T [in, n] = W^T dy^T
//
// cuSPARSE takes no transposed sparse matrix in these formats, so W^T for dgrad is made beforehand, untimed.
#include "cusparse.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "card.h"
#include "core/index.h"
#include "core/text.h"
#include "cuda/memory.h"

namespace blocksparse::bench {

namespace {

using cusparse::Descriptor;
using cusparse::Library;

int code_of(DType dtype) {
  switch (dtype) {
    case DType::f32: return cusparse::kF32;
    case DType::f64: return cusparse::kF64;
    case DType::bf16: return cusparse::kBf16;
    case DType::f16: return cusparse::kF16;
  }
  return -1;
}

// W or W^T in blocks of b x b, row after row. With `width` each row is padded to so many blocks (Blocked-ELL); 0 stands
// for no padding (BSR).
struct Sparse {
  int64_t rows = 0, columns = 0, b = 0, blocks = 0, width = 0;  // in blocks
  std::vector<int32_t> starts, from;                            // -1 in `from`: padding
  gemm::Bytes values;
};

// Where element (0, 0) of a block lies, and the distance of the block's rows.
struct Place {
  int64_t first, row_stride;
};
enum class Values { blockwise, rowwise };  // rowwise: the padded matrix [rows * b, width * b], row by row

void copy_block(const char* from, char* to, int64_t b, int64_t size, bool transpose, const Place& place) {
  for (int64_t r = 0; r < b; ++r) {
    char* row = to + (place.first + r * place.row_stride) * size;
    if (!transpose) {
      std::memcpy(row, from + r * b * size, static_cast<size_t>(b * size));
      continue;
    }
    for (int64_t c = 0; c < b; ++c) std::memcpy(row + c * size, from + (c * b + r) * size, static_cast<size_t>(size));
  }
}

Sparse sparse_of(const linear::LinearData& data, bool padded, Values order = Values::blockwise) {
  const bool by_in = data.spec().pass == gemm::Pass::dgrad;
  const LayoutView view = data.layout().view();
  const Header& h = header_of(view);
  const IndexSections sections = index_sections(h.out_blocks, h.in_blocks, h.blocks);
  const auto refs = walk_of(view, by_in).refs;
  const int64_t b = view.block_size, size = size_of(data.spec().dtype);
  Sparse s;
  s.rows = by_in ? h.in_blocks : h.out_blocks;
  s.columns = by_in ? h.out_blocks : h.in_blocks;
  s.b = b;
  const int32_t* starts = view.index + (by_in ? sections.by_in : sections.by_out).starts;
  s.starts.assign(starts, starts + s.rows + 1);
  s.blocks = h.blocks;
  if (padded) {
    for (int64_t r = 0; r < s.rows; ++r) s.width = std::max<int64_t>(s.width, starts[r + 1] - starts[r]);
    s.blocks = s.rows * s.width;
  }
  s.from.assign(static_cast<size_t>(s.blocks), -1);
  s.values.assign(static_cast<size_t>(s.blocks * b * b * size), char{0});
  const auto* w = static_cast<const char*>(data.weights().data);
  for (int64_t r = 0; r < s.rows; ++r) {
    for (int64_t i = starts[r]; i < starts[r + 1]; ++i) {
      const int64_t at = padded ? r * s.width + i - starts[r] : i;
      const BlockRef& ref = refs[static_cast<size_t>(i)];
      s.from[static_cast<size_t>(at)] = ref.from;
      const Place place = order == Values::blockwise ? Place{at * b * b, b}
                                                     : Place{r * b * s.width * b + (i - starts[r]) * b, s.width * b};
      copy_block(w + ref.weight * b * b * size, s.values.data(), b, size, by_in, place);
    }
  }
  return s;
}

// One way for the library to do the problem.
struct Way {
  std::string name;
  std::function<int(int copy)> call;  // returns 0 when it is queued
};

// What all calls of a product share on the card.
struct Operands {
  const Library* library = nullptr;
  std::vector<Descriptor> sparse, dense;
  std::vector<std::shared_ptr<void>> memory;
  Operands() = default;
  Operands(const Operands&) = delete;
  ~Operands() {
    for (Descriptor d : sparse) (void)library->destroy_sparse(d);
    for (Descriptor d : dense) (void)library->destroy_dense(d);
  }
};

class Product {
 public:
  static Result<Product> make(const linear::LinearData& data, const Sparse& sparse, size_t rotate_bytes) {
    const auto library = cusparse::library();
    if (!library.ok()) return library.status();
    Product p(data, sparse, *library);
    p.copies_ = copies_for(sparse.values.size(), rotate_bytes);
    auto upload = [&](const void* from, size_t bytes, int copies, char*& to) -> Status {
      auto memory = copies_on_card(from, bytes, copies);
      if (!memory.ok()) return memory.status();
      to = static_cast<char*>(memory->get());
      p.operands_->memory.push_back(*std::move(memory));
      return {};
    };
    char *starts = nullptr, *from = nullptr;
    BS_RETURN_IF_ERROR(upload(sparse.values.data(), sparse.values.size(), p.copies_, p.values_));
    BS_RETURN_IF_ERROR(upload(sparse.starts.data(), sparse.starts.size() * sizeof(int32_t), 1, starts));
    BS_RETURN_IF_ERROR(upload(sparse.from.data(), sparse.from.size() * sizeof(int32_t), 1, from));
    p.starts_ = reinterpret_cast<int32_t*>(starts);
    p.from_ = reinterpret_cast<int32_t*>(from);
    return p;
  }

  int copies() const { return copies_; }

  // cusparseSpMM. The dense operand is [k, n], or the transpose of [n, k].
  Result<Way> generic(bool transpose) {
    BS_RETURN_IF_ERROR(describe());
    Descriptor b = nullptr, c = nullptr;
    BS_RETURN_IF_ERROR(dense(transpose ? x_.t() : x_, b));
    BS_RETURN_IF_ERROR(dense(y_, c));
    const int op = transpose ? cusparse::kTransposed : cusparse::kAsItIs;
    auto operands = operands_;
    const Library* l = operands->library;
    const Scalars scalars(dtype_);
    size_t bytes = 0;
    BS_RETURN_IF_ERROR(check(l->buffer_size(l->handle, cusparse::kAsItIs, op, scalars.one(), operands->sparse[0], b,
                                            scalars.zero(), c, scalars.compute, cusparse::kDefaultAlgorithm, &bytes),
                             "cusparseSpMM_bufferSize"));
    auto buffer = cuda::allocate({DeviceType::cuda, 0}, std::max<size_t>(bytes, 16));
    if (!buffer.ok()) return buffer.status();
    return Way{transpose ? "cusparseSpMM, dense operand transposed" : "cusparseSpMM", [=, buffer = *buffer](int copy) {
                 return l->multiply(l->handle, cusparse::kAsItIs, op, scalars.one(),
                                    operands->sparse[static_cast<size_t>(copy)], b, scalars.zero(), c, scalars.compute,
                                    cusparse::kDefaultAlgorithm, buffer.get());
               }};
  }

  // cusparseSbsrmm and cusparseDbsrmm: f32 and f64, with results by columns.
  Result<Way> older() {
    const Library* l = operands_->library;
    const bool wide = dtype_ == DType::f64;
    if (dtype_ != DType::f32 && !wide) return Status(StatusCode::unsupported, "cusparse bsrmm: f32 and f64 only");
    if (y_.row_major) return Status(StatusCode::unsupported, "cusparse bsrmm: features-last results only");
    if (wide ? l->bsrmm_f64 == nullptr : l->bsrmm_f32 == nullptr)
      return Status(StatusCode::unavailable, "cusparse has no bsrmm");
    auto call = [=, operands = operands_, s = sizes_, starts = starts_, from = from_, values = values_, x = x_, y = y_,
                 bytes = bytes_](auto* function, auto one, int copy) {
      using T = decltype(one);
      const T zero = 0;
      auto number = [](int64_t v) { return static_cast<int>(v); };
      return function(l->handle, cusparse::kBlocksByRow, cusparse::kAsItIs,
                      x.row_major ? cusparse::kTransposed : cusparse::kAsItIs, number(s.rows), number(x.cols),
                      number(s.columns), number(s.blocks), &one, l->general,
                      reinterpret_cast<const T*>(values + static_cast<size_t>(copy) * bytes), starts, from, number(s.b),
                      static_cast<const T*>(x.data), number(x.ld), &zero, static_cast<T*>(y.data), number(y.ld));
    };
    if (wide) return Way{"cusparseDbsrmm", [=](int copy) { return call(l->bsrmm_f64, 1.0, copy); }};
    return Way{"cusparseSbsrmm", [=](int copy) { return call(l->bsrmm_f32, 1.0F, copy); }};
  }

  Status check(int code, const char* what) const {
    if (code == 0) return {};
    return {StatusCode::unsupported, concat(what, ": ", operands_->library->error_string(code))};
  }

 private:
  // The library reads these at each call.
  struct Scalars {
    explicit Scalars(DType dtype)
        : wide(dtype == DType::f64), compute(dtype == DType::f64 ? cusparse::kF64 : cusparse::kF32) {}
    const void* one() const { return wide ? static_cast<const void*>(&kOneWide) : &kOne; }
    const void* zero() const { return wide ? static_cast<const void*>(&kZeroWide) : &kZero; }
    bool wide;
    int compute;
    static constexpr float kOne = 1, kZero = 0;
    static constexpr double kOneWide = 1, kZeroWide = 0;
  };
  struct Sizes {
    int64_t rows, columns, b, blocks, width;
  };

  Product(const linear::LinearData& data, const Sparse& s, const Library* library)
      : dtype_(data.spec().dtype),
        sizes_{s.rows, s.columns, s.b, s.blocks, s.width},
        bytes_(s.values.size()),
        x_(matrix_of(data.placed(data.x()), data.spec().x_order).t()),
        y_(matrix_of(data.placed(data.output()), data.spec().y_order).t()) {
    operands_->library = library;
  }

  // Makes a descriptor for each copy of the values.
  Status describe() {
    const Library* l = operands_->library;
    const Sizes& s = sizes_;
    for (int i = static_cast<int>(operands_->sparse.size()); i < copies_; ++i) {
      char* values = values_ + static_cast<size_t>(i) * bytes_;
      Descriptor made = nullptr;
      if (s.width > 0) {
        BS_RETURN_IF_ERROR(check(l->create_ell(&made, s.rows * s.b, s.columns * s.b, s.b, s.width * s.b, from_, values,
                                               cusparse::kIndex32, cusparse::kBaseZero, code_of(dtype_)),
                                 "cusparseCreateBlockedEll"));
      } else if (l->create_bsr == nullptr) {
        return {StatusCode::unavailable, "cusparse has no cusparseCreateBsr"};
      } else {
        BS_RETURN_IF_ERROR(check(
            l->create_bsr(&made, s.rows, s.columns, s.blocks, s.b, s.b, starts_, from_, values, cusparse::kIndex32,
                          cusparse::kIndex32, cusparse::kBaseZero, code_of(dtype_), cusparse::kRows),
            "cusparseCreateBsr"));
      }
      operands_->sparse.push_back(made);
    }
    return {};
  }

  Status dense(const Matrix& m, Descriptor& made) {
    const int order = m.row_major ? cusparse::kRows : cusparse::kColumns;
    BS_RETURN_IF_ERROR(
        check(operands_->library->create_dense(&made, m.rows, m.cols, m.ld, m.data, code_of(dtype_), order),
              "cusparseCreateDnMat"));
    operands_->dense.push_back(made);
    return {};
  }

  DType dtype_;
  Sizes sizes_;
  size_t bytes_;  // of one copy of the values
  Matrix x_, y_;  // [features, n]
  std::shared_ptr<Operands> operands_ = std::make_shared<Operands>();
  int copies_ = 1;
  char* values_ = nullptr;
  int32_t *starts_ = nullptr, *from_ = nullptr;
};

// Checks a way's result. An f32 result that is only as good as tf32 counts as "through tf32".
Result<Contender> checked(const Product& product, const Way& way, const std::string& name, linear::LinearData& data) {
  BS_RETURN_IF_ERROR(product.check(way.call(0), way.name.c_str()));
  Contender contender{.name = name,
                      .run = [call = way.call](int copy) { (void)call(copy); },
                      .copies = product.copies(),
                      .note = way.name};
  Status status = check_output(contender, data);
  if (!status.ok() && data.spec().dtype == DType::f32) {
    status = check_output(contender, data, nullptr, nullptr, kTf32Error);
    contender.note += ", through tf32";
  }
  if (!status.ok()) return status;
  return contender;
}

// The fastest way whose result is right; if none is, the failure of the first.
Result<Contender> best(const std::vector<Result<Contender>>& tried) {
  const Contender* best = nullptr;
  double least = 0;
  for (const auto& contender : tried) {
    if (!contender.ok()) continue;
    const auto us = time_once_on_card([&] { contender->run(0); });
    if (!us.ok()) return us.status();
    if (best != nullptr && *us >= least) continue;
    best = &*contender;
    least = *us;
  }
  if (best == nullptr) return tried.front().status();
  return *best;
}

Status check_problem(const linear::LinearData& data) {
  const linear::LinearCase& c = data.spec();
  if (c.device.type != DeviceType::cuda) return {StatusCode::unsupported, "cusparse: problems on a card only"};
  if (c.pass == gemm::Pass::wgrad) return {StatusCode::unsupported, "cusparse: fprop and dgrad only"};
  const int64_t b = c.block;
  if (data.layout().out_features() % b != 0 || data.layout().in_features() % b != 0)
    return {StatusCode::unsupported, "cusparse: whole blocks only"};
  if (data.layout().blocks() == 0) return {StatusCode::unsupported, "cusparse: layouts with blocks only"};
  if (const auto library = cusparse::library(); !library.ok()) return library.status();
  return check_plain("cusparse", c);
}

Result<Contender> prepare(linear::LinearData& data, const Sparse& sparse, size_t rotate_bytes, const char* format) {
  auto product = Product::make(data, sparse, rotate_bytes);
  if (!product.ok()) return product.status();
  const std::string name = concat(format, " ", (*cusparse::library())->version);
  std::vector<Result<Contender>> tried;
  auto attempt = [&](Result<Way> way) {
    tried.push_back(way.ok() ? checked(*product, *way, name, data) : Result<Contender>(way.status()));
  };
  attempt(product->generic(false));
  attempt(product->generic(true));
  if (sparse.width == 0) attempt(product->older());
  return best(tried);
}

}  // namespace

Result<Contender> prepare_cusparse_bsr(linear::LinearData& data, size_t rotate_bytes) {
  BS_RETURN_IF_ERROR(check_problem(data));
  return prepare(data, sparse_of(data, false), rotate_bytes, "cusparse_bsr");
}

Result<Contender> prepare_cusparse_ell(linear::LinearData& data, size_t rotate_bytes) {
  BS_RETURN_IF_ERROR(check_problem(data));
  // cuSPARSE's documentation does not say in which order the values lie. One of two orders gives right results.
  Result<Contender> made = Status(StatusCode::unsupported, "");
  for (Values order : {Values::rowwise, Values::blockwise}) {
    const Sparse sparse = sparse_of(data, true, order);
    made = prepare(data, sparse, rotate_bytes, "cusparse_ell");
    if (!made.ok()) continue;
    if (order == Values::blockwise) made->note += ", values block after block";
    if (const int64_t blocks = data.layout().blocks(); sparse.blocks > blocks)
      made->note += concat(", padded from ", blocks, " to ", sparse.blocks, " blocks");
    break;
  }
  return made;
}

}  // namespace blocksparse::bench
