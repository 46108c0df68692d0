// Block-sparse products by LIBXSMM 2. Its batch-reduce GEMM C = sum_i A_i B_i takes all live blocks of an output block
// at once. So there is one call for each output block and tile of tokens, in our own parallel loop. LIBXSMM is
// column-major:
//
//   y features-last    C [b, tokens] = W_i [b, b] X_i [b, tokens]      the blocks are A
//   y features-first   C [tokens, b] = X_i [tokens, b] W_i^T [b, b]    the blocks are B
//   wgrad              dW^T [b in, b out] = X^T [b in, tokens] dY [tokens, b out]; the batch is chunks of tokens
//
// Blocks are stored beforehand, untimed, in the order that LIBXSMM reads best: transposed for fprop features-last and
// dgrad features-first, and with pairs of inputs together ("VNNI") where bf16 blocks are A. Activations stay as they
// are; the generated code transposes them if their order needs it. The bench tries sizes of tiles and chunks, and
// whether tiles or rows make the outer loop, and keeps the fastest.
#include <dlfcn.h>

#include <algorithm>
#include <climits>
#include <cstdlib>
#include <cstring>

#include "core/ceil_div.h"
#include "core/index.h"
#include "core/text.h"
#include "cpu/threads.h"
#include "opponents.h"

