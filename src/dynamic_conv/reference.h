// SPDX-License-Identifier: Apache-2.0
// The definition of the ops in plain float64 loops: the oracle of every backend.
#pragma once

#include <cstdint>
#include <vector>

namespace mortar::dynamic_conv::reference {

/// All arrays are dense, in the shapes of mortar/dynamic_conv.h.
struct Sizes {
  std::int64_t batch = 1, time = 0, channels = 0;
  int width = 1;
  int state_length = 0;
  bool silu = false;
  std::vector<std::int64_t> cu_seqlens;  ///< empty: dense

  std::int64_t num_sequences() const;
};

using Array = std::vector<double>;

struct Outputs {
  Array y, final_state;
};
/// `initial` may be empty (zeros).
Outputs forward(const Sizes& sizes, const Array& x, const Array& k, const Array& initial);

struct Gradients {
  Array dx, dk, dinitial_state;
};
/// `initial` and `dfinal` may be empty (zeros).
Gradients backward(const Sizes& sizes, const Array& x, const Array& k, const Array& initial,
                   const Array& dy, const Array& dfinal);

}  // namespace mortar::dynamic_conv::reference
