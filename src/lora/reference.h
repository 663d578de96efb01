// SPDX-License-Identifier: Apache-2.0
// The oracle: shrink and expand as naive loops in float64 over CPU tensors.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "mortar/lora.h"

namespace mortar::lora {

/// A value and the sum of the absolute values of all products in it: the scale by which rounding
/// errors are measured.
struct Bounded {
  double value = 0;
  double magnitude = 0;
};

/// h[s][t][r], dense, [S, M, max_rank]; zero where an adapter has no such rank.
struct ReferenceHidden {
  std::int64_t num_tokens = 0;
  int width = 0;
  std::vector<Bounded> data;
  Bounded& at(int slice, std::int64_t token, int r) {
    return data[(slice * num_tokens + token) * width + r];
  }
  const Bounded& at(int slice, std::int64_t token, int r) const {
    return const_cast<ReferenceHidden*>(this)->at(slice, token, r);
  }
};

/// scale * scale_a * x A^T of every token that has an adapter; `token_adapter` has M entries, and
/// those outside [0, L) are base tokens.
ReferenceHidden reference_shrink(const Tensor& x, const LoraWeights& weights,
                                 std::span<const std::int32_t> token_adapter, double scale);

/// One updated element of y.
struct ReferenceOutput {
  double value = 0;
  double magnitude = 0;     ///< sum |h| |b|
  double hidden_error = 0;  ///< sum (magnitude of h) |b|: how errors of h arrive here
  bool written = false;     ///< base tokens and columns of rank 0 are not
};

/// y after the expand, [M, N] dense. `round_h` rounds h to that dtype first, as the ops do when
/// weights and y share a 16-bit dtype. y is read, not written.
std::vector<ReferenceOutput> reference_expand(const ReferenceHidden& h, const LoraWeights& weights,
                                              std::span<const std::int32_t> token_adapter,
                                              const Tensor& y, std::int64_t offset, bool add_inputs,
                                              std::optional<DType> round_h = std::nullopt);

}  // namespace mortar::lora