namespace blocksparse::bench {

namespace {

// The part of LIBXSMM's API that the bench uses (with 32-bit sizes, its default).
enum { kTypeF64 = 0, kTypeF32 = 1, kTypeBf16 = 2 };
enum : unsigned { kTransA = 1, kTransB = 2, kOverwriteC = 4, kVnniA = 256 };
enum { kBatchOfOffsets = 2, kBatchOfStrides = 4 };

struct Shape {
  int m, n, k, lda, ldb, ldc;
  int a_type, b_type, c_type, sum_type;
};

struct Batch {
  int type;
  int stride_a, stride_b;  // bytes
  unsigned char unroll;    // how many, if that is known
};

struct Arguments {
  struct Operand {
    const void* data;
    const void* offsets;  // [count] unsigned long long, bytes
    const void* unused[4];
  };
  struct {
    const void* unused[2];
    const unsigned long long* count;
    const void* unused_too;
  } op;
  Operand a, b, c;
};
using Kernel = void (*)(const Arguments*);

struct KernelInfo {
  int kind;
  unsigned flops;
  size_t bytes;
  unsigned reference;  // 1: no machine code, but a loop in C
};

struct Xsmm {
  std::string name;  // "libxsmm 2.0.0"
  void (*init)() = nullptr;
  Kernel (*dispatch)(Shape, unsigned flags, unsigned prefetch, Batch) = nullptr;
  int (*info)(const void* kernel, KernelInfo*) = nullptr;
};

Result<Xsmm> load() {
  const Result<void*> library = open_library("BLOCKSPARSE_LIBXSMM", {"libxsmm.so.2", "libxsmm.so", "libxsmm.so.1"});
  if (!library.ok()) return library.status();
  Xsmm xsmm;
  xsmm.init = reinterpret_cast<decltype(xsmm.init)>(dlsym(*library, "libxsmm_init"));
  xsmm.dispatch = reinterpret_cast<decltype(xsmm.dispatch)>(dlsym(*library, "libxsmm_dispatch_brgemm"));
  xsmm.info = reinterpret_cast<decltype(xsmm.info)>(dlsym(*library, "libxsmm_get_kernel_info"));
  if (xsmm.init == nullptr || xsmm.dispatch == nullptr || xsmm.info == nullptr) {
    return Status(StatusCode::unavailable, "libxsmm has no libxsmm_dispatch_brgemm: needs version 2");
  }
  // No function returns the version, but the file's full name ends in it.
  Dl_info file{};
  xsmm.name = "libxsmm 2";
  if (dladdr(reinterpret_cast<void*>(xsmm.dispatch), &file) != 0) {
    char* path = realpath(file.dli_fname, nullptr);
    const std::string full = path == nullptr ? "" : path;
    std::free(path);
    if (const size_t at = full.rfind(".so."); at != std::string::npos) xsmm.name = "libxsmm " + full.substr(at + 4);
  }
  xsmm.init();
  return xsmm;
}

// Machine code for this product, or null.
Kernel kernel_for(const Xsmm& xsmm, const Shape& shape, unsigned flags, const Batch& batch) {
  const Kernel kernel = xsmm.dispatch(shape, flags, 0, batch);
  KernelInfo info{};
  if (kernel == nullptr || xsmm.info(reinterpret_cast<const void*>(kernel), &info) != 0) return nullptr;
  return info.reference != 0 ? nullptr : kernel;
}

int type_of(DType dtype) { return dtype == DType::f64 ? kTypeF64 : dtype == DType::f32 ? kTypeF32 : kTypeBf16; }

int number(int64_t value) { return static_cast<int>(value); }

// Activations by address: element (token, feature).
struct Panel {
  char* data = nullptr;
  int64_t token_bytes = 0, feature_bytes = 0;
  int ld = 0;
  bool first = false;  // features-first
  char* at(int64_t token, int64_t feature) const { return data + token * token_bytes + feature * feature_bytes; }
};

Panel panel_of(const Tensor& t, Order order) {
  const bool first = order == Order::features_first;
  const int64_t size = size_of(t.dtype);
  return {static_cast<char*>(t.data), t.stride[0] * size, t.stride[1] * size, number(t.stride[first ? 1 : 0]), first};
}

// The numbers of tokens to try for a tile or chunk.
std::vector<int64_t> token_counts(int64_t n) {
  std::vector<int64_t> counts;
  for (int64_t count = 16; count <= 512 && count < n; count *= 2) counts.push_back(count);
  if (n <= 1024) counts.push_back(n);
  return counts;
}

Status no_kernel(const Xsmm& xsmm, DType dtype) {
  return {StatusCode::unsupported, concat(xsmm.name, " has no such ", name_of(dtype), " kernel for this CPU")};
}

// The blocks of one output block, at [first, last) of the offsets.
struct Row {
  int64_t to = 0, first = 0, last = 0;
};

// fprop or dgrad, without the weights and the tiling.
struct Product {
  Panel x, y;
  int64_t n = 0, b = 0;
  DType dtype = DType::f32;
  int threads = 1;
  std::vector<Row> rows;
  std::vector<size_t> groups;  // rows with about as much work in each group: where groups begin, and the end
  std::vector<unsigned long long> x_offsets, w_offsets;
};

struct Tiling {
  int64_t tile = 0;
  bool tiles_outside = false;  // all rows for one tile of tokens, or all tiles for one group of rows
  Kernel whole = nullptr, rest = nullptr;
};

// Divides rows into groups of about 1/32 of each thread's share.
void make_groups(Product& p) {
  const size_t share = p.w_offsets.size() / static_cast<size_t>(32 * p.threads) + 1;
  p.groups = {0};
  size_t blocks = 0;
  for (size_t i = 0; i < p.rows.size(); ++i) {
    blocks += static_cast<size_t>(p.rows[i].last - p.rows[i].first) + 1;
    if (blocks < share && i + 1 < p.rows.size()) continue;
    p.groups.push_back(i + 1);
    blocks = 0;
  }
}

Product make_product(const linear::LinearData& data) {
  const linear::LinearCase& c = data.spec();
  const RowWalk walk = walk_of(data.layout().view(), c.pass == gemm::Pass::dgrad);
  Product p{.x = panel_of(data.x(), c.x_order),
            .y = panel_of(data.output(), c.y_order),
            .n = c.n,
            .b = c.block,
            .dtype = c.dtype,
            .threads = number(std::max<int64_t>(c.threads, 1)),
            .rows = {},
            .groups = {},
            .x_offsets = {},
            .w_offsets = {}};
  p.rows.resize(static_cast<size_t>(data.output().shape[1] / c.block), {-1, 0, 0});
  for (const Piece& piece : walk.pieces) {  // the pieces of a cut row follow one another in the refs
    Row& row = p.rows[static_cast<size_t>(piece.to)];
    const bool seen = row.to >= 0;
    row = {piece.to, seen ? std::min<int64_t>(row.first, piece.first) : piece.first,
           seen ? std::max<int64_t>(row.last, piece.last) : piece.last};
  }
  for (const BlockRef& ref : walk.refs) {
    p.x_offsets.push_back(static_cast<unsigned long long>(ref.from * p.b * p.x.feature_bytes));
    p.w_offsets.push_back(static_cast<unsigned long long>(ref.weight * p.b * p.b * size_of(p.dtype)));
  }
  make_groups(p);
  return p;
}

// Whether blocks are stored with two inputs side by side, as bf16 instructions take them. Kernels that transpose X do
// not take that.
// not accept it.
bool in_pairs(const Product& p) { return p.dtype == DType::bf16 && !p.x.first && !p.y.first; }

// The kernel for a tile of `tokens`, or null.
Kernel product_kernel(const Xsmm& xsmm, const Product& p, int64_t tokens) {
  const int b = number(p.b), t = number(tokens), type = type_of(p.dtype);
  const int sum_type = p.dtype == DType::f64 ? kTypeF64 : kTypeF32;
  const Batch batch{kBatchOfOffsets, 0, 0, 0};
  if (p.y.first) {
    const unsigned flags = kOverwriteC | (p.x.first ? 0u : unsigned{kTransA});
    return kernel_for(xsmm, {t, b, b, p.x.ld, b, p.y.ld, type, type, type, sum_type}, flags, batch);
  }
  const unsigned flags = kOverwriteC | (p.x.first ? unsigned{kTransB} : 0u) | (in_pairs(p) ? unsigned{kVnniA} : 0u);
  return kernel_for(xsmm, {b, t, b, b, p.x.ld, p.y.ld, type, type, type, sum_type}, flags, batch);
}

void run_row(const Product& p, const Row& row, Kernel kernel, int64_t token, int64_t tokens, const char* weights) {
  char* y = p.y.at(token, row.to * p.b);
  const auto count = static_cast<unsigned long long>(row.last - row.first);
  if (count == 0) {
    const int64_t lines = p.y.first ? p.b : tokens, width = p.y.first ? tokens : p.b, size = size_of(p.dtype);
    for (int64_t i = 0; i < lines; ++i) std::memset(y + i * p.y.ld * size, 0, static_cast<size_t>(width * size));
    return;
  }
  const Arguments::Operand x{p.x.at(token, 0), p.x_offsets.data() + row.first, {}};
  const Arguments::Operand w{weights, p.w_offsets.data() + row.first, {}};
  const Arguments arguments{{{}, &count, nullptr}, p.y.first ? x : w, p.y.first ? w : x, {y, nullptr, {}}};
  kernel(&arguments);
}

void run_product(const Product& p, const Tiling& tiling, const char* weights) {
  const int64_t tiles = ceil_div(p.n, tiling.tile), groups = static_cast<int64_t>(p.groups.size()) - 1;
  parallel_for(p.threads, tiles * groups, [&](int64_t task) {
    const int64_t token = (tiling.tiles_outside ? task / groups : task % tiles) * tiling.tile;
    const auto group = static_cast<size_t>(tiling.tiles_outside ? task % groups : task / tiles);
    const int64_t tokens = std::min(tiling.tile, p.n - token);
    const Kernel kernel = tokens == tiling.tile ? tiling.whole : tiling.rest;
    for (size_t i = p.groups[group]; i < p.groups[group + 1]; ++i) {
      run_row(p, p.rows[i], kernel, token, tokens, weights);
    }
  });
}

// The blocks as kernels read them: B is [b outputs, b inputs], A is [b inputs, b outputs], perhaps in pairs.
gemm::Bytes stored_weights(const linear::LinearData& data, const Product& p) {
  const Tensor& w = data.weights();
  const int64_t b = data.spec().block, size = size_of(w.dtype);
  const bool forward = data.spec().pass == gemm::Pass::fprop, pairs = in_pairs(p);
  gemm::Bytes stored(static_cast<size_t>(w.shape[0] * b * b * size));
  const char* from = static_cast<const char*>(w.data);
  char* to = stored.data();
  for (int64_t block = 0; block < w.shape[0]; ++block, from += b * b * size, to += b * b * size) {
    for (int64_t o = 0; o < b; ++o) {
      for (int64_t i = 0; i < b; ++i) {
        const int64_t target = p.y.first ? o * b + i : pairs ? (i / 2 * b + o) * 2 + i % 2 : i * b + o;
        std::memcpy(to + target * size, from + (forward ? o * b + i : i * b + o) * size, static_cast<size_t>(size));
      }
    }
  }
  return stored;
}

// wgrad by chunks of tokens. A second kernel adds what is left over after whole chunks.
struct Gradient {
  Panel x, dy;
  std::span<const BlockRef> refs;
  std::span<const int32_t> rows;
  char* dw = nullptr;
  int64_t n = 0, b = 0, block_bytes = 0, chunk = 0;
  int threads = 1;
  Kernel whole = nullptr, rest = nullptr;
};

bool add_kernels(const Xsmm& xsmm, Gradient& g, DType dtype, DType dw_dtype) {
  const int b = number(g.b), type = type_of(dtype), sum_type = dtype == DType::f64 ? kTypeF64 : kTypeF32;
  const unsigned flags = (g.x.first ? unsigned{kTransA} : 0u) | (g.dy.first ? 0u : unsigned{kTransB});
  const int64_t stride_a = g.chunk * g.x.token_bytes, stride_b = g.chunk * g.dy.token_bytes;
  if (std::max(stride_a, stride_b) > INT_MAX) return false;
  const Batch batch{kBatchOfStrides, number(stride_a), number(stride_b), 0};
  Shape shape{b, b, number(g.chunk), g.x.ld, g.dy.ld, b, type, type, type_of(dw_dtype), sum_type};
  g.whole = kernel_for(xsmm, shape, flags | kOverwriteC, batch);
  if (g.n % g.chunk == 0) return g.whole != nullptr;
  if (dw_dtype == DType::bf16) return false;  // the sum of whole chunks would be rounded on the way
  shape.k = number(g.n % g.chunk);
  g.rest = kernel_for(xsmm, shape, flags, batch);
  return g.whole != nullptr && g.rest != nullptr;
}

void run_gradient(const Gradient& g) {
  constexpr int64_t kRun = 16;  // blocks of a task; one block takes less than a microsecond
  const auto blocks = static_cast<int64_t>(g.refs.size());
  const unsigned long long chunks = static_cast<unsigned long long>(g.n / g.chunk), one = 1;
  const auto whole_tokens = static_cast<int64_t>(chunks) * g.chunk;
  parallel_for(g.threads, ceil_div(blocks, kRun), [&](int64_t task) {
    for (int64_t i = task * kRun; i < std::min(blocks, (task + 1) * kRun); ++i) {
      const int64_t in = g.refs[static_cast<size_t>(i)].from * g.b, out = g.rows[static_cast<size_t>(i)] * g.b;
      Arguments arguments{{{}, &chunks, nullptr},
                          {g.x.at(0, in), nullptr, {}},
                          {g.dy.at(0, out), nullptr, {}},
                          {g.dw + i * g.block_bytes, nullptr, {}}};
      g.whole(&arguments);
      if (g.rest == nullptr) continue;
      arguments.op.count = &one;
      arguments.a.data = g.x.at(whole_tokens, in);
      arguments.b.data = g.dy.at(whole_tokens, out);
      g.rest(&arguments);
    }
  });
}

Result<Contender> prepare_gradient(const Xsmm& xsmm, linear::LinearData& data) {
  const linear::LinearCase& c = data.spec();
  const LayoutView view = data.layout().view();
  std::vector<std::function<void(int)>> ways;
  for (const int64_t chunk : token_counts(c.n)) {
    Gradient g{.x = panel_of(data.x(), c.x_order),
               .dy = panel_of(data.dy(), c.y_order),
               .refs = walk_of(view, false).refs,
               .rows = out_of(view),
               .dw = static_cast<char*>(data.output().data),
               .n = c.n,
               .b = c.block,
               .block_bytes = c.block * c.block * size_of(data.output().dtype),
               .chunk = chunk,
               .threads = number(std::max<int64_t>(c.threads, 1))};
    if (add_kernels(xsmm, g, c.dtype, data.output().dtype)) ways.push_back([g](int) { run_gradient(g); });
  }
  if (ways.empty()) return no_kernel(xsmm, c.dtype);
  return Contender{.name = xsmm.name, .run = ways[fastest(ways, 1)], .copies = 1};
}

Result<Contender> prepare_product(const Xsmm& xsmm, const linear::LinearData& data, size_t rotate_bytes) {
  const auto product = std::make_shared<const Product>(make_product(data));
  const Product& p = *product;
  const gemm::Bytes stored = stored_weights(data, p);
  const int copies = copies_for(stored.size(), rotate_bytes);
  const auto weights = std::make_shared<const std::vector<gemm::Bytes>>(static_cast<size_t>(copies), stored);
  std::vector<std::function<void(int)>> ways;
  for (const int64_t tile : token_counts(p.n)) {
    Tiling tiling{tile, false, product_kernel(xsmm, p, tile), nullptr};
    if (p.n % tile != 0) tiling.rest = product_kernel(xsmm, p, p.n % tile);
    if (tiling.whole == nullptr || (p.n % tile != 0 && tiling.rest == nullptr)) continue;
    for (const bool tiles_outside : {false, true}) {
      tiling.tiles_outside = tiles_outside;
      ways.push_back([product, weights, tiling](int copy) {
        run_product(*product, tiling, (*weights)[static_cast<size_t>(copy)].data());
      });
    }
  }
  if (ways.empty()) return no_kernel(xsmm, p.dtype);
  return Contender{.name = xsmm.name, .run = ways[fastest(ways, copies)], .copies = copies};
}

}  // namespace

Result<Contender> prepare_libxsmm(linear::LinearData& data, size_t rotate_bytes) {
  static const Result<Xsmm> loaded = load();
  if (!loaded.ok()) return loaded.status();
  const Xsmm& xsmm = *loaded;
  const linear::LinearCase& c = data.spec();
  const Layout& layout = data.layout();
  if (c.dtype == DType::f16) return Status(StatusCode::unsupported, xsmm.name + ": f32, f64 and bf16 only");
  BS_RETURN_IF_ERROR(check_plain(xsmm.name, c));
  if (layout.out_features() % c.block != 0 || layout.in_features() % c.block != 0) {
    return Status(StatusCode::unsupported, xsmm.name + ": whole blocks only");
  }
  auto contender =
      c.pass == gemm::Pass::wgrad ? prepare_gradient(xsmm, data) : prepare_product(xsmm, data, rotate_bytes);
  if (!contender.ok()) return contender.status();
  BS_RETURN_IF_ERROR(check_output(*contender, data));
  return contender;
}

}  // namespace blocksparse::bench
