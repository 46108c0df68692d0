// Dense products by oneDNN 3. Weights are packed beforehand into the form that its matmul asks for.
#include <dlfcn.h>
#include <sched.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string_view>
#include <type_traits>

#include "core/text.h"
#include "onednn.h"
#include "opponents.h"

namespace blocksparse::bench {

namespace {

Result<OneDnn> load() {
  const Result<void*> library = open_library("BLOCKSPARSE_ONEDNN", {"libdnnl.so.3", "libdnnl.so"});
  if (!library.ok()) return library.status();
  OneDnn dnn;
  std::string missing;
  auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(*library, name));
    if (function == nullptr && missing.empty()) missing = name;
  };
  find(dnn.version, "dnnl_version");
  find(dnn.engine_create, "dnnl_engine_create");
  find(dnn.stream_create, "dnnl_stream_create");
  find(dnn.stream_wait, "dnnl_stream_wait");
  find(dnn.strided_desc_create, "dnnl_memory_desc_create_with_strides");
  find(dnn.tagged_desc_create, "dnnl_memory_desc_create_with_tag");
  find(dnn.desc_equal, "dnnl_memory_desc_equal");
  find(dnn.desc_size, "dnnl_memory_desc_get_size");
  find(dnn.desc_destroy, "dnnl_memory_desc_destroy");
  find(dnn.memory_create, "dnnl_memory_create");
  find(dnn.memory_destroy, "dnnl_memory_destroy");
  find(dnn.matmul_create, "dnnl_matmul_primitive_desc_create");
  find(dnn.conv_create, "dnnl_convolution_forward_primitive_desc_create");
  find(dnn.conv_data_create, "dnnl_convolution_backward_data_primitive_desc_create");
  find(dnn.conv_weights_create, "dnnl_convolution_backward_weights_primitive_desc_create");
  find(dnn.reorder_create, "dnnl_reorder_primitive_desc_create");
  find(dnn.plan_query, "dnnl_primitive_desc_query");
  find(dnn.plan_form, "dnnl_primitive_desc_query_md");
  find(dnn.plan_destroy, "dnnl_primitive_desc_destroy");
  find(dnn.primitive_create, "dnnl_primitive_create");
  find(dnn.primitive_execute, "dnnl_primitive_execute");
  find(dnn.primitive_destroy, "dnnl_primitive_destroy");
  if (!missing.empty()) return Status(StatusCode::unavailable, concat("libdnnl has no ", missing, "; needs oneDNN 3"));
  const Version& v = *dnn.version();
  dnn.name = concat("onednn ", v.major, ".", v.minor, ".", v.patch);
  dnn.runtime = v.cpu_runtime;
  if (v.major != 3) return Status(StatusCode::unavailable, dnn.name + ": needs oneDNN 3");
  if (dnn.runtime == kRuntimeOpenMp) {  // from the OpenMP library with which it was linked, ours or another
    find(dnn.omp_set_threads, "omp_set_num_threads");
    find(dnn.omp_threads, "omp_get_max_threads");
    if (!missing.empty()) return Status(StatusCode::unavailable, concat(dnn.name, " finds no ", missing));
  }
  if (dnn.engine_create(&dnn.engine, kEngineCpu, 0) != 0 ||
      dnn.stream_create(&dnn.stream, dnn.engine, kStreamInOrder) != 0) {
    return Status(StatusCode::unavailable, dnn.name + " makes no CPU engine");
  }
  return dnn;
}

}  // namespace

const Result<OneDnn>& onednn() {
  static const Result<OneDnn> loaded = load();
  return loaded;
}

// TBB takes its number of threads from the CPUs that the process may use, and has no C function to set it.
Status check_threads(const OneDnn& dnn, int threads) {
  if (dnn.runtime == kRuntimeOpenMp) return {};
  if (dnn.runtime == kRuntimeSequential || dnn.runtime == kRuntimeThreadpool) {
    return threads == 1 ? Status() : Status(StatusCode::unsupported, dnn.name + " was built for one thread");
  }
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  const int usable = sched_getaffinity(0, sizeof(cpus), &cpus) == 0 ? CPU_COUNT(&cpus) : 0;
  if (dnn.runtime == kRuntimeTbb && usable == threads) return {};
  return {StatusCode::unsupported,
          concat(dnn.name, " was built for ", dnn.runtime == kRuntimeTbb ? "TBB" : "SYCL", ", which takes ", usable,
                 " threads, not ", threads, ": needs a build for OpenMP, or taskset (TBB)")};
}

