// SPDX-License-Identifier: Apache-2.0
// PyTorch's tensors from a tuple of Python objects, by its address. TVM-FFI exports each tensor of
// a call as an owning DLPack tensor, at 0.2 to 0.4 us of host time; here the same exchange API
// fills a view on the stack, at a fraction of that. Memory and the current stream come from it too.
#pragma once

#include <cstddef>
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
  std::ptrdiff_t (*tuple_size)(void*) = nullptr;
  void* (*tuple_item)(void*, std::ptrdiff_t) = nullptr;

  static TorchHost& get() {
    static TorchHost host;
    return host;
  }

  /// False if PyTorch's tensors cannot be read this way.
  static bool lend(std::int64_t dlpack, std::int64_t none, std::int64_t clear_error,
                   std::int64_t release_gil, std::int64_t take_gil, std::int64_t tuple_size,
                   std::int64_t tuple_item) {
    const auto* api = reinterpret_cast<const DLPackExchangeAPI*>(dlpack);
    if (api == nullptr || api->header.version.major != DLPACK_MAJOR_VERSION ||
        api->dltensor_from_py_object_no_sync == nullptr || api->current_work_stream == nullptr ||
        api->managed_tensor_allocator == nullptr) {
      return false;
    }
    TorchHost& host = get();
    host.dlpack = api;
    host.none = reinterpret_cast<void*>(none);
    host.clear_error = reinterpret_cast<decltype(host.clear_error)>(clear_error);
    host.release_gil = reinterpret_cast<decltype(host.release_gil)>(release_gil);
    host.take_gil = reinterpret_cast<decltype(host.take_gil)>(take_gil);
    host.tuple_size = reinterpret_cast<decltype(host.tuple_size)>(tuple_size);
    host.tuple_item = reinterpret_cast<decltype(host.tuple_item)>(tuple_item);
    return true;
  }
};

/// Thrown before anything is written where an argument is none of PyTorch's plain tensors or no
/// memory is left: the caller takes the general path, which copes or says what is wrong.
struct Indirect {};

/// Thrown before anything is written where Python has to bring a workspace of at least so many
/// bytes, always more than one.
struct NeedsWorkspace {
  std::int64_t bytes;
};

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

/// Objects of a Python tuple, from left to right. The caller holds the GIL and the tuple.
struct TorchObjects {
  /// The one of all arguments that is the tuple's address comes first.
  TorchObjects(PackedArgs args, int* next) {
    const std::optional<std::int64_t> address =
        *next < args.size() ? args[(*next)++].try_cast<std::int64_t>() : std::nullopt;
    if (!address.has_value()) throw Indirect();
    tuple_ = reinterpret_cast<void*>(*address);
    size_ = static_cast<int>(TorchHost::get().tuple_size(tuple_));
    if (size_ < 0) {  // no tuple
      TorchHost::get().clear_error();
      throw Indirect();
    }
  }

  int remaining(PackedArgs, int) const { return size_ - next_; }

  /// False for None.
  bool view(DLTensor* out) {
    const TorchHost& host = TorchHost::get();
    if (next_ >= size_) throw Indirect();
    void* object = host.tuple_item(tuple_, next_++);
    if (object == host.none) return false;
    if (host.dlpack->dltensor_from_py_object_no_sync(object, out) != 0) {
      host.clear_error();
      throw Indirect();
    }
    return true;
  }

  Tensor tensor(PackedArgs, int*, const char* op, const char* name) {
    DLTensor t{};
    if (!view(&t)) return {};
    if (!has_memory(t)) throw Indirect();
    return to_tensor(t, op, name);
  }

  bool flag(PackedArgs, int*, const char*, const char*) {
    DLTensor t{};
    if (!view(&t) || !is_flag(t)) throw Indirect();
    return value_of_flag(t);
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

 private:
  void* tuple_ = nullptr;
  int size_ = 0, next_ = 0;
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
