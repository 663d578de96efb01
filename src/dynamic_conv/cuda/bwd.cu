// SPDX-License-Identifier: Apache-2.0
// Backward in one pass: a thread takes a few adjacent channels through a chunk of time.
//
// g[b,t,d]    = dy[b,t,d] * f'(s[b,t,d])                B batch, T time, D channels, W taps
// dk[b,t,d,w] = g[b,t,d] * x[b,t+w-W+1,d]
// dx[b,t,d]   = sum_w g[b,t+W-1-w,d] * k[b,t+W-1-w,d,w]
// bytes  = B T D (3 e_x + 2 W e_k), e = bytes of an element; each input read once, but for the halo
// B=8 T=4096 D=3072 W=4, bf16: 2.215 GB -> 517 us at 4.28 TB/s (copy roof of an H200)
// limit  : DRAM bandwidth, half of it writes. Step t adds to dx of steps t - W + 1 .. t, which wait
//          in registers; the oldest is complete and stored. A chunk of C steps walks W - 1 more to
//          complete its own dx: (W - 1) / C more reads, mostly from L2
// wrong when: rows are not aligned to the vectors, or dtypes differ -> the scalar traits; too few
//          tokens for all SMs, so that trips to memory count -> bwd_short.cu
#include "device/launch.cuh"
#include "device/pdl.cuh"
#include "dynamic_conv/cuda/backend.cuh"
#include "dynamic_conv/cuda/backward.cuh"

namespace mortar::dynamic_conv::cuda {
namespace {

constexpr int kLoadRegisters = 24;  ///< of the steps in flight: 4 steps at W = 4, 16-bit
/// W = 3 (8 x 4096 x 3072, bf16, H200): 517 us in chunks of 96 steps, 530 in chunks of 64 or 128;
/// all other widths gain up to 4 % from 128.
constexpr int most_steps(int width) { return width == 3 ? 96 : 128; }
/// Fewer, longer chunks beat more threads: 1 x 4096 x 3072, W = 4, H200: 76.5 us with 372 an SM in
/// chunks of 128 steps, 79 us with 1,490 in chunks of 32.
constexpr int kThreadsPerSm = 400;

/// Steps whose loads are in flight together.
template <class Traits>
constexpr int kGroup = steps_ahead<Traits>(2, kLoadRegisters);

/// A complete gradient of step t, to dx, or to dinitial_state if t lies before the sequence.
/// dx[t] belongs to the chunk that holds t, dinitial_state to the one that owns the boundary.
template <class Traits>
__device__ __forceinline__ void emit(const BackwardProblem& p, const Tile& tile, const Walk& walk,
                                     int t, const float (&gradient)[Traits::kChannels]) {
  using X = typename Traits::X;
  constexpr int kChannels = Traits::kChannels;
  const Shape& shape = p.shape;
  const bool real = t >= walk.start;
  const int position = shape.state_length + t - walk.start;
  if (real ? t < tile.begin || t >= tile.end
           : !p.dinitial.given() || position < 0 || !tile.owns(walk.start)) {
    return;
  }
  const int channel = opaque(tile.channel);
  float v[kChannels];
#pragma unroll
  for (int c = 0; c < kChannels; ++c) v[c] = gradient[c];
  const int final_position = shape.state_length + t - walk.end;
  if (p.dfinal.given() && final_position >= 0) {
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      v[c] += device::to_float(
          *at<const X>(p.dfinal, p.dfinal.at(walk.index, channel + c, final_position)));
    }
  }
  if (real) {
    device::store_once<X, kChannels>(at<X>(p.dx, p.dx.row(opaque(tile.b), t) + channel), v);
    return;
  }
#pragma unroll
  for (int c = 0; c < kChannels; ++c) {
    *at<X>(p.dinitial, p.dinitial.at(walk.index, channel + c, position)) =
        device::from_float<X>(v[c]);
  }
}

template <class Traits>
__global__ void __launch_bounds__(kMaxThreads, min_ctas<Traits>(46, 2, kGroup<Traits>, 2, 2))
    backward_kernel(const __grid_constant__ BackwardParams params) {
  using X = typename Traits::X;
  using K = typename Traits::K;
  constexpr int kChannels = Traits::kChannels;
  constexpr int kWidth = Traits::kWidth;
  constexpr int kAhead = kGroup<Traits>;
  const BackwardProblem& p = params.problem;
  const Shape& shape = p.shape;
  const int width = Traits::kVector ? kWidth : shape.width;

  // Coordinates and pointers; the inputs' run kAhead steps in front of dk's.
  const Tile tile = Tile::make<kChannels>(shape, params.grid);
  const bool live = tile.channel < shape.channels;
  int stop = static_cast<int>(min(std::int64_t{tile.end} + width - 1, std::int64_t{shape.time}));
  BackwardRows<Traits> rows(p, tile, width);
  K* dk = at<K>(p.dk, p.dk.row(tile.b, tile.begin) + std::int64_t{tile.channel} * width);

  // The successor of a long grid would take SMs from blocks that are still to come (81 to 86 us at
  // 1 x 4096 x 3072).
  if (params.grid.steps < CudaConfig::kShortSteps) {
    device::pdl_trigger();
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      if (live && tile.begin + u < stop) rows.prefetch(params, u);
    }
  }

  // Load: the first steps' data does not depend on where sequences lie.
  device::pdl_wait();
  BackwardStep<Traits> steps[kAhead];
  const auto load = [&](int u, bool valid) {
    if (valid) rows.load(steps[u], width);
    rows.next(params);
  };
#pragma unroll
  for (int u = 0; u < kAhead; ++u) load(u, live && tile.begin + u < stop);

