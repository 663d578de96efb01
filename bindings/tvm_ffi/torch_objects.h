// SPDX-License-Identifier: Apache-2.0
// PyTorch's tensors by the address of their Python objects, id(t). TVM-FFI exports each tensor of a
// call as an owning DLPack tensor, at 0.2 to 0.4 us of host time; here the same exchange API fills
// a view on the stack, at a fraction of that. Memory and the current stream come from it too.
#pragma once

#include <cstdint>
#include <optional>

#include "convert.h"

namespace mortar::ffi {

/// What Python lends at import: DLPack's exchange API of torch.Tensor and functions of CPython's
/// stable ABI, which this library, the same for every Python, does not link.
struct TorchHost {
  const DLPackExchangeAPI* dlpack = nullptr;
  void* none = nullptr;  ///< the address of None
  void (*clear_error)() = nullptr;
  void* (*release_gil)() = nullptr;
  void (*take_gil)(void*) = nullptr;

  static TorchHost& get() {
    static TorchHost host;
    return host;
  }

  /// False if PyTorch's tensors cannot be read this way.
  static bool lend(std::int64_t dlpack, std::int64_t none, std::int64_t clear_error,
                   std::int64_t release_gil, std::int64_t take_gil) {
    const auto* api = reinterpret_cast<const DLPackExchangeAPI*>(dlpack);
    if (api == nullptr || api->header.version.major != DLPACK_MAJOR_VERSION ||
        api->dltensor_from_py_object_no_sync == nullptr || api->current_work_stream == nullptr ||
        api->managed_tensor_allocator == nullptr) {
      return false;
    }
    get() = {api, reinterpret_cast<void*>(none), reinterpret_cast<void (*)()>(clear_error),
             reinterpret_cast<void* (*)()>(release_gil),
             reinterpret_cast<void (*)(void*)>(take_gil)};
    return true;
  }
};

/// Thrown before anything is written where an argument is none of PyTorch's plain tensors or no
/// memory is left: the caller takes the general path, which copes or says what is wrong.
struct Indirect {};

/// Lets other Python threads run for its lifetime.
class GilReleased {
 public:
  GilReleased() : state_(TorchHost::get().release_gil()) {}
  ~GilReleased() { TorchHost::get().take_gil(state_); }
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;

 private:
  void* state_;
};

/// Reads arguments that are addresses of Python objects. The caller holds the GIL and the objects.
struct TorchObjects {
  /// False for None.
  static bool view(AnyView arg, DLTensor* out) {
    const std::optional<std::int64_t> address = arg.try_cast<std::int64_t>();
    if (!address.has_value()) throw Indirect();
    const TorchHost& host = TorchHost::get();
    auto* object = reinterpret_cast<void*>(*address);
    if (object == host.none) return false;
    if (host.dlpack->dltensor_from_py_object_no_sync(object, out) != 0) {
      host.clear_error();
      throw Indirect();
    }
    return true;
  }

  static Tensor tensor(AnyView arg, const char* op, const char* name) {
    DLTensor t{};
    if (!view(arg, &t)) return {};
    if (!has_memory(t)) throw Indirect();
    return to_tensor(t, op, name);
  }

  /// The one element of a tensor of booleans or integers on the CPU; nothing for None.
  static std::optional<std::int64_t> element(AnyView arg) {
    DLTensor t{};
    if (!view(arg, &t)) return {};
    std::int64_t elements = 1;
    for (int d = 0; d < t.ndim; ++d) elements *= t.shape[d];
    const bool integral =
        t.dtype.code == kDLBool || t.dtype.code == kDLInt || t.dtype.code == kDLUInt;
    if (t.device.device_type != kDLCPU || elements != 1 || !integral || t.dtype.lanes != 1 ||
        !has_memory(t)) {
      throw Indirect();
    }
    const void* data = static_cast<const char*>(t.data) + t.byte_offset;
    switch (t.dtype.bits) {
      case 8:
        return *static_cast<const std::int8_t*>(data);
      case 32:
        return *static_cast<const std::int32_t*>(data);
      case 64:
        return *static_cast<const std::int64_t*>(data);
      default:
        throw Indirect();
    }
  }

  static Stream stream(Device device) {
    if (device.type == DeviceType::kCPU) return {};
    void* stream = nullptr;
    const TorchHost& host = TorchHost::get();
    if (host.dlpack->current_work_stream(kDLCUDA, device.index, &stream) != 0) {
      host.clear_error();
      throw Indirect();
    }
    return {stream};
  }

  /// What surrounds an op: other Python threads may run, its device is the current one.
  struct Call {
    explicit Call(Device device) : stream(TorchObjects::stream(device)), guard(device) {}
    Stream stream;
    GilReleased unlocked;
    DeviceGuard guard;
  };
};

/// Bytes from PyTorch's allocator on its current stream of the device. As with any of its tensors
/// the memory may be given back right after the launch: its next user on that stream runs later.
class TorchBytes {
 public:
  TorchBytes() = default;
  TorchBytes(std::int64_t bytes, Device device) {
    DLTensor like{};
    like.device = {device.type == DeviceType::kCUDA ? kDLCUDA : kDLCPU, device.index};
    like.ndim = 1;
    like.dtype = {kDLUInt, 8, 1};
    like.shape = &bytes;
    const auto keep_quiet = [](void*, const char*, const char*) {};
    if (TorchHost::get().dlpack->managed_tensor_allocator(&like, &memory_, nullptr, keep_quiet)) {
      throw Indirect();
    }
  }
  ~TorchBytes() {
    if (memory_ != nullptr && memory_->deleter != nullptr) memory_->deleter(memory_);
  }
  TorchBytes(const TorchBytes&) = delete;
  TorchBytes& operator=(const TorchBytes&) = delete;

  Tensor tensor() const { return to_tensor(memory_->dl_tensor); }

 private:
  DLManagedTensorVersioned* memory_ = nullptr;
};

/// Runs `body`, and returns whether it went all the way.
template <class Body>
bool direct(Body&& body) {
  try {
    body();
    return true;
  } catch (const Indirect&) {
    return false;
  }
}

}  // namespace mortar::ffi
