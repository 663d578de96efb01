// SPDX-License-Identifier: Apache-2.0
// Transposes of bytes: 4 x 4 in registers, and the layout of a larger tile in shared memory.
#pragma once

#include <cstdint>

namespace mortar::device {

/// out[j] holds byte j of in[0..3], that of in[0] lowest. Eight instructions.
__device__ __forceinline__ void transpose_bytes_4x4(const std::uint32_t (&in)[4],
                                                    std::uint32_t (&out)[4]) {
  const std::uint32_t a = __byte_perm(in[0], in[1], 0x5140);  // 0.0 1.0 0.1 1.1
  const std::uint32_t b = __byte_perm(in[2], in[3], 0x5140);
  const std::uint32_t c = __byte_perm(in[0], in[1], 0x7362);  // 0.2 1.2 0.3 1.3
  const std::uint32_t d = __byte_perm(in[2], in[3], 0x7362);
  out[0] = __byte_perm(a, b, 0x5410);
  out[1] = __byte_perm(a, b, 0x7632);
  out[2] = __byte_perm(c, d, 0x5410);
  out[3] = __byte_perm(c, d, 0x7632);
}

/// Byte offset of the 16-byte piece `piece` of column `column` in a tile of transposed columns of
/// 128 bytes (XOR swizzle): 8 threads that write columns kPieceColumns apart meet in no bank, nor
/// do 8 that read a column.
template <int kPieceColumns>
__device__ __forceinline__ int transposed_offset(int column, int piece) {
  return column * 128 + ((piece ^ (column / kPieceColumns)) & 7) * 16;
}

}  // namespace mortar::device
