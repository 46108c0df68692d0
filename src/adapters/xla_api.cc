#include "adapters/xla_api.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <utility>

#include "blocksparse/c_api.h"
#include "core/text.h"

namespace blocksparse::xla {

namespace {

constexpr int32_t kMetadataType = 1, kBufferType = 1, kArrayType = 1, kExecute = 3;
constexpr uint32_t kCommandBufferCompatible = 1;
constexpr int32_t kInt32 = 4, kInt64 = 5;                     // numbers of XLA's PrimitiveType
constexpr std::array<int32_t, 4> kDTypes = {11, 12, 16, 10};  // numbers of XLA's PrimitiveType for each DType

// Sizes of the members that are used. Newer versions have more members.
constexpr size_t kFrameSize = sizeof(CallFrame), kMetadataSize = offsetof(Metadata, traits) + sizeof(uint32_t);
constexpr size_t kVersionSize = offsetof(Version, minor) + sizeof(int32_t);
constexpr size_t kBufferSize = sizeof(Buffer);

std::atomic<int32_t> runtime_major = -1, runtime_minor = -1;

std::string dims_text(const Buffer& buffer) {
  std::string text = "[";
  for (int64_t i = 0; i < buffer.rank; ++i) text += concat(i == 0 ? "" : ", ", buffer.dims[i]);
  return text + "]";
}

int32_t code_of(StatusCode code) {  // of absl::StatusCode
  switch (code) {
    case StatusCode::ok: return 0;
    case StatusCode::invalid_argument: return 3;
    case StatusCode::unsupported: return 12;
    case StatusCode::unavailable: return 14;
    case StatusCode::out_of_memory: return 8;
  }
  return 2;
}

}  // namespace

// ---- Versions -------------------------------------------------------------------------------------------------------

VersionNumber negotiate(const Api* api) {
  constexpr VersionNumber kOurs{kMajor, kMinor}, kOldest{0, 1};
  if (api == nullptr) return kOldest;
  const VersionNumber theirs{api->version.major, api->version.minor};
  if (theirs.major != kMajor) return kOurs;
  return {kMajor, std::min(kMinor, theirs.minor)};
}

VersionNumber runtime_version() { return {runtime_major.load(), runtime_minor.load()}; }

MetadataExtension* asks_for_metadata(const CallFrame* frame) {
  for (Extension* at = frame->header.extension_start; at != nullptr; at = at->next) {
    if (at->type == kMetadataType) return reinterpret_cast<MetadataExtension*>(at);
  }
  return nullptr;
}

Error* answer_metadata(const CallFrame* frame, MetadataExtension* extension) {
  const bool says = frame->api != nullptr;  // versions before 0.2 give no api
  runtime_major = says ? frame->api->version.major : 0;
  runtime_minor = says ? frame->api->version.minor : 1;
  Metadata& metadata = *extension->metadata;
  if (extension->base.struct_size < sizeof(MetadataExtension) || metadata.struct_size < kMetadataSize) {
    runtime_minor = 0;
    return nullptr;  // nothing is written, so the runtime finds no version and refuses
  }
  const VersionNumber version = negotiate(frame->api);
  metadata.version.header = {kVersionSize, nullptr};
  metadata.version.major = version.major;
  metadata.version.minor = version.minor;
  metadata.traits = kCommandBufferCompatible;
  return nullptr;
}

Error* answer(const CallFrame* frame, const Status& status) {
  if (status.ok()) return nullptr;
  ErrorOptions options{{sizeof(ErrorOptions), nullptr}, status.message().c_str(), code_of(status.code())};
  return frame->api->create_error(&options);  // create_error copies the message
}

// ---- A call ---------------------------------------------------------------------------------------------------------

Status Call::begin(size_t numbers) {
  if (frame_->header.struct_size < kFrameSize) {
    return {StatusCode::unsupported, concat("[", op_, "] XLA's call has ", frame_->header.struct_size, " bytes, needs ",
                                            kFrameSize, ": the runtime is too old")};
  }
  if (frame_->stage != kExecute) return invalid("[", op_, "] a call in stage ", frame_->stage, ", needs ", kExecute);
  const Attributes& attributes = frame_->attributes;
  for (int64_t i = 0; i < attributes.size; ++i) {
    const Name& name = *attributes.names[i];
    if (std::string_view(name.text, name.size) != "numbers" || attributes.types[i] != kArrayType) continue;
    const auto& array = *static_cast<const Array*>(attributes.items[i]);
    if (array.dtype == kInt64) numbers_ = {static_cast<const int64_t*>(array.data), array.size};
  }
  if (numbers_.size() < std::max(numbers, kCommon)) {
    return invalid("[", op_, "] the attribute `numbers` has ", numbers_.size(), " integers of 64 bits, needs ",
                   std::max(numbers, kCommon));
  }
  if (number(0) == 0) return {};
  const auto current = cuda_current_device();
  if (!current.ok()) return current.status();
  device_ = *current;
  return {};
}

Status Call::buffers(size_t operands, size_t results) const {
  const auto optional = static_cast<size_t>(__builtin_popcountll(static_cast<uint64_t>(number(2))));
  const auto given = static_cast<size_t>(frame_->args.size), made = static_cast<size_t>(frame_->results.size);
  if (given == operands + optional && made >= results && made <= results + 1) return {};
  return invalid("[", op_, "] ", given, " operands and ", made, " results, needs ", operands + optional, " and ",
                 results, ", on a card and a workspace");
}

Result<const Buffer*> Call::next(const Buffers& from, size_t& at, const char* kind) {
  if (at >= static_cast<size_t>(from.size)) return invalid("[", op_, "] ", kind, " ", at, " is missing");
  const auto* buffer = static_cast<const Buffer*>(from.items[at]);
  if (from.types[at] != kBufferType || buffer->header.struct_size < kBufferSize) {
    return invalid("[", op_, "] ", kind, " ", at, " is no buffer");
  }
  ++at;
  return buffer;
}

Result<Tensor> Call::tensor_of(const Buffer& buffer) const {
  const auto* code = std::ranges::find(kDTypes, buffer.dtype);
  if (code == kDTypes.end()) {
    return invalid("[", op_, "] an array of XLA's type ", buffer.dtype,
                   ", needs one of float32, float64, bfloat16, float16");
  }
  if (buffer.rank > kMaxRank) {
    return invalid("[", op_, "] an array of ", buffer.rank, " dimensions, at most ", kMaxRank, " are possible");
  }
  Tensor tensor;
  tensor.data = buffer.data;
  tensor.dtype = static_cast<DType>(code - kDTypes.begin());
  tensor.device = device_;
  tensor.rank = static_cast<int32_t>(buffer.rank);
  int64_t step = 1;
  for (auto i = static_cast<size_t>(buffer.rank); i-- > 0; step *= buffer.dims[i]) {
    tensor.shape[i] = buffer.dims[i];
    tensor.stride[i] = step;
  }
  return tensor;
}

Result<Tensor> Call::next_operand() {
  const auto buffer = next(frame_->args, operand_, "operand");
  return buffer.ok() ? tensor_of(**buffer) : buffer.status();
}

Result<Tensor> Call::next_optional(int bit) { return has(bit) ? next_operand() : Tensor(); }

Result<Tensor> Call::next_result() {
  const auto buffer = next(frame_->results, result_, "result");
  return buffer.ok() ? tensor_of(**buffer) : buffer.status();
}

Result<std::span<const int32_t>> Call::next_integers() {
  const auto buffer = next(frame_->args, operand_, "operand");
  if (!buffer.ok()) return buffer.status();
  if ((*buffer)->dtype != kInt32 || (*buffer)->rank != 1) {
    return invalid("[", op_, "] operand ", operand_ - 1, " is XLA's type ", (*buffer)->dtype, " of ",
                   dims_text(**buffer), ", needs a row of int32");
  }
  return std::span(static_cast<const int32_t*>((*buffer)->data), static_cast<size_t>((*buffer)->dims[0]));
}

Result<LayoutView> Call::next_layout() {
  const auto words = next_integers();
  if (!words.ok()) return words.status();
  const LayoutView::Sizes sizes{static_cast<int32_t>(std::clamp<int64_t>(number(4), 0, 256)), number(5), number(6),
                                number(7)};
  auto view =
      device_.type == DeviceType::cpu ? LayoutView::from_index(*words) : LayoutView::on_device(*words, sizes, device_);
  if (!view.ok()) return view.status();
  if (view->block_size != sizes.block_size || view->out_features != sizes.out_features ||
      view->in_features != sizes.in_features || view->blocks != sizes.blocks) {
    return invalid("[", op_, "] the tables are of ", view->blocks, " blocks of ", view->block_size, " in ",
                   view->out_features, " x ", view->in_features, ", needs ", sizes.blocks, " of ", sizes.block_size,
                   " in ", sizes.out_features, " x ", sizes.in_features);
  }
  view->transposed = number(3) != 0;
  return view;
}

Result<Stream> Call::stream() const {
  Stream stream;
  stream.math = number(1) != 0 ? Math::tf32 : Math::ieee;
  if (device_.type == DeviceType::cpu) return stream;
  StreamArgument argument{{sizeof(StreamArgument), nullptr}, frame_->context, nullptr};
  if (Error* error = frame_->api->get_stream(&argument)) {
    ErrorArgument given{{sizeof(ErrorArgument), nullptr}, error};
    frame_->api->destroy_error(&given);
    return Status{StatusCode::unavailable, concat("[", op_, "] XLA's runtime gives no CUDA stream")};
  }
  stream.handle = argument.stream;
  return stream;
}

}  // namespace blocksparse::xla

extern "C" void bs_xla_versions(int32_t* ours, int32_t* theirs) {
  const auto runtime = blocksparse::xla::runtime_version();
  ours[0] = blocksparse::xla::kMajor;
  ours[1] = blocksparse::xla::kMinor;
  theirs[0] = runtime.major;
  theirs[1] = runtime.minor;
}
