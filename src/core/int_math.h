// SPDX-License-Identifier: Apache-2.0
// Integer helpers shared by host and device code.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define MORTAR_HOST_DEVICE __host__ __device__
#else
#define MORTAR_HOST_DEVICE
#endif

namespace mortar {

template <class T>
MORTAR_HOST_DEVICE constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}

template <class T>
MORTAR_HOST_DEVICE constexpr T round_up(T a, T b) {
  return ceil_div(a, b) * b;
}

}  // namespace mortar
