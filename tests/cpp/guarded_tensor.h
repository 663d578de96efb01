// SPDX-License-Identifier: Apache-2.0
// A tensor on a device with guard bytes around it and in the gaps between its rows, and a copy of
// it on the host.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "core/float_element.h"
#include "devices.h"
#include "mortar/tensor.h"

namespace mortar::testing {

/// How a tensor lies in its buffer: `lead` elements before it (odd values misalign it), `row_gap`
/// elements between rows of the last dimension.
struct Layout {
  std::int64_t lead = 0;
  std::int64_t row_gap = 0;
};

class GuardedTensor {
 public:
  GuardedTensor() = default;

  /// Filled with 0xFF bytes: NaN for floats, -1 for integers.
  GuardedTensor(DType dtype, std::vector<std::int64_t> shape, Layout layout = {},
                Device device = {})
      : dtype_(dtype), shape_(std::move(shape)), layout_(layout), device_(device) {
    const Tensor t = tensor(nullptr);
    const std::int64_t outer = t.ndim > 0 ? t.shape[0] * t.strides[0] : 1;
    const std::int64_t size = dtype_size(dtype);
    begin_ = kGuardBytes + layout.lead * size;
    host_.assign(begin_ + outer * size + kGuardBytes, 0xff);
    memory_ = device_memory(host_.size(), device);
    upload();
  }

  Tensor view() const { return tensor(static_cast<char*>(memory_.get()) + begin_); }
  Tensor host() const { return tensor(const_cast<std::uint8_t*>(host_.data()) + begin_, Device{}); }
  template <class T>
  T* data() {
    return reinterpret_cast<T*>(host_.data() + begin_);
  }
  template <class T>
  const T* data() const {
    return reinterpret_cast<const T*>(host_.data() + begin_);
  }

  /// Host copy to device; what the device holds outside the view must stay so from now on.
  void upload() {
    uploaded_ = host_;
    copy_to_device(memory_.get(), host_.data(), host_.size(), device_);
  }
  void download() { copy_to_host(host_.data(), memory_.get(), host_.size(), device_); }

  float get(std::int64_t index) const { return load_float(host().data, dtype_, index); }
  void set(std::int64_t index, float v) { store_float(host().data, dtype_, index, v); }

  /// Uniform in [-scale, scale], rounded to the dtype, in every element of the view.
  void fill_random(std::mt19937& rng, float scale = 1.0f) {
    std::uniform_real_distribution<float> uniform(-scale, scale);
    for_each([&](std::int64_t index) { set(index, uniform(rng)); });
  }

  /// Element offsets of the view, in order.
  template <class F>
  void for_each(const F& f) const {
    const Tensor t = host();
    const std::int64_t columns = t.ndim > 0 ? t.shape[t.ndim - 1] : 1;
    const std::int64_t rows = columns > 0 ? t.numel() / columns : 0;
    for (std::int64_t row = 0; row < rows; ++row) {
      std::int64_t offset = 0, rest = row;
      for (int d = t.ndim - 2; d >= 0; rest /= t.shape[d--]) {
        offset += rest % t.shape[d] * t.strides[d];
      }
      for (std::int64_t c = 0; c < columns; ++c) f(offset + c);
    }
  }

  /// Bytes of one element, as uploaded last and as they are now.
  bool unchanged(std::int64_t index) const {
    const std::int64_t size = dtype_size(dtype_), at = begin_ + index * size;
    return std::memcmp(host_.data() + at, uploaded_.data() + at, size) == 0;
  }
  bool all_unchanged() const { return host_ == uploaded_; }

  /// Every byte outside the view is as it was uploaded. Call after download().
  bool guards_intact() const {
    std::vector<bool> inside(host_.size(), false);
    const std::int64_t size = dtype_size(dtype_);
    for_each([&](std::int64_t index) {
      std::fill_n(inside.begin() + begin_ + index * size, size, true);
    });
    for (std::size_t i = 0; i < host_.size(); ++i) {
      if (!inside[i] && host_[i] != uploaded_[i]) return false;
    }
    return true;
  }

 private:
  static constexpr std::int64_t kGuardBytes = 256;

  Tensor tensor(void* p, Device device) const {
    Tensor t;
    t.data = p;
    t.dtype = dtype_;
    t.device = device;
    t.ndim = static_cast<int>(shape_.size());
    std::int64_t stride = 1;
    for (int d = t.ndim - 1; d >= 0; --d) {
      t.shape[d] = shape_[d];
      t.strides[d] = stride;
      stride *= shape_[d] + (d == t.ndim - 1 ? layout_.row_gap : 0);
    }
    return t;
  }
  Tensor tensor(void* p) const { return tensor(p, device_); }

  DType dtype_ = DType::kUInt8;
  std::vector<std::int64_t> shape_;
  Layout layout_;
  Device device_;
  std::int64_t begin_ = 0;
  std::vector<std::uint8_t> host_, uploaded_;
  std::shared_ptr<void> memory_;
};

/// An int32 vector on a device.
inline GuardedTensor int_tensor(std::span<const std::int32_t> values, Device device) {
  GuardedTensor t(DType::kInt32, {static_cast<std::int64_t>(values.size())}, {}, device);
  std::copy(values.begin(), values.end(), t.data<std::int32_t>());
  t.upload();
  return t;
}

/// A byte buffer on a device, 16-byte aligned.
inline GuardedTensor byte_tensor(std::int64_t bytes, Device device) {
  return GuardedTensor(DType::kUInt8, {bytes}, {}, device);
}

}  // namespace mortar::testing
