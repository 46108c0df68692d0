#include "opponents.h"

#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <limits>

#include "core/ceil_div.h"
#include "core/index.h"
#include "core/text.h"
#include "cuda/memory.h"

namespace blocksparse::bench {

const std::vector<Opponent>& opponents() {
  static const std::vector<Opponent> list = {
      {"openblas", true, prepare_openblas},
      {"onednn", true, prepare_onednn, DeviceType::cpu, prepare_onednn_conv},
      {"libxsmm", false, prepare_libxsmm},
      {"cublas", true, prepare_cublas, DeviceType::cuda},
      {"cublas_tf32", true, prepare_cublas_tf32, DeviceType::cuda},
      {"cusparse_bsr", false, prepare_cusparse_bsr, DeviceType::cuda},
      {"cusparse_ell", false, prepare_cusparse_ell, DeviceType::cuda},
  };
  return list;
}

namespace {

// Calls body(offset in the dense matrix, offset in the values, elements) for each row of each block.
template <class Body>
void for_each_block_row(const linear::LinearData& data, Body&& body) {
  LayoutView view = data.layout().view();
  const auto refs = walk_of(view, false).refs;
  const auto rows = out_of(view);
  const int64_t b = view.block_size;
  for (int64_t i = 0; i < view.blocks; ++i) {
    const int64_t out = rows[static_cast<size_t>(i)] * b, in = refs[static_cast<size_t>(i)].from * b;
    const int64_t width = std::min(b, view.in_features - in);
    for (int64_t o = 0; o < std::min(b, view.out_features - out); ++o) {
      body((out + o) * view.in_features + in, (i * b + o) * b, width);
    }
  }
}

// Copies the blocks of W into the dense W [out, in], which is zero so far.
void store_weights(const linear::LinearData& data, gemm::Bytes& dense) {
  const Tensor& w = data.weights();
  const int64_t size = size_of(w.dtype);
  for_each_block_row(data, [&](int64_t to, int64_t from, int64_t count) {
    std::memcpy(dense.data() + to * size, static_cast<const char*>(w.data) + from * size,
                static_cast<size_t>(count * size));
  });
}

// Copies the blocks of a dense dW [out, in] into the problem's output, so that it can be compared.
void store_gradient(const gemm::Bytes& dense, linear::LinearData& data) {
  const Tensor& dw = data.output();
  const int64_t size = size_of(dw.dtype);
  std::memset(dw.data, 0, static_cast<size_t>(dw.shape[0] * dw.stride[0] * size));  // ragged blocks end in zeros
  for_each_block_row(data, [&](int64_t from, int64_t to, int64_t count) {
    std::memcpy(static_cast<char*>(dw.data) + to * size, dense.data() + from * size, static_cast<size_t>(count * size));
  });
}

}  // namespace

Matrix matrix_of(const Tensor& t, Order order) {
  const bool last = order == Order::features_last;
  return {t.data, t.shape[0], t.shape[1], t.stride[last ? 0 : 1], last};
}

DenseProduct dense_product(const linear::LinearData& data) {
  const linear::LinearCase& c = data.spec();
  const bool gradient = c.pass == gemm::Pass::wgrad;
  const int64_t out = data.layout().out_features(), in = data.layout().in_features();
  const DType dtype = gradient ? data.output().dtype : c.dtype;
  auto memory = std::make_shared<gemm::Bytes>(static_cast<size_t>(out * in * size_of(dtype)), char{0});
  const Matrix x = matrix_of(data.placed(data.x()), c.x_order);
  if (gradient)
    return {matrix_of(data.placed(data.dy()), c.y_order).t(), x, {memory->data(), out, in, in, true}, memory};
  store_weights(data, *memory);
  const Matrix w{nullptr, out, in, in, true}, y = matrix_of(data.placed(data.output()), c.y_order);
  return {x, c.pass == gemm::Pass::fprop ? w.t() : w, y, memory};
}

int copies_for(size_t bytes, size_t rotate_bytes) {
  return static_cast<int>(std::clamp<size_t>(ceil_div(rotate_bytes, std::max<size_t>(bytes, 1)), 1, 4096));
}

Status check_plain(const std::string& library, const linear::LinearCase& c) {
  const bool epilogue = c.bias || c.residual || c.activation != Activation::none || c.hidden > 0;
  if (epilogue || c.transposed || c.gates || c.dgates || c.pairs != 1 || c.accumulate || c.n == 0) {
    return {StatusCode::unsupported,
            concat(library, ": no epilogue, gates, sum of pairs, accumulation or transposed view, and n > 0 only")};
  }
  return {};
}

linear::LinearData::Error check_results(linear::LinearData& data) {
  constexpr double kLarge = 2e8;  // flops: 1.4 s of the reference on Zen 3
  return data.flops() < kLarge ? data.compare() : data.spot_check(2000);
}

linear::LinearData::Error check_results(conv::ConvData& data) {
  constexpr double kLarge = 5e7;  // flops: the reference looks each pixel up
  return data.flops() < kLarge ? data.compare() : data.spot_check(2000);
}

Status check_output(const Contender& contender, linear::LinearData& data, const DenseProduct* dense,
                    const void* on_card, double allowed) {
  data.poison();
  BS_RETURN_IF_ERROR(data.upload_outputs());
  contender.run(0);
  BS_RETURN_IF_ERROR(data.download_outputs());
  if (dense != nullptr && data.spec().pass == gemm::Pass::wgrad) {
    auto& memory = *dense->memory;
    if (on_card != nullptr) {
      BS_RETURN_IF_ERROR(cuda::copy_to_host(data.spec().device, memory.data(), on_card, memory.size()));
    }
    store_gradient(memory, data);
  }
  const auto error = check_results(data);
  if (!(error.worst <= allowed)) {
    return {StatusCode::unsupported, concat(contender.name, " gives a wrong result: ", error.where)};
  }
  const std::string overrun = data.overrun();
  if (overrun.empty()) return {};
  return {StatusCode::unsupported, concat(contender.name, " writes beyond its result: ", overrun)};
}

size_t fastest(const std::vector<std::function<void(int)>>& ways, int copies) {
  using Clock = std::chrono::steady_clock;
  constexpr int kRounds = 5;
  constexpr double kSampleUs = 1000;
  std::vector<double> best(ways.size(), std::numeric_limits<double>::infinity());
  if (ways.size() <= 1) return 0;
  int copy = 0;
  for (int round = 0; round <= kRounds; ++round) {
    for (size_t i = 0; i < ways.size(); ++i) {
      const auto start = Clock::now();
      double spent = 0;
      int calls = 0;
      for (; spent < kSampleUs; ++calls) {
        ways[i](copy);
        copy = (copy + 1) % copies;
        spent = std::chrono::duration<double, std::micro>(Clock::now() - start).count();
      }
      if (round > 0) best[i] = std::min(best[i], spent / calls);  // the first round warms up
    }
  }
  return static_cast<size_t>(std::min_element(best.begin(), best.end()) - best.begin());
}

Result<void*> open_library(const char* variable, std::initializer_list<const char*> names) {
  // Lazily, because a library may name functions that only its other uses call.
  if (const char* path = std::getenv(variable); path != nullptr && *path != '\0') {
    if (void* library = dlopen(path, RTLD_LAZY)) return library;
    return Status(StatusCode::unavailable, concat(variable, "=", path, ": ", dlerror()));
  }
  for (const char* name : names) {
    if (void* library = dlopen(name, RTLD_LAZY)) return library;
  }
  return Status(StatusCode::unavailable, concat("no ", *names.begin(), " (", variable, " may name the file)"));
}

}  // namespace blocksparse::bench
