// SPDX-License-Identifier: Apache-2.0
// Argument checks that throw mortar::Error with one clear sentence.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <sstream>
#include <string>
#include <string_view>

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

/// "(8, 4096)".
std::string shape_string(const Tensor& t);
std::string device_string(Device device);

[[noreturn]] void fail(ErrorKind kind, std::string message);

/// Throws a value error made of `args` unless `condition` holds.
template <class... Args>
void check(bool condition, const Args&... args) {
  if (!condition) [[unlikely]] fail(ErrorKind::kValue, concat(args...));
}

/// Throws a type error made of `args` unless `condition` holds.
template <class... Args>
void check_type(bool condition, const Args&... args) {
  if (!condition) [[unlikely]] fail(ErrorKind::kType, concat(args...));
}

/// Checks of one op's arguments; every message starts with "<op>: <argument>".
class ArgCheck {
 public:
  explicit ArgCheck(const char* op) : op_(op) {}

  void defined(const Tensor& t, const char* name) const;
  void ndim(const Tensor& t, const char* name, int expected) const;
  /// `expected` of -1 matches any size.
  void shape(const Tensor& t, const char* name, std::initializer_list<std::int64_t> expected) const;
  void dtype(const Tensor& t, const char* name, std::initializer_list<DType> allowed) const;
  void device(const Tensor& t, const char* name, Device expected) const;
  void contiguous(const Tensor& t, const char* name) const;
  /// The last dimension must be dense (stride 1) unless it has at most one element.
  void last_dim_dense(const Tensor& t, const char* name) const;
  void aligned(const Tensor& t, const char* name, std::int64_t bytes) const;
  /// The byte ranges spanned by the two views must not intersect.
  void disjoint(const Tensor& a, const char* a_name, const Tensor& b, const char* b_name) const;
  /// No two index tuples of a written view may address one element (checked by strides).
  void no_self_overlap(const Tensor& t, const char* name) const;

  const char* op() const { return op_; }

 private:
  const char* op_;
};

}  // namespace mortar
