// SPDX-License-Identifier: Apache-2.0
// The two 8-bit floats of OCP, as they lie in the memory of host and device: E4M3 has no infinities
// and reaches 448, E5M2 has them and reaches 57344.
#pragma once

#include <cstdint>

namespace mortar {

struct Float8E4M3 {
  std::uint8_t bits;
};
struct Float8E5M2 {
  std::uint8_t bits;
};

}  // namespace mortar
