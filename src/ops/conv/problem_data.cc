// Makes the data of a convolution, and compares results with the reference.
#include <algorithm>
#include <cmath>
#include <limits>

#include "blocksparse/blocksparse.h"
#include "core/convert.h"
#include "core/random.h"
#include "core/text.h"
#include "ops/conv/geometry.h"
#include "ops/conv/problem.h"

namespace blocksparse::conv {

namespace {

using gemm::epsilon;
using gemm::kGuard;
using gemm::kPoison;

int64_t count_of(const Tensor& t) {
  int64_t count = t.rank > 0 ? 1 : 0;
  for (int i = 0; i < t.rank; ++i) count *= t.shape[static_cast<size_t>(i)];
  return count;
}

// A dense block of the shape and strides of `tensor`.
Block make_block(Tensor tensor) {
  Block block;
  block.count = count_of(tensor);
  block.bytes.assign(static_cast<size_t>(block.count * size_of(tensor.dtype) + 2 * kGuard), kPoison);
  block.tensor = tensor;
  block.tensor.data = block.bytes.data() + kGuard;
  return block;
}

Block make_array(DType dtype, std::initializer_list<int64_t> shape) {
  return make_block(Tensor(nullptr, dtype, shape));
}

Tensor images_tensor(DType dtype, int64_t n, int64_t channels, const SpatialSizes& size, int32_t rank, bool last) {
  Tensor t;
  t.dtype = dtype;
  t.rank = rank + 2;
  t.shape[0] = n;
  t.shape[1] = channels;
  int64_t pixels = 1;
  for (auto i = static_cast<size_t>(rank); i-- > 0;) {
    t.shape[i + 2] = size[i];
    t.stride[i + 2] = pixels * (last ? channels : 1);
    pixels *= size[i];
  }
  t.stride[1] = last ? 1 : pixels;
  t.stride[0] = pixels * channels;
  return t;
}

double normal(Random& rng) {
  return std::sqrt(-2 * std::log(1 - rng.uniform())) * std::cos(6.283185307179586 * rng.uniform());
}

// Fills with values that are exact in the dtype, and returns the largest magnitude. A normal number takes 50 ns, so
// values come from a table.
double fill(const Block& block, Random& rng, bool integers) {
  static const std::vector<double> table = [] {
    Random of_table(7);
    std::vector<double> values(1 << 16);
    for (double& value : values) value = normal(of_table);
    return values;
  }();
  double largest = 0;
  for (int64_t i = 0; i < block.count; ++i) {
    const double value = integers ? static_cast<double>(rng.below(5) - 2) : table[rng.bits() % table.size()];
    store_element(block.tensor.data, i, block.tensor.dtype, value);
    largest = std::max(largest, std::abs(load_element(block.tensor.data, i, block.tensor.dtype)));
  }
  return largest;
}

// The values in f64, with their strides.
Block wide(const Block& block) {
  if (!block.tensor.given()) return {};
  Tensor tensor = block.tensor;
  tensor.dtype = DType::f64;
  Block copy = make_block(tensor);
  for (int64_t i = 0; i < block.count; ++i) {
    store_element(copy.tensor.data, i, DType::f64, load_element(block.tensor.data, i, block.tensor.dtype));
  }
  return copy;
}

// The part of a block that lies beyond the filter must not matter: it becomes NaN.
void poison_beyond(const Block& w, const LayoutView& view, int64_t taps) {
  const auto refs = walk_of(view, false).refs;
  const auto rows = out_of(view);
  const int64_t b = view.block_size;
  for (int64_t i = 0; i < w.count; ++i) {
    const auto block = static_cast<size_t>(i / (taps * b * b));
    const bool inside =
        rows[block] * b + i / b % b < view.out_features && refs[block].from * b + i % b < view.in_features;
    if (!inside) store_element(w.tensor.data, i, w.tensor.dtype, NAN);
  }
}

double rounded(double value, DType dtype) {
  double bits = 0;  // room for an element of any dtype
  store_element(&bits, 0, dtype, value);
  return load_element(&bits, 0, dtype);
}

}  // namespace

Result<ConvData> ConvData::make(const ConvCase& c) {
  if (c.device.type == DeviceType::cuda) BS_RETURN_IF_ERROR(cuda_status());
  const auto layout = Layout::from_graph(c.graph,
                                         {.block_size = static_cast<int32_t>(c.block),
                                          .out_features = c.transposed ? c.in_channels : c.out_channels,
                                          .in_features = c.transposed ? c.out_channels : c.in_channels},
                                         c.seed);
  if (!layout.ok()) return layout.status();
  ConvData data(c, c.transposed ? layout->t() : *layout);
  BS_RETURN_IF_ERROR(data.make_data());
  return data;
}

Status ConvData::make_data() {
  const ConvCase& c = case_;
  view_ = layout_;
  BS_RETURN_IF_ERROR(check_geometry("problem", c.geometry));
  const auto out_size = output_size("problem", c.geometry, c.size);
  if (!out_size.ok()) return out_size.status();
  const int64_t b = layout_.block_size(), in = layout_.in_features(), out = layout_.out_features();
  const int64_t taps = gather_of(c.geometry, false).taps();
  const DType sums = sum_dtype(c.dtype);
  const int32_t rank = c.geometry.rank;
  const Tensor of_x = images_tensor(c.dtype, c.n, in, c.size, rank, c.channels_last);
  const Tensor of_y = images_tensor(c.dtype, c.n, out, *out_size, rank, c.channels_last);
  w_ = make_array(c.dtype, {layout_.blocks(), taps, b, b});
  if (c.gates) gates_ = make_array(sums, {layout_.blocks()});
  if (c.pass != Pass::dgrad) x_ = make_block(of_x);
  if (c.pass != Pass::fprop) dy_ = make_block(of_y);
  if (c.pass == Pass::wgrad) {
    y_ = make_array(c.dw_dtype.value_or(c.dtype), {layout_.blocks(), taps, b, b});
    before_ = make_block(y_.tensor);
    if (c.dgates) {
      dgates_ = make_array(sums, {layout_.blocks()});
      gates_before_ = make_array(sums, {layout_.blocks()});
    }
  } else {
    y_ = make_block(c.pass == Pass::fprop ? of_y : of_x);
  }
  if (c.pass == Pass::fprop && c.bias) bias_ = make_array(c.dtype, {out});
  if (c.pass == Pass::fprop && c.residual) residual_ = make_block(of_y);
  for (int64_t i = 0; c.order && i < in; ++i) order_.push_back(static_cast<int32_t>(i));
  fill_inputs(static_cast<uint64_t>(c.seed) + 1);
  view_.device = c.device;  // the workspace is that of the card
  workspace_.assign(workspace_size() + static_cast<size_t>(kGuard), kPoison);
  return c.device.type == DeviceType::cuda ? move_to_device() : Status();
}

void ConvData::fill_inputs(uint64_t seed) {
  Random rng(seed);
  const auto fill_given = [&](const Block& b) { return b.tensor.given() ? fill(b, rng, case_.integers) : 0; };
  max_w_ = fill_given(w_);
  poison_beyond(w_, plain_layout(), gather_of(case_.geometry, false).taps());
  fill_given(gates_);
  for (int64_t i = 0; i < gates_.count; i += 3) store_element(gates_.tensor.data, i, gates_.tensor.dtype, 0);
  max_x_ = fill_given(x_);
  max_dy_ = fill_given(dy_);
  fill_given(before_);
  fill_given(gates_before_);
  max_epilogue_ = fill_given(bias_);
  max_epilogue_ += fill_given(residual_);
  if (case_.order) rng.shuffle(order_);
  expected_.reset();
  expected_gates_.reset();
}

LayoutView ConvData::plain_layout() const {
  LayoutView plain = layout_;
  plain.transposed = false;
  return plain;
}

namespace {

Images images_of(const Block& block, int64_t channels, int32_t rank, bool last) {
  if (!block.tensor.given()) return {};
  Orders orders;
  auto images = check_images({"problem", "x", ConstTensor(block.tensor)}, channels, rank, orders);
  images->channels_last = last;
  return *images;
}

}  // namespace

// The call on the host's data, as it is.
Product ConvData::host_product() const {
  const bool backward = case_.pass == Pass::dgrad;
  const int32_t rank = case_.geometry.rank;
  const int64_t in = layout_.in_features(), out = layout_.out_features();
  const bool last = case_.channels_last;
  const int32_t* order = case_.order ? order_.data() : nullptr;
  return {.dtype = case_.dtype,
          .layout = plain_layout(),
          .by_in = layout_.transposed() != backward,
          .gather = gather_of(case_.geometry, case_.geometry.transposed != backward),
          .x = images_of(backward ? dy_ : x_, backward ? out : in, rank, last),
          .y = images_of(y_, backward ? in : out, rank, last),
          .residual = images_of(residual_, out, rank, last),
          .w = w_.tensor.data,
          .gates = gates_.tensor.data,
          .bias = bias_.tensor.data,
          .activation = case_.activation,
          .x_channels = backward ? nullptr : order,
          .y_channels = backward ? order : nullptr};
}

WeightGradient ConvData::host_gradient() const {
  const int32_t rank = case_.geometry.rank;
  const bool last = case_.channels_last, exchanged = layout_.transposed();
  const Images x = images_of(x_, layout_.in_features(), rank, last);
  const Images dy = images_of(dy_, layout_.out_features(), rank, last);
  const int32_t* order = case_.order ? order_.data() : nullptr;
  return {.dtype = case_.dtype,
          .dw_dtype = y_.tensor.dtype,
          .layout = plain_layout(),
          .gather = gather_of(case_.geometry, false),
          .gathers_rows = case_.geometry.transposed != exchanged,
          .rows = exchanged ? x : dy,
          .columns = exchanged ? dy : x,
          .row_channels = exchanged ? order : nullptr,
          .column_channels = exchanged ? nullptr : order,
          .w = w_.tensor.data,
          .gates = gates_.tensor.data,
          .accumulate = case_.accumulate};
}

void ConvData::run_reference() {
  const Block w = wide(w_), gates = wide(gates_), bias = wide(bias_), residual = wide(residual_);
  const Block x = wide(x_), dy = wide(dy_);
  if (case_.pass != Pass::wgrad) {
    expected_ = wide(y_);
    Product p = host_product();
    p.dtype = DType::f64;
    p.x.data = case_.pass == Pass::dgrad ? dy.tensor.data : x.tensor.data;
    p.y.data = expected_->tensor.data;
    p.residual.data = residual.tensor.data;
    p.w = w.tensor.data;
    p.gates = gates.tensor.data;
    p.bias = bias.tensor.data;
    reference_product(p);
    return;
  }
  expected_ = wide(before_);
  if (case_.dgates) expected_gates_ = wide(gates_before_);
  WeightGradient g = host_gradient();
  g.dtype = g.dw_dtype = DType::f64;
  const bool exchanged = layout_.transposed();
  g.rows.data = (exchanged ? x : dy).tensor.data;
  g.columns.data = (exchanged ? dy : x).tensor.data;
  g.w = w.tensor.data;
  g.gates = gates.tensor.data;
  g.dw = expected_->tensor.data;
  g.dgates = expected_gates_ ? expected_gates_->tensor.data : nullptr;
  reference_weight_gradient(g);
}

// The bound is |out - expected| <= c eps (k + 1) max|x| max|w|, where the sum has k products. check() adds the rounding
// of the result.
double ConvData::bound() const {
  const bool gradient = case_.pass == Pass::wgrad;
  const int64_t taps = gather_of(case_.geometry, false).taps();
  const bool by_in = layout_.transposed() != (case_.pass == Pass::dgrad);
  int64_t products = 0;
  if (gradient) {
    products = case_.n * host_gradient().plain().pixels();
  } else {
    const Header& header = header_of(plain_layout());
    products = (by_in ? header.out_blocks : header.in_blocks) * case_.block * taps;
  }
  const double scale = gradient ? max_x_ * max_dy_ : std::max(max_x_, max_dy_) * max_w_;
  const double gate_scale = case_.gates ? 6 : 1, k = static_cast<double>(products),
               eps = epsilon(sum_dtype(case_.dtype));
  const bool on_card = case_.device.type == DeviceType::cuda;
  const double product_eps =
      on_card && case_.tf32 && case_.dtype == DType::f32 ? 0x1.8p-11 : gemm::sum_epsilon(case_.dtype, case_.device);
  const double activated = case_.activation > Activation::relu ? 8 * eps * (1 + max_epilogue_) : 0;
  // On a card W may be rounded once more after its gates.
  const bool rounds = case_.gates && !gradient && on_card && size_of(case_.dtype) == 2;
  const double gated = rounds ? 6 * std::sqrt(k) * epsilon(case_.dtype) * scale * gate_scale : 0;
  return 2 * product_eps * (k + 1) * scale * gate_scale + 2 * eps * max_epilogue_ + activated + gated;
}

double ConvData::gate_bound() const {
  const auto area = static_cast<double>(gather_of(case_.geometry, false).taps() * case_.block * case_.block);
  const auto k = static_cast<double>(case_.n * host_gradient().plain().pixels());
  return 2 * gemm::sum_epsilon(case_.dtype, case_.device) * (k + area) * area * max_x_ * max_dy_ * max_w_;
}

void ConvData::check(double got, double expected, double bound, DType dtype, int64_t at, Error& error) const {
  if (case_.integers) expected = rounded(expected, dtype);
  const double allowed = case_.integers ? 0 : bound + 2 * epsilon(dtype) * std::abs(expected);
  gemm::note_error(got, expected, allowed, at, error);
}

ConvData::Error ConvData::compare() {
  if (!expected_) run_reference();
  Error error;
  const auto compare_all = [&](const Block& got, const Block& expected, double bound) {
    int64_t nonzero = 0;
    for (int64_t i = 0; i < got.count; ++i) {
      const double e = load_element(expected.tensor.data, i, DType::f64);
      nonzero += e != 0;
      check(load_element(got.tensor.data, i, got.tensor.dtype), e, bound, got.tensor.dtype, i, error);
    }
    return got.count == 0 ? 1 : static_cast<double>(nonzero) / static_cast<double>(got.count);
  };
  error.nonzero = compare_all(y_, *expected_, bound());
  if (expected_gates_) compare_all(dgates_, *expected_gates_, gate_bound());
  return error;
}

ConvData::Error ConvData::spot_check(int64_t count) {
  Error error;
  Random rng(1);
  const double allowed = bound();
  int64_t nonzero = 0;
  const Product p = case_.pass == Pass::wgrad ? Product{} : host_product();
  const WeightGradient g = case_.pass == Pass::wgrad ? host_gradient() : WeightGradient{};
  for (int64_t i = 0; i < count && y_.count > 0; ++i) {
    int64_t at = rng.below(y_.count);
    double expected = 0;
    if (case_.pass == Pass::wgrad) {
      const int64_t b = case_.block, taps = g.gather.taps(), block = at / (taps * b * b);
      const double gate = case_.gates ? load_element(gates_.tensor.data, block, gates_.tensor.dtype) : 1;
      const auto sum = reference_gradient_at(g, block, at / (b * b) % taps, at / b % b, at % b);
      expected = gate == 0 ? 0 : gate * sum.value_or(0);
      if (case_.accumulate) expected += load_element(before_.tensor.data, at, y_.tensor.dtype);
    } else {
      const int64_t image = rng.below(p.y.n), output = rng.below(p.y.channels), pixel = rng.below(p.y.pixels());
      const int64_t channel = p.y_channels == nullptr ? output : p.y_channels[output];
      at = image * p.y.image_stride() + channel * p.y.channel_stride() + pixel * p.y.pixel_stride();
      expected = reference_product_at(p, image, output, pixel);
    }
    nonzero += expected != 0;
    check(load_element(y_.tensor.data, at, y_.tensor.dtype), expected, allowed, y_.tensor.dtype, at, error);
  }
  error.nonzero = count == 0 ? 1 : static_cast<double>(nonzero) / static_cast<double>(count);
  return error;
}

double ConvData::flops() const {
  const ConvGeometry& g = case_.geometry;
  const auto out = output_size("problem", g, case_.size);
  double pixels = 1;
  for (size_t i = 0; i < static_cast<size_t>(g.rank); ++i) {
    pixels *= static_cast<double>(g.transposed ? case_.size[i] : (*out)[i]);
  }
  return 2 * static_cast<double>(case_.n) * pixels * static_cast<double>(gather_of(g, false).taps()) *
         static_cast<double>(layout_.blocks() * case_.block * case_.block);
}

double ConvData::bytes() const {
  double total = static_cast<double>(y_.count * size_of(y_.tensor.dtype));
  if (case_.pass != Pass::wgrad) total += static_cast<double>(w_.count * size_of(case_.dtype));
  for (const Block* b : {&x_, &dy_}) total += static_cast<double>(b->count * size_of(case_.dtype));
  return total;
}

}  // namespace blocksparse::conv
