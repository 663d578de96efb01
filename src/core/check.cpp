// SPDX-License-Identifier: Apache-2.0
#include "core/check.h"

#include <algorithm>
#include <array>
#include <utility>

namespace mortar {
namespace {

/// Bytes [first, last) that a view may touch.
std::pair<std::uintptr_t, std::uintptr_t> byte_span(const Tensor& t) {
  const auto base = reinterpret_cast<std::uintptr_t>(t.data);
  if (t.numel() == 0) return {base, base};
  std::int64_t low = 0, high = 0;
  for (int d = 0; d < t.ndim; ++d) {
    const std::int64_t reach = (t.shape[d] - 1) * t.strides[d];
    (reach < 0 ? low : high) += reach;
  }
  const std::int64_t size = dtype_size(t.dtype);
  return {base + low * size, base + (high + 1) * size};
}

}  // namespace

std::string shape_string(const Tensor& t) {
  std::string s = "(";
  for (int d = 0; d < t.ndim; ++d) s += concat(d ? ", " : "", t.shape[d]);
  return s + ")";
}

std::string device_string(Device device) {
  return device.type == DeviceType::kCPU ? "cpu" : concat("cuda:", device.index);
}

void fail(ErrorKind kind, std::string message) { throw Error(kind, message); }

void ArgCheck::defined(const Tensor& t, const char* name) const {
  check(t.defined(), op_, ": ", name, " is required, got nothing");
}

void ArgCheck::ndim(const Tensor& t, const char* name, int expected) const {
  defined(t, name);
  check(t.ndim == expected, op_, ": ", name, " must have ", expected, " dimensions, got shape ",
        shape_string(t));
}

void ArgCheck::shape(const Tensor& t, const char* name,
                     std::initializer_list<std::int64_t> expected) const {
  defined(t, name);
  bool same = t.ndim == static_cast<int>(expected.size());
  std::string want = "(";
  int d = 0;
  for (std::int64_t extent : expected) {
    if (same && extent >= 0 && t.shape[d] != extent) same = false;
    want += concat(d ? ", " : "", extent < 0 ? std::string("any") : std::to_string(extent));
    ++d;
  }
  check(same, op_, ": ", name, " must have shape ", want, "), got ", shape_string(t));
}

void ArgCheck::dtype(const Tensor& t, const char* name,
                     std::initializer_list<DType> allowed) const {
  defined(t, name);
  if (std::find(allowed.begin(), allowed.end(), t.dtype) != allowed.end()) return;
  std::string want;
  for (DType d : allowed) want += concat(want.empty() ? "" : " or ", dtype_name(d));
  fail(ErrorKind::kType,
       concat(op_, ": ", name, " must have dtype ", want, ", got ", dtype_name(t.dtype)));
}

void ArgCheck::device(const Tensor& t, const char* name, Device expected) const {
  defined(t, name);
  check_type(t.device == expected, op_, ": ", name, " must be on ", device_string(expected),
             ", got ", device_string(t.device));
}

void ArgCheck::contiguous(const Tensor& t, const char* name) const {
  defined(t, name);
  check(t.is_contiguous(), op_, ": ", name, " must be contiguous, got strides that are not (call ",
        "contiguous() first)");
}

void ArgCheck::last_dim_dense(const Tensor& t, const char* name) const {
  defined(t, name);
  check(t.ndim > 0 && (t.size(-1) <= 1 || t.stride(-1) == 1), op_, ": ", name,
        " must have stride 1 in its last dimension, got ", t.ndim > 0 ? t.stride(-1) : 0);
}

void ArgCheck::aligned(const Tensor& t, const char* name, std::int64_t bytes) const {
  defined(t, name);
  check(reinterpret_cast<std::uintptr_t>(t.data) % bytes == 0, op_, ": ", name,
        " must be aligned to ", bytes, " bytes, got address ", t.data);
}

void ArgCheck::disjoint(const Tensor& a, const char* a_name, const Tensor& b,
                        const char* b_name) const {
  if (!a.defined() || !b.defined() || a.device != b.device) return;
  const auto [a_first, a_last] = byte_span(a);
  const auto [b_first, b_last] = byte_span(b);
  const bool empty = a_first == a_last || b_first == b_last;
  check(empty || a_last <= b_first || b_last <= a_first, op_, ": ", a_name, " and ", b_name,
        " must not overlap in memory, got views that do");
}

void ArgCheck::no_self_overlap(const Tensor& t, const char* name) const {
  if (!t.defined() || t.numel() == 0) return;
  std::array<std::pair<std::int64_t, std::int64_t>, Tensor::kMaxDims> dims;
  int n = 0;
  for (int d = 0; d < t.ndim; ++d) {
    if (t.shape[d] > 1) dims[n++] = {t.strides[d] < 0 ? -t.strides[d] : t.strides[d], t.shape[d]};
  }
  std::sort(dims.begin(), dims.begin() + n);
  std::int64_t reach = 1;
  for (int i = 0; i < n; ++i) {
    check(dims[i].first >= reach, op_, ": ", name,
          " must not overlap itself (it is written to), got an expanded or overlapping view");
    reach = dims[i].first * (dims[i].second - 1) + reach;
  }
}

}  // namespace mortar
