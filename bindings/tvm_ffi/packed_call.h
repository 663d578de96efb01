// SPDX-License-Identifier: Apache-2.0
// Ops as packed functions, each written once for both ways in which tensors arrive: as TVM-FFI
// hands them over (FfiObjects), or as PyTorch's objects (TorchObjects).
//
// A torch_<op> takes the id() of a tuple of the tensors (None where there is none) and then the
// other arguments, both in the order of <op>: what PyTorch's eager calls use, as it costs the host
// a third. Called with the GIL held and the tuple alive. The result is 1 once the op has run, and
// 0, with nothing written, where an object cannot be read so. Ops whose workspace Python keeps
// return the bytes that they need, with nothing written, where the tuple has fewer.
#pragma once

#include <cstdint>
#include <optional>
#include <type_traits>

#include "convert.h"
#include "torch_objects.h"

namespace mortar::ffi {

/// Results of the torch_* functions; a larger one is bytes of workspace. kNothing: the call itself
/// says that there is nothing to do.
constexpr std::int64_t kNothing = -1, kUnread = 0, kDone = 1;

/// The argument `name`, and the next one after it.
inline AnyView take_argument(PackedArgs args, int* next, const char* op, const char* name) {
  check_type(*next < args.size(), op, ": ", name, " is required, got ", args.size(), " arguments");
  return args[(*next)++];
}

/// Tensors as TVM-FFI hands them over, among the other arguments.
struct FfiObjects {
  FfiObjects(PackedArgs, int*) {}

  int remaining(PackedArgs args, int next) const { return args.size() - next; }

  Tensor tensor(PackedArgs args, int* next, const char* op, const char* name) {
    return to_tensor(take_argument(args, next, op, name), op, name);
  }

  bool flag(PackedArgs args, int* next, const char* op, const char* name) {
    const AnyView given = take_argument(args, next, op, name);
    if (given == nullptr) return false;
    const std::optional<DLTensor*> t = given.try_cast<DLTensor*>();
    check_type(t.has_value() && is_flag(**t), op, ": ", name,
               " must be one bool or uint8 on the CPU, or None");
    return value_of_flag(**t);
  }

  /// What surrounds an op: its device is the current one, its stream the caller's.
  struct Call {
    explicit Call(Device device) : guard(device), stream(current_stream(device)) {}
    DeviceGuard guard;
    Stream stream;
  };
};

/// Reads the arguments of a packed call from left to right.
template <class Source>
class ArgReader {
 public:
  ArgReader(PackedArgs args, const char* op) : args_(args), op_(op), source_(args, &next_) {}

  const char* op() const { return op_; }
  /// Arguments left to read, of any kind, and tensors.
  int remaining() const { return args_.size() - next_; }
  int remaining_tensors() const { return source_.remaining(args_, next_); }
  AnyView peek() const { return args_[next_]; }

  AnyView take(const char* name) { return take_argument(args_, &next_, op_, name); }

  Tensor tensor(const char* name) { return source_.tensor(args_, &next_, op_, name); }

  /// A bool in the memory of the CPU; false for None.
  bool flag(const char* name) { return source_.flag(args_, &next_, op_, name); }

  template <class T>
  T value(const char* name) {
    const AnyView given = take(name);
    const std::optional<T> v = given.template try_cast<T>();
    const char* wanted = std::is_same_v<T, bool> ? "a bool"
                         : std::is_integral_v<T> ? "an integer of 64 bits"
                                                 : "a number";
    check_type(v.has_value(), op_, ": ", name, " must be ", wanted, ", got ", kind_of(given));
    return *v;
  }

  std::int64_t integer(const char* name) { return value<std::int64_t>(name); }

  DType dtype(const char* name) {
    const std::optional<DLDataType> v = take(name).template try_cast<DLDataType>();
    check_type(v.has_value(), op_, ": ", name, " must be a dtype, got another type");
    return to_dtype(*v, op_, name);
  }

 private:
  PackedArgs args_;
  const char* op_;
  int next_ = 0;
  Source source_;
};

template <auto kOp>
void torch_call(PackedArgs packed, tvm::ffi::Any* result) {
  *result = kDone;
  try {
    if (!direct([&] { kOp(packed, result); })) *result = kUnread;
  } catch (const NeedsWorkspace& more) {
    *result = more.bytes;
  }
}

}  // namespace mortar::ffi

/// Exports torch_<op>: `function<source>` of mortar::ffi, with its result.
#define MORTAR_EXPORT_TORCH(name, function, source) \
  MORTAR_EXPORT_PACKED(name, mortar::ffi::torch_call<mortar::ffi::function<mortar::ffi::source>>)
