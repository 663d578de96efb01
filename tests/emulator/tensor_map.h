// SPDX-License-Identifier: Apache-2.0
// What the emulator keeps in the 128 bytes of a CUtensorMap.
#pragma once

#include "kernel.h"

namespace emulator {

struct TensorMap {
  static constexpr u64 kMagic = 0x50414d524f534e54;
  u64 magic;
  u64 base;
  u64 dims[5];
  u64 strides[4];  ///< bytes, of dimensions 1 and up
  u32 box[5];
  u8 rank, element_bytes, swizzle, unused;
};
static_assert(sizeof(TensorMap) <= 128);

}  // namespace emulator
