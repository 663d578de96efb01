// SPDX-License-Identifier: Apache-2.0
// Backward of few tokens: a thread reads all steps of a short chunk at once.
//
// g[b,t,d]    = dy[b,t,d] * f'(s[b,t,d])                B batch, T time, D channels, W taps
// dk[b,t,d,w] = g[b,t,d] * x[b,t+w-W+1,d]
// dx[b,t,d]   = sum_w g[b,t+W-1-w,d] * k[b,t+W-1-w,d,w]
// bytes  = B T D (3 e_x + 2 W e_k), e = bytes of an element, and for each chunk of C steps the
//          W - 1 after it once more, mostly from L2
// B=1 T=33 D=3072 W=4, bf16: 2.2 MB -> 0.5 us at 4.28 TB/s (copy roof of an H200)
// limit  : trips to memory: one for the inputs and one for the outputs
// wrong when: there is work for every SM (then the W - 1 steps count), sequences are packed, or
//          states have gradients, for which chunks would need code of their own -> bwd.cu
#include "device/launch.cuh"
#include "device/pdl.cuh"
#include "dynamic_conv/cuda/backward.cuh"

namespace mortar::dynamic_conv::cuda {
namespace {

constexpr int kCtas = 3;  ///< that an SM must hold: 168 registers a thread

template <class Traits>
__global__ void __launch_bounds__(kMaxThreads, kCtas)
    short_backward_kernel(const __grid_constant__ BackwardParams params) {
  using X = typename Traits::X;
  using K = typename Traits::K;
  constexpr int kChannels = Traits::kChannels;
  constexpr int kWidth = Traits::kWidth;
  constexpr int kSteps = short_steps<Traits>();
  const BackwardProblem& p = params.problem;
  const Shape& shape = p.shape;

  // Coordinates and pointers.
  const Tile tile = Tile::make<kChannels>(shape, params.grid);
  const bool live = tile.channel < shape.channels;
  const int stop = min(tile.end + kWidth - 1, shape.time);
  BackwardRows<Traits> rows(p, tile, kWidth);
  device::pdl_trigger();
#pragma unroll
  for (int u = 0; u < kSteps; ++u) {
    if (live && tile.begin + u < stop) rows.prefetch(params, u);
  }

  // Guard.
  device::pdl_wait();
  if (!live) return;

  // Load. Steps past the end of the sequence are zeros, which add nothing.
  BackwardStep<Traits> steps[kSteps];
#pragma unroll
  for (int u = 0; u < kSteps; ++u) {
    steps[u] = {};
    if (tile.begin + u < stop) rows.load(steps[u], kWidth);
    rows.next(params);
  }
  float window[kWidth][kChannels];
  const Walk walk = Walk::at(shape.sequences, tile.b, tile.begin);
  read_history_at_once<Traits>(shape, p.x, p.initial, tile, walk, tile.begin, window);
  Pending<Traits> pending = {};

  // Compute and store.
  K* dk = at<K>(p.dk, p.dk.row(tile.b, tile.begin) + std::int64_t{tile.channel} * kWidth);
  X* dx = at<X>(p.dx, p.dx.row(tile.b, tile.begin) + tile.channel);
#pragma unroll
  for (int u = 0; u < kSteps; ++u) {
    const int t = tile.begin + u;
    const int complete = t - kWidth + 1;  // the step whose dx has all its sums with this one
    if (complete >= tile.end) break;
    float g[kChannels];
    take_step<Traits>(steps[u], shape, kWidth, window, pending, g);
    if (t < tile.end) Traits::store_gradient(dk, g, window, kWidth);
    dk = advance(dk, params.dk_step);
    if (u < kWidth - 1) continue;
    device::store_once<X, kChannels>(dx, pending[kWidth - 1]);
    dx = advance(dx, params.dx_step);
  }
}

// ------------------------------------------------------------------------------------------- host

}  // namespace

void backward_short(const BackwardProblem& p, const CudaConfig& c, Stream stream) {
  with_traits<false>("dynamic_conv_backward", p.shape, [&](auto traits) {
    using Traits = decltype(traits);
    if constexpr (short_steps<Traits>() > 0) {
      launch_tiles<short_backward_kernel<Traits>, Traits, BackwardParams>("dynamic_conv_backward",
                                                                          p, c, stream);
      return true;
    }
    return false;
  });
}

}  // namespace mortar::dynamic_conv::cuda