  // Guard: the search for the sequence takes whole warps.
  Walk walk = walk_at(shape, tile);
  if (!live) return;
  float window[kWidth][kChannels];
  Pending<Traits> pending;
  const auto begin_sequence = [&](int t) {
    read_history_at_once<Traits>(shape, p.x, p.initial, tile, walk, t, window);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
#pragma unroll
      for (int c = 0; c < kChannels; ++c) pending[j][c] = 0;
    }
    if (walk.start == t && shape.state_length == width) {  // no tap reaches the oldest of L = W
      emit<Traits>(p, tile, walk, t - width, pending[0]);
    }
  };
  // Sequences that end at t: what is pending is complete, and the next one starts afresh.
  const auto cross_boundaries = [&](int t) {
    while (walk.end == t) {
#pragma unroll
      for (int j = kWidth - 2; j >= 0; --j) {
        if (Traits::kVector || j + 1 < width) emit<Traits>(p, tile, walk, t - 1 - j, pending[j]);
      }
      walk.advance(shape.sequences);
      if (walk.done() || walk.start > tile.end) {
        stop = t;  // no later step adds to a gradient of this chunk
      } else {
        begin_sequence(t);
      }
    }
  };
  begin_sequence(tile.begin);
  if (tile.begin == 0) cross_boundaries(0);

  // Compute and store; a step's registers are loaded again as soon as they have been used.
  X* dx = at<X>(p.dx, p.dx.row(tile.b, tile.begin) + tile.channel);
  dx = advance(dx, -(width - 1) * params.dx_step);  // of the step whose gradient completes
  const auto consume = [&](int u, float(&g)[kChannels]) {
    take_step<Traits>(steps[u], shape, width, window, pending, g);
  };
  const auto store_dk = [&](const float(&g)[kChannels]) {
    Traits::store_gradient(dk, g, window, width);
  };
  int base = tile.begin;
  while (base < stop) {
    // Whole groups of steps: no boundary in them, and gradients that go to dk and dx as they are.
    // Predicates and no branches, or all loads would share a scoreboard and each step wait for the
    // newest of them.
    const int first = max(walk.start, tile.begin);  // step whose dx is this chunk's
    const int dfinal_steps = p.dfinal.given() ? shape.state_length : 0;
    const bool plain = Traits::kVector && (!p.dinitial.given() || base >= first + width - 1);
    const int last =
        plain ? min(walk.end - max(kAhead, dfinal_steps - width + kAhead + 1), stop - 1) : -1;
    for (; base <= last; base += kAhead) {
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        const int t = base + u;
        float g[kChannels];
        consume(u, g);
        load(u, t + kAhead < stop);
        if (t < tile.end) store_dk(g);
        dk = advance(dk, params.dk_step);
        if (t - width + 1 >= first && t - width + 1 < tile.end) {
          device::store_once<X, kChannels>(dx, pending[kWidth - 1]);
        }
        dx = advance(dx, params.dx_step);
      }
    }
    if (base >= stop) {
      if (base == stop) cross_boundaries(base);
      break;
    }
    // One group step by step: boundaries lie in it or at its start, or the chunk comes to an end.
    // The next group is loaded at its end: a load in each step would share a scoreboard with those
    // before it, and every step would wait for a trip to memory.
    int from = 0;
    do {
      const int to = min(min(walk.end, stop) - base, kAhead);
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        if (u < from || u >= to) continue;
        const int t = base + u;
        float g[kChannels];
        consume(u, g);
        if (t < tile.end) store_dk(g);
        dk = advance(dk, params.dk_step);
        dx = advance(dx, params.dx_step);
        if constexpr (Traits::kVector) {
          emit<Traits>(p, tile, walk, t - width + 1, pending[kWidth - 1]);
        } else {
#pragma unroll
          for (int j = 0; j < kWidth; ++j) {
            if (j == width - 1) emit<Traits>(p, tile, walk, t - width + 1, pending[j]);
          }
        }
      }
      from = to;
      cross_boundaries(base + to);
    } while (from < kAhead && base + from < stop);
    base += kAhead;
#pragma unroll
    for (int u = 0; u < kAhead; ++u) load(u, base + u < stop);
  }
}

// ------------------------------------------------------------------------------------------- host

}  // namespace

void backward(const BackwardProblem& p, const CudaConfig* config, Stream stream) {
  const bool dense = !p.shape.sequences.packed() && !p.dfinal.given() && !p.dinitial.given();
  with_traits<true>("dynamic_conv_backward", p.shape, [&](auto traits) {
    using Traits = decltype(traits);
    if (!fits<Traits>(p.shape, {p.x, p.dy, p.dx}, {p.k, p.dk})) return false;
    const Loads loads{kGroup<Traits>, dense ? short_steps<Traits>() : 0, most_steps(p.shape.width),
                      kThreadsPerSm, p.shape.width - 1};
    const CudaConfig c = config != nullptr ? *config : config_for<Traits>(p.shape, loads);
    if (c.steps + p.shape.width - 1 <= loads.at_once) {
      backward_short(p, c, stream);
    } else {
      launch_tiles<backward_kernel<Traits>, Traits, BackwardParams>("dynamic_conv_backward", p, c,
                                                                    stream);
    }
    return true;
  });
}

}  // namespace mortar::dynamic_conv::cuda
