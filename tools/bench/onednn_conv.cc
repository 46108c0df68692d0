// Dense and grouped convolutions by oneDNN 3. Activations are as they lie. The filter is packed beforehand into the
// form that oneDNN asks for, and dW stays in it.
#include <algorithm>
#include <array>
#include <numeric>
#include <vector>

#include "core/index.h"
#include "core/text.h"
#include "onednn.h"
#include "opponents.h"

namespace blocksparse::bench {

namespace {

enum { kTraining = 64, kInference = 96 };
constexpr int kDirect = 1;

using conv::ConvCase;
using conv::ConvData;
using gemm::Pass;

// The largest number of full groups into which the channels fall: 1 for a dense filter, 0 if there is none.
int64_t groups_of(const Layout& layout) {
  const LayoutView view = layout.view();
  const auto refs = walk_of(view, false).refs;
  const auto rows = out_of(view);
  const int64_t out = layout.out_blocks(), in = layout.in_blocks(), b = layout.block_size();
  if (layout.out_features() != out * b || layout.in_features() != in * b) return 0;
  for (int64_t g = std::gcd(out, in); g >= 1; --g) {
    if (out % g != 0 || in % g != 0 || layout.blocks() != out / g * in) continue;
    bool inside = true;
    for (size_t i = 0; i < rows.size(); ++i) inside = inside && rows[i] / (out / g) == refs[i].from / (in / g);
    if (inside) return g;
  }
  return 0;
}

// Calls body(place in the blocks, place in the dense filter [groups, out, in, taps]) for each weight.
template <class Body>
void for_each_weight(const ConvData& data, int64_t groups, Body body) {
  const LayoutView view = data.layout().view();
  const auto refs = walk_of(view, false).refs;
  const auto rows = out_of(view);
  const int64_t b = view.block_size, taps = data.weights().shape[1], in = view.in_features / groups;
  for (int64_t i = 0; i < view.blocks; ++i) {
    for (int64_t at = 0; at < taps * b * b; ++at) {
      const int64_t o = rows[static_cast<size_t>(i)] * b + at / b % b,
                    k = refs[static_cast<size_t>(i)].from * b + at % b;
      if (o < view.out_features && k < view.in_features) {
        body(i * taps * b * b + at, (o * in + k % in) * taps + at / (b * b));
      }
    }
  }
}

struct Convolution {
  Owned primitive, plan, forward, plain, reorder;
  Object weights_form = nullptr;
  std::vector<Owned> memory, weights;  // copies of the filter, or one dW
  std::array<Argument, 3> arguments;
  gemm::Bytes dense;
};

Status refuse(const ConvCase& c) {
  const bool epilogue = c.bias || c.residual || c.activation != Activation::none;
  const bool plain = !epilogue && !c.transposed && !c.gates && !c.dgates && !c.accumulate && !c.order && c.n > 0;
  if (plain && !c.geometry.transposed && c.dtype != DType::f64 && (!c.dw_dtype || *c.dw_dtype == c.dtype)) return {};
  return {StatusCode::unsupported, "onednn: plain convolutions of f32, bf16 and f16 only"};
}

Owned desc_of(const OneDnn& dnn, const Tensor& t) {
  return make(dnn.desc_destroy, dnn.strided_desc_create, t.rank, t.shape.data(), type_of(t.dtype), t.stride.data());
}

// The plan of the pass. A backward pass needs the plan of the forward one too.
Owned make_plan(const OneDnn& dnn, const ConvCase& c, Object x, Object w, Object y, Owned& forward) {
  const ConvGeometry& g = c.geometry;
  SpatialSizes dilation = {};
  for (size_t i = 0; i < dilation.size(); ++i) dilation[i] = g.dilation[i] - 1;
  const int64_t *stride = g.stride.data(), *apart = dilation.data();
  const int64_t *before = g.padding_before.data(), *after = g.padding_after.data();
  forward = make(dnn.plan_destroy, dnn.conv_create, dnn.engine, c.pass == Pass::fprop ? kInference : kTraining, kDirect,
                 x, w, nullptr, y, stride, apart, before, after, nullptr);
  if (c.pass == Pass::fprop || forward == nullptr) return forward;
  if (c.pass == Pass::dgrad) {
    return make(dnn.plan_destroy, dnn.conv_data_create, dnn.engine, kDirect, x, w, y, stride, apart, before, after,
                forward.get(), nullptr);
  }
  return make(dnn.plan_destroy, dnn.conv_weights_create, dnn.engine, kDirect, x, w, nullptr, y, stride, apart, before,
              after, forward.get(), nullptr);
}

void execute(const OneDnn& dnn, Object primitive, const Argument* arguments, int count) {
  dnn.primitive_execute(primitive, dnn.stream, count, arguments);
  dnn.stream_wait(dnn.stream);
}

// Adds a copy of the filter in oneDNN's form; for dW only the room for it.
bool add_weights(const OneDnn& dnn, Convolution& way, bool fill) {
  way.weights.push_back(make(dnn.memory_destroy, dnn.memory_create, way.weights_form, dnn.engine, kAllocate));
  if (way.weights.back() == nullptr) return false;
  const Argument arguments[] = {{kSource, way.plain.get()}, {kResult, way.weights.back().get()}};
  if (fill) execute(dnn, way.reorder.get(), arguments, 2);
  return true;
}

}  // namespace

Result<Contender> prepare_onednn_conv(ConvData& data, size_t rotate_bytes) {
  if (!onednn().ok()) return onednn().status();
  const OneDnn& dnn = *onednn();
  const ConvCase& c = data.spec();
  BS_RETURN_IF_ERROR(refuse(c));
  const int threads = static_cast<int>(std::max<int64_t>(c.threads, 1));
  BS_RETURN_IF_ERROR(check_threads(dnn, threads));
  const ThreadCount count(dnn, threads);
  const int64_t groups = std::max<int64_t>(1, groups_of(data.layout())), taps = data.weights().shape[1];
  const int64_t out = data.layout().out_features(), in = data.layout().in_features(), size = size_of(c.dtype);
  const bool gradient = c.pass == Pass::wgrad;
  auto way = std::make_shared<Convolution>();
  way->dense.assign(static_cast<size_t>(out * in / groups * taps * size), char{0});
  if (!gradient) {
    const auto* blocks = static_cast<const char*>(data.weights().data);
    for_each_weight(data, groups, [&](int64_t from, int64_t to) {
      std::copy_n(blocks + from * size, size, way->dense.data() + to * size);
    });
  }
  std::vector<int64_t> dims{out / groups, in / groups}, strides;
  if (groups > 1) dims.insert(dims.begin(), groups);
  dims.insert(dims.end(), c.geometry.kernel.begin(), c.geometry.kernel.begin() + c.geometry.rank);
  for (size_t i = 0; i < dims.size(); ++i) {
    strides.push_back(std::accumulate(dims.begin() + static_cast<std::ptrdiff_t>(i) + 1, dims.end(), int64_t{1},
                                      std::multiplies<>()));
  }
  const int rank = static_cast<int>(dims.size()), type = type_of(c.dtype);
  const Owned plain = make(dnn.desc_destroy, dnn.strided_desc_create, rank, dims.data(), type, strides.data());
  const Owned any = make(dnn.desc_destroy, dnn.tagged_desc_create, rank, dims.data(), type, kAnyForm);
  const Tensor &x = c.pass == Pass::dgrad ? data.output() : data.x(),
               &y = c.pass == Pass::fprop ? data.output() : data.dy();
  const Owned x_form = desc_of(dnn, x), y_form = desc_of(dnn, y);
  way->plan = make_plan(dnn, c, x_form.get(), any.get(), y_form.get(), way->forward);
  if (way->plan == nullptr) {
    return Status(StatusCode::unsupported,
                  concat(dnn.name, " has no ", name_of(c.dtype), " convolution for this problem"));
  }
  way->primitive = make(dnn.primitive_destroy, dnn.primitive_create, way->plan.get());
  way->weights_form = dnn.plan_form(way->plan.get(), gradient ? kQueryDiffWeights : kQueryWeights, 0);
  way->plain = make(dnn.memory_destroy, dnn.memory_create, plain.get(), dnn.engine, way->dense.data());
  const Object from = gradient ? way->weights_form : plain.get(), to = gradient ? plain.get() : way->weights_form;
  const Owned reorder = make(dnn.plan_destroy, dnn.reorder_create, from, dnn.engine, to, dnn.engine, nullptr);
  if (way->primitive == nullptr || way->plain == nullptr || reorder == nullptr) {
    return Status(StatusCode::unsupported, dnn.name + " refuses this convolution");
  }
  way->reorder = make(dnn.primitive_destroy, dnn.primitive_create, reorder.get());
  const int copies = gradient ? 1 : copies_for(dnn.desc_size(way->weights_form), rotate_bytes);
  for (int i = 0; i < copies; ++i) {
    if (!add_weights(dnn, *way, !gradient)) return Status(StatusCode::out_of_memory, dnn.name + ": no memory");
  }
  way->memory = {make(dnn.memory_destroy, dnn.memory_create, x_form.get(), dnn.engine, x.data),
                 make(dnn.memory_destroy, dnn.memory_create, y_form.get(), dnn.engine, y.data)};
  way->arguments = {Argument{c.pass == Pass::dgrad ? kDiffSource : kSource, way->memory[0].get()},
                    Argument{c.pass == Pass::fprop ? kResult : kDiffResult, way->memory[1].get()},
                    Argument{gradient ? kDiffWeights : kWeights, nullptr}};
  Contender contender{.name = dnn.name, .run = {}, .copies = copies};
  contender.run = [&dnn, way, threads](int copy) {
    const ThreadCount of_run(dnn, threads);
    way->arguments[2].memory = way->weights[static_cast<size_t>(copy)].get();
    execute(dnn, way->primitive.get(), way->arguments.data(), 3);
  };
  if (groups > 1) contender.note = concat(groups, " groups");
  data.poison();
  contender.run(0);
  if (gradient) {
    const Argument arguments[] = {{kSource, way->weights[0].get()}, {kResult, way->plain.get()}};
    execute(dnn, way->reorder.get(), arguments, 2);
    for_each_weight(data, groups, [&](int64_t at, int64_t dense) {
      std::copy_n(way->dense.data() + dense * size, size, static_cast<char*>(data.output().data) + at * size);
    });
  }
  const auto error = check_results(data);
  if (error.worst <= 1) return contender;
  return Status(StatusCode::unsupported, concat(dnn.name, " gives a wrong result: ", error.where));
}

}  // namespace blocksparse::bench
