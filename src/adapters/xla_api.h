// What handlers for XLA's custom calls use of XLA: its C interface ("FFI"), declared here by structs of our own. No
// header of XLA is needed and nothing is linked. A call brings the functions that its handler may call.
//
// The structs are those of every version of the interface from 0.1 on (jaxlib 0.4.38). Every struct begins with its
// size, and newer versions have added members at the end. Whether a runtime accepts a handler depends on the version
// that the handler reports: see negotiate().
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <span>
#include <stdexcept>

#include "adapters/plain_arithmetic.h"
#include "blocksparse/blocksparse.h"

namespace blocksparse::xla {

// ---- XLA's structs --------------------------------------------------------------------------------------------------

struct Error;    // made and freed by XLA
struct Context;  // of one call

struct Extension {
  size_t struct_size;
  int32_t type;  // 1: MetadataExtension
  Extension* next;
};

// The first member of every struct that is passed.
struct Header {
  size_t struct_size;
  Extension* extension_start;
};

struct Version {
  Header header;
  int32_t major, minor;
};

struct Metadata {
  size_t struct_size;
  Version version;  // written by the handler
  uint32_t traits;  // written by the handler; 1: a call may be captured in a command buffer
};

struct MetadataExtension {
  Extension base;
  Metadata* metadata;
};

struct ErrorOptions {
  Header header;
  const char* message;
  int32_t code;
};

struct ErrorArgument {
  Header header;
  Error* error;
};

struct StreamArgument {
  Header header;
  Context* context;
  void* stream;  // written by XLA: a cudaStream_t
};

struct Api {
  Header header;
  Version version;  // of the runtime
  const void* internal;
  Error* (*create_error)(ErrorOptions*);
  void* get_message;
  void (*destroy_error)(ErrorArgument*);
  void* register_handler;
  Error* (*get_stream)(StreamArgument*);
};

struct Buffer {
  Header header;
  int32_t dtype;
  void* data;
  int64_t rank;
  int64_t* dims;
};

struct Buffers {
  Header header;
  int64_t size;
  int32_t* types;  // 1: Buffer
  void** items;
};

struct Name {
  const char* text;  // without a zero at the end
  size_t size;
};

struct Array {
  int32_t dtype;
  size_t size;
  void* data;
};

struct Attributes {
  Header header;
  int64_t size;
  int32_t* types;  // 1: Array
  Name** names;
  void** items;
};

struct CallFrame {
  Header header;
  const Api* api;
  Context* context;
  int32_t stage;  // 3: execute
  Buffers args, results;
  Attributes attributes;
};

// ---- What handlers use ----------------------------------------------------------------------------------------------

// The newest version that the structs above were compared with.
constexpr int32_t kMajor = 0, kMinor = 4;

// The version to report to a runtime: ours, or the runtime's if that is older. A runtime refuses handlers newer than
// itself without a message. A runtime of another major version is told ours, which it refuses.
struct VersionNumber {
  int32_t major, minor;
};
VersionNumber negotiate(const Api* api);
// The version of the runtime that has registered a handler last; {-1, -1} before the first. A runtime before 0.2 does
// not give its version and counts as 0.1. One that asks for less metadata than 0.1 has counts as 0.0.
VersionNumber runtime_version();

// One call of an op, whose name begins messages. It has one attribute, `numbers`: one array of 64-bit integers is
// decoded faster than ten attributes. Operands are taken in order. An optional operand that is missing takes no place.
class Call {
 public:
  Call(const char* op, const CallFrame* frame) : op_(op), frame_(frame) {}

  Status begin(size_t numbers);  // to be called first; needs at least `numbers` numbers

  // Numbers that every op has: 0 device (0 CPU, 1 CUDA), 1 whether tf32 is allowed, 2 bits of the optional operands
  // that are given, 3 whether the layout is transposed, 4 its block size, 5 its out features, 6 its in features, 7 its
  // blocks (5 to 7 of the untransposed layout). Those of the op follow.
  static constexpr size_t kCommon = 8;
  int64_t number(size_t i) const { return numbers_[i]; }
  std::span<const int64_t> numbers_from(size_t i) const { return numbers_.subspan(i); }

  Status buffers(size_t operands, size_t results) const;  // checks how many there are; optional operands count on top
  bool has(int bit) const { return (numbers_[2] >> bit & 1) != 0; }

  Result<Tensor> next_operand();
  Result<Tensor> next_optional(int bit);  // an empty tensor if it is missing
  Result<std::span<const int32_t>> next_integers();
  Result<Tensor> next_result();

  Result<LayoutView> next_layout();  // takes the operand that holds its tables
  const Device& device() const { return device_; }
  Result<Stream> stream() const;

  // Runs body(workspace). On a card the workspace is the last result. On the CPU a small one belongs to the thread.
  template <class Body>
  Status with_workspace(size_t bytes, Body&& body);

 private:
  Result<const Buffer*> next(const Buffers& from, size_t& at, const char* kind);
  Result<Tensor> tensor_of(const Buffer& buffer) const;

  const char* op_;
  const CallFrame* frame_;
  std::span<const int64_t> numbers_;
  Device device_;
  size_t operand_ = 0, result_ = 0;
};

template <class Body>
Status Call::with_workspace(size_t bytes, Body&& body) {
  constexpr size_t kSmall = 16384;
  if (bytes == 0) return body(Workspace{});
  if (device_.type == DeviceType::cuda) {
    const auto given = next(frame_->results, result_, "result");
    if (!given.ok()) return given.status();
    const int64_t room = (*given)->rank == 1 ? (*given)->dims[0] : 0;
    return body(Workspace{(*given)->data, static_cast<size_t>(room)});
  }
  if (bytes <= kSmall) {
    alignas(64) static thread_local char small[kSmall];
    return body(Workspace{small, bytes});
  }
  const auto memory = std::make_unique_for_overwrite<char[]>(bytes);
  return body(Workspace{memory.get(), bytes});
}

Error* answer_metadata(const CallFrame* frame, MetadataExtension* extension);
Error* answer(const CallFrame* frame, const Status& status);
MetadataExtension* asks_for_metadata(const CallFrame* frame);

// Answers a question for metadata or runs `body` for a call. No exception passes through C.
template <class Body>
Error* handle(const char* op, void* call_frame, Body&& body) noexcept {
  const auto* frame = static_cast<const CallFrame*>(call_frame);
  if (MetadataExtension* extension = asks_for_metadata(frame)) return answer_metadata(frame, extension);
  try {
    const PlainArithmetic plain;
    Call call(op, frame);
    return answer(frame, body(call));
  } catch (const std::bad_alloc&) {
    return answer(frame, {StatusCode::out_of_memory, "out of memory"});
  } catch (const std::length_error&) {
    return answer(frame, {StatusCode::out_of_memory, "out of memory"});
  }
}

}  // namespace blocksparse::xla

// Takes the value out of a Result, or returns from the function with its status.
#define BS_TAKE(name, expression)    \
  auto name##_result = (expression); \
  if (!name##_result.ok()) {         \
    return name##_result.status();   \
  }                                  \
  auto name = *std::move(name##_result)