namespace {

Owned desc_of(const OneDnn& dnn, const Matrix& m, DType dtype) {
  const int64_t dims[] = {m.rows, m.cols}, strides[] = {m.row_major ? m.ld : 1, m.row_major ? 1 : m.ld};
  return make(dnn.desc_destroy, dnn.strided_desc_create, 2, dims, type_of(dtype), strides);
}

Owned any_desc(const OneDnn& dnn, const Matrix& m, DType dtype) {
  const int64_t dims[] = {m.rows, m.cols};
  return make(dnn.desc_destroy, dnn.tagged_desc_create, 2, dims, type_of(dtype), kAnyForm);
}

struct Step {
  Owned primitive;
  std::array<Argument, 3> arguments;
  int count = 0;
};

// One way to the product: the steps, and what they need.
struct Way {
  std::vector<Step> before, after;  // reorders of activations and result, if the matmul chooses their form
  Step matmul;
  std::vector<Owned> memory;
  Owned plan, plain_weights, reorder_weights;
  Object weights_form = nullptr;
  std::vector<Owned> weights;  // copies, in that form
  size_t weights_at = 0;       // in the arguments of the matmul
};

Owned reorder(const OneDnn& dnn, Object from, Object to) {
  const Owned plan = make(dnn.plan_destroy, dnn.reorder_create, from, dnn.engine, to, dnn.engine, nullptr);
  return plan == nullptr ? nullptr : make(dnn.primitive_destroy, dnn.primitive_create, plan.get());
}

// Gives argument `at` of the matmul its memory: that of the matrix itself, if its form is the wanted one.
bool add_operand(const OneDnn& dnn, Way& way, size_t at, const Matrix& m, void* weights, Object given, Object wanted) {
  const Owned plain = make(dnn.memory_destroy, dnn.memory_create, given, dnn.engine, m.data ? m.data : weights);
  if (plain == nullptr) return false;
  way.memory.push_back(plain);
  const bool result = at == 2;
  Argument& argument = way.matmul.arguments[at];
  argument = {std::array{kSource, kWeights, kResult}[at], plain.get()};
  if (m.data != nullptr && dnn.desc_equal(given, wanted) != 0) return true;
  const Owned step = result ? reorder(dnn, wanted, given) : reorder(dnn, given, wanted);
  if (step == nullptr) return false;
  if (m.data == nullptr) {
    way.plain_weights = plain;
    way.reorder_weights = step;
    way.weights_form = wanted;
    way.weights_at = at;
    return true;
  }
  const Owned packed = make(dnn.memory_destroy, dnn.memory_create, wanted, dnn.engine, kAllocate);
  if (packed == nullptr) return false;
  way.memory.push_back(packed);
  argument.memory = packed.get();
  const Argument from{kSource, result ? packed.get() : plain.get()}, to{kResult, result ? plain.get() : packed.get()};
  (result ? way.after : way.before).push_back({step, {from, to}, 2});
  return true;
}

// Makes a way in which the weights have the form that the matmul likes best. With `any_form` all operands have such a
// form, and each call reorders them. Empty if oneDNN has only its reference for this.
std::optional<Way> make_way(const OneDnn& dnn, const DenseProduct& p, DType dtype, DType result_dtype, bool any_form) {
  const Matrix* matrices[] = {&p.a, &p.b, &p.c};
  const DType dtypes[] = {dtype, dtype, result_dtype};
  Owned given[3], asked[3];
  for (size_t i = 0; i < 3; ++i) {
    given[i] = desc_of(dnn, *matrices[i], dtypes[i]);
    asked[i] = any_form || matrices[i]->data == nullptr ? any_desc(dnn, *matrices[i], dtypes[i]) : given[i];
    if (given[i] == nullptr || asked[i] == nullptr) return {};
  }
  Way way;
  way.plan = make(dnn.plan_destroy, dnn.matmul_create, dnn.engine, asked[0].get(), asked[1].get(), nullptr,
                  asked[2].get(), nullptr);
  const char* name = nullptr;
  if (way.plan == nullptr || dnn.plan_query(way.plan.get(), kQueryName, 0, &name) != 0) return {};
  if (std::string_view(name).starts_with("ref")) return {};
  way.matmul.primitive = make(dnn.primitive_destroy, dnn.primitive_create, way.plan.get());
  if (way.matmul.primitive == nullptr) return {};
  way.matmul.count = 3;
  for (size_t i = 0; i < 3; ++i) {
    const Object wanted = dnn.plan_form(way.plan.get(), std::array{kQuerySource, kQueryWeights, kQueryResult}[i], 0);
    if (!add_operand(dnn, way, i, *matrices[i], p.memory->data(), given[i].get(), wanted)) return {};
  }
  return way;
}

void execute(const OneDnn& dnn, const Step& step) {
  dnn.primitive_execute(step.primitive.get(), dnn.stream, step.count, step.arguments.data());
}

bool pack_weights(const OneDnn& dnn, Way& way, int copies) {
  while (way.reorder_weights != nullptr && way.weights.size() < static_cast<size_t>(copies)) {
    way.weights.push_back(make(dnn.memory_destroy, dnn.memory_create, way.weights_form, dnn.engine, kAllocate));
    const Object packed = way.weights.back().get();
    if (packed == nullptr) return false;
    execute(dnn, {way.reorder_weights, {Argument{kSource, way.plain_weights.get()}, Argument{kResult, packed}}, 2});
  }
  return dnn.stream_wait(dnn.stream) == 0;
}

void run(const OneDnn& dnn, const Way& way, int threads, int copy) {
  const ThreadCount count(dnn, threads);
  for (const Step& step : way.before) execute(dnn, step);
  Step matmul = way.matmul;
  if (!way.weights.empty()) matmul.arguments[way.weights_at].memory = way.weights[static_cast<size_t>(copy)].get();
  execute(dnn, matmul);
  for (const Step& step : way.after) execute(dnn, step);
  dnn.stream_wait(dnn.stream);
}

}  // namespace

