// SPDX-License-Identifier: Apache-2.0
// What the two kernels of the backward share: where a thread reads, and one step of time.
#pragma once

#include <algorithm>

#include "device/async_copy.cuh"
#include "device/sigmoid.cuh"
#include "dynamic_conv/cuda/dispatch.cuh"
#include "dynamic_conv/cuda/tile.cuh"

namespace mortar::dynamic_conv::cuda {

struct BackwardParams {
  BackwardProblem problem;
  std::int64_t x_step, k_step, dy_step, dx_step, dk_step;  ///< bytes
  Grid grid;

  explicit BackwardParams(const BackwardProblem& p)
      : problem(p),
        x_step(step_bytes(p.x, p.shape.x_dtype)),
        k_step(step_bytes(p.k, p.shape.k_dtype)),
        dy_step(step_bytes(p.dy, p.shape.x_dtype)),
        dx_step(step_bytes(p.dx, p.shape.x_dtype)),
        dk_step(step_bytes(p.dk, p.shape.k_dtype)) {}
};

/// What a thread reads of one step.
template <class Traits>
struct BackwardStep {
  typename Traits::Taps k;
  device::Vector<typename Traits::X, Traits::kChannels> x, dy;
};

/// Where a thread reads its next step.
template <class Traits>
struct BackwardRows {
  using X = typename Traits::X;
  using K = typename Traits::K;
  const X *x, *dy;
  const K* k;

  __device__ __forceinline__ BackwardRows(const BackwardProblem& p, const Tile& tile, int width)
      : x(at<const X>(p.x, p.x.row(tile.b, tile.begin) + tile.channel)),
        dy(at<const X>(p.dy, p.dy.row(tile.b, tile.begin) + tile.channel)),
        k(at<const K>(p.k, p.k.row(tile.b, tile.begin) + std::int64_t{tile.channel} * width)) {}

  /// Asks for the step that comes `steps` later in L2.
  __device__ __forceinline__ void prefetch(const BackwardParams& params, int steps) const {
    device::prefetch_lines(advance(k, steps * params.k_step), Traits::kChannels * Traits::kWidth);
    device::prefetch_lines(advance(x, steps * params.x_step), Traits::kChannels);
    device::prefetch_lines(advance(dy, steps * params.dy_step), Traits::kChannels);
  }

  __device__ __forceinline__ void load(BackwardStep<Traits>& step, int width) const {
    step.x = device::load_once<X, Traits::kChannels>(x);
    step.dy = device::load_once<X, Traits::kChannels>(dy);
    step.k.load(k, width);
  }

  __device__ __forceinline__ void next(const BackwardParams& params) {
    x = advance(x, params.x_step);
    dy = advance(dy, params.dy_step);
    k = advance(k, params.k_step);
  }
};

/// The gradients of the last W - 1 inputs, which later steps still add to: [j] belongs to the input
/// j + 1 steps before the next step.
template <class Traits>
using Pending = float[Traits::kWidth][Traits::kChannels];

/// d silu(s) / ds.
__device__ __forceinline__ float silu_slope(float s) {
  const float q = device::sigmoid(s);
  return q * fmaf(s, 1 - q, 1.0f);
}

/// pending[lag] += g * tap, the newest set; the tap of a lag multiplied the input that long ago.
template <class Traits>
__device__ __forceinline__ void scatter(const typename Traits::Taps& taps,
                                        const float (&g)[Traits::kChannels], int width,
                                        Pending<Traits>& pending) {
#pragma unroll
  for (int c = 0; c < Traits::kChannels; ++c) {
    pending[0][c] = g[c] * taps.get(c, 0);
#pragma unroll
    for (int lag = 1; lag < Traits::kWidth; ++lag) {
      if (Traits::kVector || lag < width) {
        pending[lag][c] = fmaf(g[c], taps.get(c, lag), pending[lag][c]);
      }
    }
  }
}

/// One step: its input enters the window, its g is made and added to what is pending.
template <class Traits>
__device__ __forceinline__ void take_step(const BackwardStep<Traits>& step, const Shape& shape,
                                          int width,
                                          float (&window)[Traits::kWidth][Traits::kChannels],
                                          Pending<Traits>& pending, float (&g)[Traits::kChannels]) {
  shift(window);
#pragma unroll
  for (int c = 0; c < Traits::kChannels; ++c) {
    window[0][c] = step.x.get(c);
    g[c] = step.dy.get(c);
  }
  if (shape.silu) {
    float s[Traits::kChannels];
    convolve<Traits>(step.k, window, width, s);
#pragma unroll
    for (int c = 0; c < Traits::kChannels; ++c) g[c] *= silu_slope(s[c]);
  }
  shift(pending);
  scatter<Traits>(step.k, g, width, pending);
}

/// Steps that a short kernel reads at once: of a chunk, and the W - 1 after it that complete its
/// dx. 0 where there is no such kernel: for W = 1, whose chunks need no more steps than their own,
/// and for rows of few bytes, which only odd sizes have.
template <class Traits>
constexpr int short_steps() {
  if constexpr (Traits::kVector) {
    if (Traits::kWidth > 1 &&
        Traits::kChannels == vector_channels<typename Traits::X>(Traits::kWidth)) {
      constexpr int kLoadRegisters = 90;  // 12 steps at W = 4 (16-bit), 9 at W = 8 (float32)
      return std::min(kLoadRegisters / step_registers<Traits>(2), 12);
    }
  }
  return 0;
}

/// For one sequence a row without gradients of states, c.steps + W - 1 <= short_steps.
void backward_short(const BackwardProblem& p, const CudaConfig& c, Stream stream);

}  // namespace mortar::dynamic_conv::cuda
