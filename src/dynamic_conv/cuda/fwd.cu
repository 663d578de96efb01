// SPDX-License-Identifier: Apache-2.0
// Forward: a thread takes a few adjacent channels through a chunk of time.
//
// y[b,t,d] = f(sum_w k[b,t,d,w] * x[b,t+w-W+1,d])      B batch, T time, D channels, W taps
// bytes  = B T D (2 e_x + W e_k), e = bytes of an element; k is W e_k of them and read once
// B=8 T=4096 D=3072 W=4, bf16: 1.208 GB -> 282 us at 4.28 TB/s (copy roof of an H200)
// limit  : DRAM bandwidth; 2 W flop per element. A thread's taps of a step are 16 bytes; the loads
//          of 8 steps are in flight together over the back edge of the loop: 160 bytes a thread,
//          100 KB an SM, where 32-48 KB hide the latency
// wrong when: rows are not aligned to the vectors, or dtypes differ -> the scalar traits
#include "device/async_copy.cuh"
#include "device/launch.cuh"
#include "device/pdl.cuh"
#include "device/sigmoid.cuh"
#include "dynamic_conv/cuda/backend.cuh"
#include "dynamic_conv/cuda/dispatch.cuh"
#include "dynamic_conv/cuda/tile.cuh"

namespace mortar::dynamic_conv::cuda {
namespace {

constexpr int kLoadRegisters = 40;  ///< 8 steps at W = 4, 16-bit: 2 % faster than 4 steps

/// Longer chunks are slower, although each of them reads W - 1 inputs again before it begins:
/// src/dynamic_conv/README.md has the times.
constexpr int kMostSteps = 8;
/// 1 x 1000 x 1536, W = 4, H200: 6.3 us with 730 threads an SM in chunks of 8 steps, 7.4 us with
/// 365 in chunks of 16.
constexpr int kThreadsPerSm = 600;

struct Params {
  ForwardProblem problem;
  std::int64_t x_step, k_step, y_step;  ///< bytes
  Grid grid;

  explicit Params(const ForwardProblem& p)
      : problem(p),
        x_step(step_bytes(p.x, p.shape.x_dtype)),
        k_step(step_bytes(p.k, p.shape.k_dtype)),
        y_step(step_bytes(p.y, p.shape.x_dtype)) {}
};

/// Steps whose loads are in flight together.
template <class Traits>
constexpr int kGroup = steps_ahead<Traits>(1, kLoadRegisters);

/// final[n] = the last L entries of (initial state, inputs) of the walk's sequence.
template <class Traits>
__device__ __forceinline__ void write_final_state(const ForwardProblem& p, const Tile& tile,
                                                  const Walk& walk) {
  using X = typename Traits::X;
  const int channel = opaque(tile.channel);
#pragma unroll 1
  for (int j = 0; j < p.shape.state_length; ++j) {
    float v[Traits::kChannels];
    read_input<Traits>(p.shape, p.x, p.initial, tile, walk, walk.end - p.shape.state_length + j, v);
#pragma unroll
    for (int c = 0; c < Traits::kChannels; ++c) {
      *at<X>(p.final, p.final.at(walk.index, channel + c, j)) = device::from_float<X>(v[c]);
    }
  }
}

/// One channel a thread takes a few registers more for addresses than what it loads.
template <class Traits>
constexpr int kFixedRegisters = Traits::kChannels == 1 ? 46 : 42;

template <class Traits>
__global__ void __launch_bounds__(kMaxThreads, min_ctas<Traits>(kFixedRegisters<Traits>, 1,
                                                                kGroup<Traits>, 1, 7))
    forward_kernel(const __grid_constant__ Params params) {
  using X = typename Traits::X;
  using K = typename Traits::K;
  constexpr int kChannels = Traits::kChannels;
  constexpr int kAhead = kGroup<Traits>;
  const ForwardProblem& p = params.problem;
  const Shape& shape = p.shape;
  const int width = Traits::kVector ? Traits::kWidth : shape.width;

  device::pdl_trigger();

  // Coordinates and pointers; `x` and `k` run kAhead steps in front of `y`.
  const Tile tile = Tile::make<kChannels>(shape, params.grid);
  const bool live = tile.channel < shape.channels;
  const X* x = at<const X>(p.x, p.x.row(tile.b, tile.begin) + tile.channel);
  const K* k = at<const K>(p.k, p.k.row(tile.b, tile.begin) + std::int64_t{tile.channel} * width);
  X* y = at<X>(p.y, p.y.row(tile.b, tile.begin) + tile.channel);

  if (params.grid.steps < CudaConfig::kShortSteps) {
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      if (!live || tile.begin + u >= tile.end) continue;
      device::prefetch_lines(advance(k, u * params.k_step), kChannels * Traits::kWidth);
      device::prefetch_lines(advance(x, u * params.x_step), kChannels);
    }
  }

