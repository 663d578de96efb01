// SPDX-License-Identifier: Apache-2.0
// Single elements of two or four bytes, kept as they came from memory: a conversion right behind
// each load would wait for it.
#pragma once

#include <cstdint>

#include "device/convert.cuh"

namespace mortar::fp8_rmsnorm::cuda {

/// Reads the element of two or four bytes at p through L2 into `word` if `there`, in a predicated
/// instruction. Not two of them, one for each size: the second would wait for the first, which
/// writes the same register.
template <bool kNarrow>
__device__ __forceinline__ void load_word_if(bool there, std::uint32_t& word, const void* p) {
  if constexpr (kNarrow) {
    asm volatile(
        "{\n.reg .pred there;\nsetp.ne.b32 there, %2, 0;\n@there ld.global.cg.u16 %0, [%1];\n}"
        : "+r"(word)
        : "l"(p), "r"(static_cast<int>(there)));
  } else {
    asm volatile(
        "{\n.reg .pred there;\nsetp.ne.b32 there, %2, 0;\n@there ld.global.cg.u32 %0, [%1];\n}"
        : "+r"(word)
        : "l"(p), "r"(static_cast<int>(there)));
  }
}

/// The value of a word that holds a bfloat16 if `narrow`, else a float32.
__device__ __forceinline__ float scale_of_word(bool narrow, std::uint32_t word) {
  return __uint_as_float(__byte_perm(word, 0, narrow ? 0x1044 : 0x3210));
}

/// The value of a word of any float dtype.
__device__ __forceinline__ float float_of_word(DType dtype, std::uint32_t word) {
  if (dtype == DType::kFloat16) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(word)));
  }
  return scale_of_word(dtype == DType::kBFloat16, word);
}

}  // namespace mortar::fp8_rmsnorm::cuda
