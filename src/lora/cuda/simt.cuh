// SPDX-License-Identifier: Apache-2.0
// Loads of the kernels for every pair of dtypes.
#pragma once

#include <cstring>

#include "device/vector.cuh"

namespace mortar::lora::cuda {

inline constexpr int kPack = 4;  ///< elements that a lane loads at a time

/// Elements p[0], p[1], ... of which `left` exist, zeros for the others. vector: p lies at a
/// multiple of kPack elements.
template <class T>
__device__ __forceinline__ device::Bits<T, kPack> load_some(const T* p, int left, bool vector) {
  device::Bits<T, kPack> out{};
  if (vector && left >= kPack) return device::load<T, kPack>(p);
  T element[kPack];
#pragma unroll
  for (int i = 0; i < kPack; ++i) element[i] = i < left ? p[i] : device::from_float<T>(0.0f);
  memcpy(&out, element, sizeof(out));
  return out;
}

}  // namespace mortar::lora::cuda
