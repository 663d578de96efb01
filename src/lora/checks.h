// SPDX-License-Identifier: Apache-2.0
// Checks that the LoRA ops share; each throws before anything is written and returns the plain
// view that backends take.
#pragma once

#include <cstdint>

#include "core/check.h"
#include "lora/problem.h"
#include "mortar/lora.h"

namespace mortar::lora {

inline constexpr const char* kANames[kLoraMaxSlices] = {"a[0]", "a[1]", "a[2]", "a[3]",
                                                        "a[4]", "a[5]", "a[6]", "a[7]"};
inline constexpr const char* kBNames[kLoraMaxSlices] = {"b[0]", "b[1]", "b[2]", "b[3]",
                                                        "b[4]", "b[5]", "b[6]", "b[7]"};

/// Which of the two matrices of the weights an op needs.
enum class Needs { kA, kB, kBoth };

/// x: [M, K] of a float dtype, rows dense.
RowsView check_x(const ArgCheck& arg, const Tensor& x);

/// h: [S, M, R >= max_rank], rows dense.
RowsView check_h(const ArgCheck& arg, const Tensor& h, const LoraWeights& weights,
                 std::int64_t num_tokens, Device device);

/// y: [M, N >= offset + sum N_s] of a float dtype, rows dense, not overlapping itself.
RowsView check_y(const ArgCheck& arg, const Tensor& y, const LoraWeights& weights,
                 std::int64_t offset, std::int64_t num_tokens, Device device);

/// Weights made by one of LoraWeights' two functions, on `device`, with the matrices needed.
void check_form(const ArgCheck& arg, const LoraWeights& weights, Needs needs, Device device);

/// The same, as backends take them.
WeightsView check_weights(const ArgCheck& arg, const LoraWeights& weights, Needs needs,
                          Device device);

/// A plan said to be made for (M, L) and large enough for them, or four segment tensors that agree.
/// On the CPU the plan's header is compared with (M, L) as well; on a GPU the kernels do that.
GroupsView check_groups(const ArgCheck& arg, const LoraGroups& groups, std::int64_t num_tokens,
                        std::int64_t num_adapters, Device device);

/// workspace: uint8 of at least `bytes`; may be left out when `bytes` is 0.
void* check_workspace(const ArgCheck& arg, const Tensor& workspace, std::int64_t bytes,
                      Device device);

/// The matrices needed, or the table, have memory: what workspace queries do not ask.
void check_memory_of_weights(const ArgCheck& arg, const LoraWeights& weights, Needs needs);

/// A written tensor must not overlap the groups, stacked weights with their ranks and scales, or
/// the table. What a table points to is not looked at: on CUDA the host does not know it.
void check_apart(const ArgCheck& arg, const Tensor& out, const char* name,
                 const LoraWeights& weights, const LoraGroups& groups);

}  // namespace mortar::lora
