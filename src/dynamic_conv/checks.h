// SPDX-License-Identifier: Apache-2.0
// Checks that the ops share; each throws before anything is written and returns the plain view
// that backends take.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "core/check.h"
#include "dynamic_conv/problem.h"

namespace mortar::dynamic_conv {

struct NamedTensor {
  const Tensor& tensor;
  const char* name;
};

/// x [B, T, D], k [B, T, D, W] and optional cu_seqlens [N + 1] that agree. On the CPU the content
/// of cu_seqlens is checked as well.
Shape check_shape(const ArgCheck& arg, const Tensor& x, const Tensor& k, const Tensor& cu_seqlens,
                  bool silu);

/// `t` has the shape, dtype, device and dense dimensions of `model`.
Signal check_like(const ArgCheck& arg, const Tensor& t, const char* name, const Tensor& model,
                  const char* model_name);

/// A state [N, D, L], L = W or W - 1 and the same for all states of a call, or nothing. Sets
/// shape->state_length.
State check_state(const ArgCheck& arg, const Tensor& t, const char* name, const Tensor& x,
                  Shape* shape);

StepProblem check_step(const ArgCheck& arg, const Tensor& x, const Tensor& k, const Tensor& state,
                       const Tensor& slots, const Tensor& y, bool silu);

/// All have memory; no output may overlap itself, another output or an input.
void check_outputs_apart(const ArgCheck& arg, std::initializer_list<NamedTensor> outputs,
                         std::initializer_list<NamedTensor> inputs);

/// The view of a checked signal: [B, T, D] or [B, T, D, W].
Signal signal(const Tensor& t);

void check_starts_tensor(const ArgCheck& arg, const Tensor& cu_seqlens);
void check_slots_tensor(const ArgCheck& arg, const Tensor& slots);

/// Integers in host memory.
struct Integers {
  const void* data = nullptr;
  bool wide = false;  ///< int64, else int32
  std::int64_t size = 0;

  std::int64_t operator[](std::int64_t i) const {
    return wide ? static_cast<const std::int64_t*>(data)[i]
                : static_cast<const std::int32_t*>(data)[i];
  }
};

/// cu_seqlens starts at 0, never decreases and ends at num_tokens.
void check_starts(const ArgCheck& arg, const Integers& starts, std::int64_t num_tokens);
/// Slots lie in [-1, num_slots) and no live one occurs twice.
void check_slots(const ArgCheck& arg, const Integers& slots, std::int64_t num_slots);

}  // namespace mortar::dynamic_conv
