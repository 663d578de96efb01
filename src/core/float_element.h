// SPDX-License-Identifier: Apache-2.0
// Single elements of arrays whose float dtype is known only at run time: for references, tests and
// rare paths. A dtype that is no float throws.
#pragma once

#include <cstdint>

#include "core/dtype_visitor.h"

namespace mortar {

/// Element `i` of an array of a float dtype.
inline float load_float(const void* data, DType dtype, std::int64_t i) {
  return visit_dtype<FloatDTypes>(dtype, "load_float", [&](auto tag) {
    return to_float(static_cast<const typename decltype(tag)::type*>(data)[i]);
  });
}

inline void store_float(void* data, DType dtype, std::int64_t i, float v) {
  visit_dtype<FloatDTypes>(dtype, "store_float", [&](auto tag) {
    using T = typename decltype(tag)::type;
    static_cast<T*>(data)[i] = from_float<T>(v);
  });
}

/// `v` rounded to a float dtype and back.
inline float round_to(float v, DType dtype) {
  return visit_dtype<FloatDTypes>(dtype, "round_to", [&](auto tag) {
    return to_float(from_float<typename decltype(tag)::type>(v));
  });
}

}  // namespace mortar