  // Load: the first steps' data does not depend on where sequences lie.
  device::pdl_wait();
  typename Traits::Taps taps[kAhead];
  device::Vector<X, kChannels> inputs[kAhead];
  const auto load = [&](int u, bool valid) {
    if (valid) {
      inputs[u] = device::load_once<X, kChannels>(x);
      taps[u].load(k, width);
    }
    x = advance(x, params.x_step);
    k = advance(k, params.k_step);
  };
#pragma unroll
  for (int u = 0; u < kAhead; ++u) load(u, live && tile.begin + u < tile.end);

  // Guard: the search for the sequence takes whole warps.
  Walk walk = walk_at(shape, tile);
  if (!live) return;
  float window[Traits::kWidth][kChannels];
  read_history_at_once<Traits>(shape, p.x, p.initial, tile, walk, tile.begin, window);
  const auto cross_boundaries = [&](int t) {
    while (walk.end == t) {
      if (p.final.given()) write_final_state<Traits>(p, tile, walk);
      walk.advance(shape.sequences);
      if (!walk.done()) read_history<Traits>(shape, p.x, p.initial, tile, walk, t, window);
    }
  };
  if (tile.begin == 0) cross_boundaries(0);

  // Compute and store; a step's registers are loaded again as soon as they have been used.
  const auto consume = [&](int u, float(&s)[kChannels]) {
    shift(window);
#pragma unroll
    for (int c = 0; c < kChannels; ++c) window[0][c] = inputs[u].get(c);
    convolve<Traits>(taps[u], window, width, s);
  };
  const auto activate = [&](float(&s)[kChannels]) {
#pragma unroll
    for (int c = 0; c < kChannels; ++c) s[c] *= device::sigmoid(s[c]);
  };
  const auto store = [&](const float(&s)[kChannels]) {
    device::store_once<X, kChannels>(y, s);
    y = advance(y, params.y_step);
  };
  int base = tile.begin;
  while (base < tile.end) {
    // Whole groups of steps: no boundary in them. One block without branches, or all loads would
    // share a scoreboard and each step wait for the newest of them.
    const int last = min(walk.end, tile.end) - kAhead;
    for (; base <= last; base += kAhead) {
      float s[kAhead][kChannels];
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        consume(u, s[u]);
        load(u, base + u + kAhead < tile.end);
      }
      if (shape.silu) {
#pragma unroll
        for (int u = 0; u < kAhead; ++u) activate(s[u]);
      }
#pragma unroll
      for (int u = 0; u < kAhead; ++u) store(s[u]);
    }
    if (base == tile.end) {
      cross_boundaries(base);
      break;
    }
    // One group step by step: boundaries lie in it or at its start, or the loads come to an end.
    int from = 0;
    do {
      const int to = min(min(walk.end, tile.end) - base, kAhead);
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        if (u < from || u >= to) continue;
        float s[kChannels];
        consume(u, s);
        load(u, base + u + kAhead < tile.end);
        if (shape.silu) activate(s);
        store(s);
      }
      from = to;
      cross_boundaries(base + to);
    } while (from < kAhead && base + from < tile.end);
    base += kAhead;
  }
}

// ------------------------------------------------------------------------------------------- host

}  // namespace

void forward(const ForwardProblem& p, const CudaConfig* config, Stream stream) {
  with_traits<true>("dynamic_conv_forward", p.shape, [&](auto traits) {
    using Traits = decltype(traits);
    if (!fits<Traits>(p.shape, {p.x, p.y}, {p.k})) return false;
    const Loads loads{kGroup<Traits>, 0, round_up(kMostSteps, kGroup<Traits>), kThreadsPerSm, 0};
    const CudaConfig c = config != nullptr ? *config : config_for<Traits>(p.shape, loads);
    launch_tiles<forward_kernel<Traits>, Traits, Params>("dynamic_conv_forward", p, c, stream);
    return true;
  });
}

}  // namespace mortar::dynamic_conv::cuda
