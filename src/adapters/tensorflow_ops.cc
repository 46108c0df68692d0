// Registers the ops while TensorFlow opens this library. Without TensorFlow the library registers nothing and keeps the
// reason.
#include <atomic>

#include "adapters/tensorflow_api.h"
#include "core/text.h"

namespace blocksparse::tensorflow {

namespace {

std::atomic<int32_t> threads{0};

// The sizes of results depend on attributes, which shape functions cannot read as numbers through the C interface. So
// Python sets the shapes of what it builds. A graph that was read from a file runs correctly without them.
void unknown_shapes(TfShapeContext* context, TfStatus* status) { api.unknown_shape(context, status); }

Attributes read(TfConstruction* construction) {
  const StatusHandle status;
  Attributes made;
  const auto has = [&](const char* name) {
    const bool found = api.has_attribute(construction, name, status);
    status.require();
    return found;
  };
  const auto flag = [&](const char* name, bool& value) {
    unsigned char byte = 0;
    if (has(name)) api.bool_attribute(construction, name, &byte, status);
    status.require();
    value = byte != 0;
  };
  const auto count = [&](const char* name, int64_t& value) {
    if (has(name)) api.int64_attribute(construction, name, &value, status);
    status.require();
    if (value > 1) throw Failure{kInvalidArgument, concat("[blocksparse] ", name, " is ", value, ", needs 0 or 1")};
  };
  flag("transposed", made.transposed);
  flag("features_first", made.features_first);
  flag("channels_last", made.channels_last);
  flag("gate_gradient", made.gate_gradient);
  count("gate_count", made.gates);
  count("bias_count", made.biases);
  count("order_count", made.orders);
  count("length_count", made.lengths);
  if (has("geometry")) {
    int32_t size = 0, total = 0;
    api.attribute_size(construction, "geometry", &size, &total, status);
    status.require();
    made.geometry.resize(static_cast<size_t>(size));
    api.int64_list_attribute(construction, "geometry", made.geometry.data(), size, status);
    status.require();
  }
  return made;
}

void* refuse(TfConstruction* construction, const Failure& failed) {
  const StatusHandle status;
  status.set(failed);
  api.construction_failure(construction, status);
  return nullptr;
}

void* create(TfConstruction* construction) {
  try {
    return new Attributes(read(construction));
  } catch (const Failure& failed) {
    return refuse(construction, failed);
  } catch (const std::exception& error) {
    return refuse(construction, {kResourceExhausted, error.what()});
  }
}

void destroy(void* kernel) { delete static_cast<Attributes*>(kernel); }

void register_op(const Op& op) {
  const StatusHandle status;
  TfOpBuilder* builder = api.new_op(op.name);
  for (const char* spec : op.attributes) api.add_attribute(builder, spec);
  for (const char* spec : op.inputs) api.add_input(builder, spec);
  for (const char* spec : op.outputs) api.add_output(builder, spec);
  api.set_shape_function(builder, unknown_shapes);
  api.register_op(builder, status);
  status.require();
  api.register_kernel(op.name, api.new_kernel(op.name, "CPU", create, op.compute, destroy), status);
  status.require();
}

std::string register_all() {
  try {
    if (const char* missing = find_api(); missing != nullptr) return missing;
    for (const auto& family : {linear_ops(), conv_ops(), lstm_ops()}) {
      for (const Op& op : family) register_op(op);
    }
    return "";
  } catch (const Failure& failed) {
    return failed.message;
  }
}

const std::string failure = register_all();  // when the library is opened

}  // namespace

bs_stream stream() { return {nullptr, threads.load(std::memory_order_relaxed), BS_MATH_IEEE}; }

}  // namespace blocksparse::tensorflow

// Returns "" or the reason why there are no ops.
extern "C" BS_API const char* bs_tensorflow_failure() { return blocksparse::tensorflow::failure.c_str(); }

// Sets the number of threads of every op. 0, the default, is the core's default.
extern "C" BS_API void bs_tensorflow_set_threads(int32_t threads) { blocksparse::tensorflow::threads = threads; }
