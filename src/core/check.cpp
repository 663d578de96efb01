// SPDX-License-Identifier: Apache-2.0
#include "core/check.h"

#include <array>
#include <string>

#include "core/byte_span.h"
#include "core/dtype_visitor.h"

namespace mortar {
namespace {

/// "float32 or float16".
std::string dtype_names(std::initializer_list<DType> dtypes) {
  std::string names;
  for (DType d : dtypes) names += concat(names.empty() ? "" : " or ", dtype_name(d));
  return names;
}

/// True for two matrices of one row stride whose rows lie side by side within that stride.
bool rows_interleave(const Tensor& a, const Tensor& b) {
  if (a.ndim != 2 || b.ndim != 2 || a.strides[1] != 1 || b.strides[1] != 1) return false;
  const std::int64_t pitch = a.strides[0] * dtype_size(a.dtype);
  if (pitch <= 0 || pitch != b.strides[0] * dtype_size(b.dtype)) return false;
  const std::int64_t distance = static_cast<char*>(b.data) - static_cast<char*>(a.data);
  const std::int64_t shift = ((distance % pitch) + pitch) % pitch;
  return shift >= a.shape[1] * dtype_size(a.dtype) &&
         shift + b.shape[1] * dtype_size(b.dtype) <= pitch;
}

}  // namespace

std::ostream& operator<<(std::ostream& out, ShapeText shape) {
  out << "(";
  for (int d = 0; d < shape.tensor.ndim; ++d) out << (d ? ", " : "") << shape.tensor.shape[d];
  return out << ")";
}

std::ostream& operator<<(std::ostream& out, DeviceText text) {
  if (text.device.type == DeviceType::kCPU) return out << "cpu";
  return out << "cuda:" << text.device.index;
}

void fail(ErrorKind kind, std::string message) { throw Error(kind, message); }

void fail_dtype(const char* op, std::initializer_list<DType> allowed, DType dtype) {
  fail_with(ErrorKind::kType, op, ": dtype must be ", dtype_names(allowed), ", got ",
            dtype_name(dtype));
}

void ArgCheck::bad_defined(const char* name) const {
  fail_with(ErrorKind::kValue, op_, ": ", name, " is required, got nothing");
}

void ArgCheck::bad_ndim(const Tensor& t, const char* name, int expected) const {
  defined(t, name);
  fail_with(ErrorKind::kValue, op_, ": ", name, " must have ", expected, " dimension",
            expected == 1 ? "" : "s", ", got shape ", shape_string(t));
}

void ArgCheck::bad_shape(const Tensor& t, const char* name,
                         std::initializer_list<std::int64_t> expected) const {
  defined(t, name);
  std::string want;
  for (std::int64_t extent : expected) {
    if (!want.empty()) want += ", ";
    want += extent < 0 ? std::string("any") : std::to_string(extent);
  }
  fail_with(ErrorKind::kValue, op_, ": ", name, " must have shape (", want, "), got ",
            shape_string(t));
}

void ArgCheck::bad_dtype(const Tensor& t, const char* name,
                         std::initializer_list<DType> allowed) const {
  defined(t, name);
  fail_with(ErrorKind::kType, op_, ": ", name, " must have dtype ", dtype_names(allowed), ", got ",
            dtype_name(t.dtype));
}

void ArgCheck::bad_device(const Tensor& t, const char* name, Device expected) const {
  defined(t, name);
  fail_with(ErrorKind::kType, op_, ": ", name, " must be on ", device_string(expected), ", got ",
            device_string(t.device));
}

void ArgCheck::bad_contiguous(const Tensor& t, const char* name) const {
  defined(t, name);
  std::string strides;
  for (int d = 0; d < t.ndim; ++d) strides += concat(d ? ", " : "", t.strides[d]);
  fail_with(ErrorKind::kValue, op_, ": ", name, " must be contiguous, got strides (", strides,
            ") for shape ", shape_string(t));
}

void ArgCheck::bad_last_dim(const Tensor& t, const char* name) const {
  defined(t, name);
  check(t.ndim > 0, op_, ": ", name, " must have at least 1 dimension, got shape ()");
  fail_with(ErrorKind::kValue, op_, ": ", name,
            " must have stride 1 in its last dimension, got stride ", t.stride(-1));
}

void ArgCheck::bad_alignment(const Tensor& t, const char* name, std::int64_t bytes) const {
  defined(t, name);
  fail_with(ErrorKind::kValue, op_, ": ", name, " must be aligned to ", bytes,
            " bytes, got address ", t.data);
}

void ArgCheck::fail_without_cuda(Device device) const {
  fail_with(ErrorKind::kType, op_, ": tensors must be on cpu, as this build of Mortar has no CUDA ",
            "backend, got ", device_string(device));
}

void ArgCheck::disjoint(const Tensor& a, const char* a_name, const Tensor& b,
                        const char* b_name) const {
  if (!a.defined() || !b.defined() || a.device != b.device) return;
  if (!byte_span(a).meets(byte_span(b)) || rows_interleave(a, b)) return;
  fail_with(ErrorKind::kValue, op_, ": ", a_name, " and ", b_name,
            " must not overlap in memory, got views that do");
}

void ArgCheck::no_self_overlap(const Tensor& t, const char* name) const {
  if (!t.defined() || t.numel() == 0) return;
  std::array<int, Tensor::kMaxDims> order;  // dimensions of more than one element, by stride
  const auto step = [&](int d) { return t.strides[d] < 0 ? -t.strides[d] : t.strides[d]; };
  int n = 0;
  for (int d = 0; d < t.ndim; ++d) {
    if (t.shape[d] < 2) continue;
    int at = n++;
    for (; at > 0 && step(order[at - 1]) > step(d); --at) order[at] = order[at - 1];
    order[at] = d;
  }
  std::int64_t reach = 1;
  for (int i = 0; i < n; ++i) {
    check(step(order[i]) >= reach, op_, ": ", name,
          " must not overlap itself (it is written to), got an expanded or overlapping view");
    reach += step(order[i]) * (t.shape[order[i]] - 1);
  }
}

}  // namespace mortar
