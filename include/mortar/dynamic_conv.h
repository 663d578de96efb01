// SPDX-License-Identifier: Apache-2.0
// Dynamic short convolution: a causal depthwise convolution whose kernel differs at every token.
//
//   s[b, t, d] = sum_w k[b, t, d, w] * x[b, t + w - W + 1, d]        y = silu ? s * sigmoid(s) : s
//
// Dimensions: B batch, T time, D channels, W taps (1 .. 8), N sequences, L state length (W or
// W - 1). All strides are in elements.
//
// The method is Jet-Nemotron's dynamic convolution (arXiv:2508.15884). Products and sums are
// float32 and each output is rounded once. No op allocates, synchronises, copies or casts behind
// the caller's back; all arguments are checked before anything is written, and mistakes throw
// mortar::Error. Results are bitwise repeatable, and a sequence's result depends on that sequence
// alone, wherever it lies in the batch or the pack.
//
// Dtypes: x and k are each float32, float16 or bfloat16; y, dy, dx and all states have the dtype
// of x, dk that of k. All tensors live on one device.
// Strides: x, y, dy, dx are dense in D, and k, dk in (D, W); other strides, and all strides of a
// state, are free, so [N, L, D] storage is passed as a transposed [N, D, L] view. Outputs may
// overlap neither themselves nor any other argument.
//
// Sequences. Dense: each of the B rows is a sequence (N = B). Packed: B = 1 and `cu_seqlens`
// (int32 or int64 [N + 1], on the device) holds the start of each sequence and T at its end;
// sequences may be empty. The content of cu_seqlens is read on the device only: one that decreases,
// does not start at 0 or does not end at T gives unspecified results but never an access outside
// the tensors; dynamic_conv_check reports it.
//
// States. state[n, d, L - 1] is the newest input before a sequence, state[n, d, 0] the oldest; an
// absent initial state is zeros. The final state is the last L entries of (initial state, inputs
// of the sequence), so a sequence shorter than L shifts the old state. It may not share memory
// with the initial state.
#pragma once

#include <cstdint>

#include "mortar/stream.h"
#include "mortar/tensor.h"

namespace mortar {

inline constexpr int kDynamicConvMaxWidth = 8;

/// y and, if given, the final state.
///
/// x: [B, T, D]. kernels: [B, T, D, W]. cu_seqlens: optional [N + 1]. initial_state, final_state:
/// optional [N, D, L], of equal L. y: [B, T, D].
void dynamic_conv_forward(const Tensor& x, const Tensor& kernels, const Tensor& cu_seqlens,
                          const Tensor& initial_state, const Tensor& y, const Tensor& final_state,
                          bool silu, Stream stream);

/// Gradients of dynamic_conv_forward, in one pass: each input is read once (but for the few steps
/// where chunks of time meet) and every element of dx, dk and dinitial_state is written once.
///
/// dy: [B, T, D], gradient of y. dfinal_state: optional [N, D, L], gradient of the final state.
/// dx: [B, T, D]. dk: [B, T, D, W]. dinitial_state: optional [N, D, L]. The states that are given
/// have equal L. With silu, s is computed again: nothing but the inputs need be kept.
void dynamic_conv_backward(const Tensor& x, const Tensor& kernels, const Tensor& cu_seqlens,
                           const Tensor& initial_state, const Tensor& dy,
                           const Tensor& dfinal_state, const Tensor& dx, const Tensor& dk,
                           const Tensor& dinitial_state, bool silu, Stream stream);

/// One token of each of N sequences; the state is updated in place.
///
/// x: [N, D]. kernels: [N, D, W]. state: [S, D, L]. slots: optional int32 [N]: row i uses
/// state[slots[i]]; without it S = N and row i uses state[i]. y: [N, D]. Row i is padding if its
/// slot lies outside [0, S) (-1 by convention): its row of y is written as zero and no state is
/// touched. Two rows with the same live slot are the caller's error: both results and the state are
/// then unspecified. dynamic_conv_check reports both. A captured CUDA graph may be replayed after
/// `slots` has changed.
void dynamic_conv_step(const Tensor& x, const Tensor& kernels, const Tensor& state,
                       const Tensor& slots, const Tensor& y, bool silu, Stream stream);

/// Checks the content of cu_seqlens (for T = num_tokens) and of slots (for S = num_slots); either
/// may be absent. Throws Error, naming the first bad entry, if cu_seqlens decreases, does not start
/// at 0 or does not end at T, or if a slot lies outside [-1, S) or occurs twice. Reads the content
/// back and waits for the stream: a debugging aid, not for the hot path.
void dynamic_conv_check(const Tensor& cu_seqlens, std::int64_t num_tokens, const Tensor& slots,
                        std::int64_t num_slots, Stream stream);

/// Fewest bytes that the ops can move; what the benchmarks divide by. States of forward and
/// backward are left out: they are read and written once per sequence, not per token.
struct DynamicConvTraffic {
  std::int64_t forward = 0;   ///< B T D (2 x_bytes + W k_bytes)
  std::int64_t backward = 0;  ///< B T D (3 x_bytes + 2 W k_bytes)
  std::int64_t step = 0;      ///< B D ((2 + 2 L) x_bytes + W k_bytes): one token of B rows
};
/// `x_bytes` and `k_bytes` are the bytes of one element of x and of k.
DynamicConvTraffic dynamic_conv_traffic(std::int64_t batch, std::int64_t time,
                                        std::int64_t channels, int width, int state_length,
                                        std::int64_t x_bytes, std::int64_t k_bytes);

}  // namespace mortar