Result<Contender> prepare_onednn(linear::LinearData& data, size_t rotate_bytes) {
  if (!onednn().ok()) return onednn().status();
  const OneDnn& dnn = *onednn();
  const linear::LinearCase& c = data.spec();
  const int threads = static_cast<int>(std::max<int64_t>(c.threads, 1));
  if (c.dtype == DType::f64) return Status(StatusCode::unsupported, dnn.name + ": f32, bf16 and f16 only");
  BS_RETURN_IF_ERROR(check_plain(dnn.name, c));
  BS_RETURN_IF_ERROR(check_threads(dnn, threads));

  const ThreadCount count(dnn, threads);
  const DenseProduct product = dense_product(data);
  std::vector<std::shared_ptr<Way>> ways;
  std::vector<std::function<void(int)>> runs;
  for (const DenseProduct& p : {product, product.t()}) {
    for (const bool any_form : {false, true}) {
      if (!p.c.row_major && !any_form) continue;  // only the reference writes columns
      auto way = make_way(dnn, p, c.dtype, data.output().dtype, any_form);
      if (!way || !pack_weights(dnn, *way, 1)) continue;
      ways.push_back(std::make_shared<Way>(*std::move(way)));
      runs.push_back(
          [&dnn, threads, way = ways.back(), memory = product.memory](int copy) { run(dnn, *way, threads, copy); });
    }
  }
  if (ways.empty()) {
    return Status(StatusCode::unsupported, concat(dnn.name, " has no fast ", name_of(c.dtype), " matmul for this CPU"));
  }
  const size_t best = fastest(runs, 1);
  Way& way = *ways[best];
  Contender contender{.name = dnn.name, .run = runs[best], .copies = 1};
  if (way.weights_form != nullptr) contender.copies = copies_for(dnn.desc_size(way.weights_form), rotate_bytes);
  if (!pack_weights(dnn, way, contender.copies)) return Status(StatusCode::out_of_memory, dnn.name + ": no memory");
  BS_RETURN_IF_ERROR(check_output(contender, data, &product));
  return contender;
}

}  // namespace blocksparse::bench
