// SPDX-License-Identifier: Apache-2.0
// LoRA training: the forward and the backward of
//
//   y_s = base_s + scale * (drop(x) A_s^T) B_s^T
//
// for S slices that share x (q/k/v, gate/up) and for rows of one or of several adapters, each with
// its own rank, scale and dropout. M rows, K columns of x, N_s columns of slice s, R_s the largest
// rank that any adapter has on slice s, L adapters.
//
// The method is Hu et al. (arXiv:2106.09685); masks are Philox 4x32-7 (Salmon et al., 2011).
//
// Dtypes: x and dx, base and y, dy, the weights, and each gradient of a weight are float32, float16
// or bfloat16, in any mixture; all weights of a call have one dtype, base_s that of y_s.
// Strides: any, in elements. Copies are made nowhere; matrices whose rows or columns are dense and
// 16-byte aligned go fastest.
//
// Numerics (docs/numerics.md): products of float32 are true float32, sums are float32 in a fixed
// order, outputs are rounded once. h and ds, the values between two products, are rounded once, to
// the dtype of the weights. Results are bitwise repeatable; they do not depend on strides or on
// whether an output was given.
//
// No op allocates, synchronises, copies or casts behind the caller's back; every argument is
// checked before anything is written, and mistakes throw mortar::Error.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "mortar/lora.h"
#include "mortar/stream.h"
#include "mortar/tensor.h"

namespace mortar {

/// The matrices of one adapter on one slice. Both undefined: the adapter leaves the slice alone.
struct LoraTrainPair {
  Tensor a;         ///< [r, K], r from 1 to kLoraMaxRank
  Tensor b;         ///< [N_s, r]
  float scale = 1;  ///< alpha / r, or what takes its place
};

/// Which adapter a row belongs to, in one of three forms. All rows, if L = 1: nothing. Contiguous
/// segments: `offsets`, int32 [L + 1] on the device, dense; rows offsets[l] .. offsets[l + 1] - 1
/// are adapter l's, offsets[0] is 0 and offsets[L] is M. Any rows: `plan`, made by lora_plan, whose
/// base rows (-1) take the base alone: y = base (or 0), h = 0 and dx = 0.
///
/// Offsets are read on the device. On the CPU wrong ones are an error; on CUDA they give
/// unspecified values, but no access outside the tensors: lora_train_check reports them.
struct LoraTrainRows {
  Tensor offsets;
  Tensor plan;
};

/// Which elements are dropped: those of x, as PEFT does, or those of the delta before it is added
/// to the base, as NeMo does by default.
enum class LoraDropoutOn : std::int8_t { kInput, kDelta };

/// Elements are dropped with probability p, first rounded to a multiple of 2^-16, and the others
/// divided by 1 - p. With p = 1 all are dropped and the delta is zero. Element (m, c) of x, or of
/// the delta (c counts through all slices: N_0 + ... + c), draws by its index m K + c, or
/// m (sum N_s) + c: the mask depends on seed, offset and index alone. The slices of a call share
/// the mask of x.
struct LoraDropout {
  std::span<const float> p;  ///< [L], each in [0, 1]; empty: nothing is dropped
  LoraDropoutOn on = LoraDropoutOn::kInput;
  Tensor rng;  ///< int64 [2], seed and offset, on the device; needed if any p lies in (0, 1)
};

/// What forward and backward have in common. Spans are read during the call only.
struct LoraTrainProblem {
  std::span<const LoraTrainPair> pairs;               ///< [L * S]: adapter l, slice s at l * S + s
  int num_slices = 1;                                 ///< S, 1 to kLoraMaxSlices
  std::array<std::int64_t, kLoraMaxSlices> widths{};  ///< N_s
  DType weight_dtype = DType::kFloat32;
  LoraTrainRows rows;
  LoraDropout dropout;
};

/// Columns of h: sum over slices of R_s rounded up to a multiple of 8. Slice s begins after those
/// of the slices before it.
std::int64_t lora_train_hidden_width(const LoraTrainProblem& problem);

struct LoraTrainForward {
  Tensor x;                      ///< [M, K]
  std::span<const Tensor> base;  ///< [S] of [M, N_s], each may be undefined; empty: none
  std::span<const Tensor> y;     ///< [S] of [M, N_s], written; y_s may be base_s itself
  /// [M, lora_train_hidden_width], of the dtype of the weights, dense, 16-byte aligned: for the
  /// backward. Holds scale / (1 - p) * (drop(x) A^T), zeros past a rank. Undefined: not wanted.
  Tensor h;
};

/// y_s = base_s + scale * (drop(x) A_s^T) B_s^T, and h.
///
/// workspace: uint8 [>= lora_train_forward_workspace(...)], 16-byte aligned.
/// Throws Error, with nothing written, if an argument does not fit.
void lora_train_forward(const LoraTrainProblem& problem, const LoraTrainForward& forward,
                        const Tensor& workspace, Stream stream);
std::int64_t lora_train_forward_workspace(const LoraTrainProblem& problem,
                                          const LoraTrainForward& forward);

/// Gradients of one pair. Undefined: frozen, and nothing is computed for it.
struct LoraTrainGrads {
  Tensor a;            ///< [r, K]
  Tensor b;            ///< [N_s, r]
  bool add_a = false;  ///< added to what is there, in float32, rounded once; else overwritten
  bool add_b = false;
};

struct LoraTrainBackward {
  std::span<const Tensor> dy;  ///< [S] of [M, N_s]
  Tensor x;                    ///< [M, K]; may be left out if no dA is wanted and h is given
  Tensor h;                    ///< of the forward; undefined: computed again where dB needs it
  Tensor dx;                   ///< [M, K], of any float dtype; undefined: not wanted
  bool add_dx = false;         ///< added to what is there, else every row is overwritten
  /// [L * S]; empty: none. Those of an adapter without rows become zero (added to: stay).
  std::span<const LoraTrainGrads> grads;
};

/// With ds = scale / (1 - p) * dy B: dx = sum over slices of ds A (masked as x was),
/// dA = ds^T drop(x), dB = dy^T h; with kDelta dropout dy is masked instead.
///
/// workspace: uint8 [>= lora_train_backward_workspace(...)], 16-byte aligned.
/// Throws Error, with nothing written, if an argument does not fit.
void lora_train_backward(const LoraTrainProblem& problem, const LoraTrainBackward& backward,
                         const Tensor& workspace, Stream stream);
std::int64_t lora_train_backward_workspace(const LoraTrainProblem& problem,
                                           const LoraTrainBackward& backward);

/// Checks the content of `offsets` for L adapters and M rows: starts at 0, does not decrease, ends
/// at M. Throws Error naming the first bad entry. Reads it back and waits for the stream: a
/// debugging aid, not for the hot path.
void lora_train_check(const Tensor& offsets, std::int64_t num_adapters, std::int64_t num_rows,
                      Stream stream);

/// Fewest bytes that the ops can move, and their operations, for one adapter and one slice of rank
/// r; what the benchmarks divide by.
struct LoraTrainTraffic {
  std::int64_t forward_bytes = 0;   ///< x, y (twice with a base), A, B
  std::int64_t backward_bytes = 0;  ///< x, dy, dx, twice A and B
  std::int64_t forward_flops = 0, backward_flops = 0;
};
LoraTrainTraffic lora_train_traffic(std::int64_t rows, std::int64_t hidden, std::int64_t width,
                                    int rank, DType activation, DType weight, bool base);

}  // namespace mortar
