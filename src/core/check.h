// SPDX-License-Identifier: Apache-2.0
// Argument checks that throw mortar::Error with one clear sentence. The passing path is inline
// compares only; sentences are built out of line, after a check has failed.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <sstream>
#include <string>

#include "mortar/error.h"
#include "mortar/tensor.h"

namespace mortar {

/// Joins anything printable into one string.
template <class... Args>
std::string concat(const Args&... args) {
  std::ostringstream out;
  (out << ... << args);
  return out.str();
}

/// Prints as "(8, 4096)"; formatted only where a message is built, so a passing check is free.
struct ShapeText {
  const Tensor& tensor;
};
std::ostream& operator<<(std::ostream& out, ShapeText shape);
inline ShapeText shape_string(const Tensor& t) { return {t}; }

/// Prints as "cpu" or "cuda:0".
struct DeviceText {
  Device device;
};
std::ostream& operator<<(std::ostream& out, DeviceText text);
inline DeviceText device_string(Device device) { return {device}; }

[[noreturn]] void fail(ErrorKind kind, std::string message);

template <class... Args>
[[noreturn, gnu::noinline, gnu::cold]] void fail_with(ErrorKind kind, const Args&... args) {
  fail(kind, concat(args...));
}

/// Throws a value error made of `args` unless `condition` holds.
template <class... Args>
void check(bool condition, const Args&... args) {
  if (!condition) [[unlikely]]
    fail_with(ErrorKind::kValue, args...);
}

/// Throws a type error made of `args` unless `condition` holds.
template <class... Args>
void check_type(bool condition, const Args&... args) {
  if (!condition) [[unlikely]]
    fail_with(ErrorKind::kType, args...);
}

/// Checks of one op's arguments; every message starts with "<op>: <argument>".
class ArgCheck {
 public:
  explicit constexpr ArgCheck(const char* op) : op_(op) {}

  void defined(const Tensor& t, const char* name) const {
    if (!t.defined()) [[unlikely]]
      bad_defined(name);
  }
  void ndim(const Tensor& t, const char* name, int expected) const {
    if (t.ndim != expected) [[unlikely]]
      bad_ndim(t, name, expected);
  }
  /// `expected` of -1 matches any size.
  void shape(const Tensor& t, const char* name,
             std::initializer_list<std::int64_t> expected) const {
    bool same = t.ndim == static_cast<int>(expected.size());
    const std::int64_t* want = expected.begin();
    for (int d = 0; same && d < t.ndim; ++d) same = want[d] < 0 || t.shape[d] == want[d];
    if (!same) [[unlikely]]
      bad_shape(t, name, expected);
  }
  void dtype(const Tensor& t, const char* name, std::initializer_list<DType> allowed) const {
    if (t.defined()) {
      for (DType d : allowed) {
        if (d == t.dtype) return;
      }
    }
    bad_dtype(t, name, allowed);
  }
  void device(const Tensor& t, const char* name, Device expected) const {
    if (!t.defined() || t.device != expected) [[unlikely]]
      bad_device(t, name, expected);
  }
  void contiguous(const Tensor& t, const char* name) const {
    if (!t.defined() || !t.is_contiguous()) [[unlikely]]
      bad_contiguous(t, name);
  }
  /// The last dimension must be dense (stride 1) unless it has at most one element.
  void last_dim_dense(const Tensor& t, const char* name) const {
    const bool dense = t.ndim > 0 && (t.size(-1) <= 1 || t.stride(-1) == 1);
    if (!dense) [[unlikely]]
      bad_last_dim(t, name);
  }
  void aligned(const Tensor& t, const char* name, std::int64_t bytes) const {
    const bool ok = t.defined() && reinterpret_cast<std::uintptr_t>(t.data) % bytes == 0;
    if (!ok) [[unlikely]]
      bad_alignment(t, name, bytes);
  }
  /// The two views must not share memory. Views of two dimensions with one common row stride may
  /// interleave (columns of one buffer); others must span separate byte ranges.
  void disjoint(const Tensor& a, const char* a_name, const Tensor& b, const char* b_name) const;
  /// No two index tuples of a written view may address one element (checked by strides).
  void no_self_overlap(const Tensor& t, const char* name) const;

  /// For builds without CUDA.
  [[noreturn, gnu::cold]] void fail_without_cuda(Device device) const;

  const char* op() const { return op_; }

 private:
  [[noreturn, gnu::cold]] void bad_defined(const char* name) const;
  [[noreturn, gnu::cold]] void bad_ndim(const Tensor& t, const char* name, int expected) const;
  [[noreturn, gnu::cold]] void bad_shape(const Tensor& t, const char* name,
                                         std::initializer_list<std::int64_t> expected) const;
  [[noreturn, gnu::cold]] void bad_dtype(const Tensor& t, const char* name,
                                         std::initializer_list<DType> allowed) const;
  [[noreturn, gnu::cold]] void bad_device(const Tensor& t, const char* name, Device expected) const;
  [[noreturn, gnu::cold]] void bad_contiguous(const Tensor& t, const char* name) const;
  [[noreturn, gnu::cold]] void bad_last_dim(const Tensor& t, const char* name) const;
  [[noreturn, gnu::cold]] void bad_alignment(const Tensor& t, const char* name,
                                             std::int64_t bytes) const;

  const char* op_;
};

}  // namespace mortar
