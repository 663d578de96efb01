// SPDX-License-Identifier: Apache-2.0
// Decode: one token of N sequences; a thread takes a few adjacent channels of a row.
//
// y[n,d] = f(sum_{w<W-1} k[n,d,w] * state[d,L-W+1+w] + k[n,d,W-1] * x[n,d])
// state[d,:] = (state[d,1:], x[n,d])            N rows, D channels, W taps, L = W or W - 1
// bytes  = N D ((2 + 2 L) e_x + W e_k), e = bytes of an element
// N=128 D=3072 W=L=4, bf16: 11.0 MB -> 2.6 us at 4.28 TB/s (copy roof of an H200)
// limit  : latency: a launch, the slot, then the state that it names; everything else is loaded
//          beside the slot, and without slots all of it is asked for in L2 before the predecessor
//          ends. The state is moved in place: a ring index would write 2 of every 8 bytes and dirty
//          every sector all the same
// wrong when: rows are not aligned, dtypes differ, or the state is not dense in (D, L) -> the
//          scalar traits
#include <limits>

#include "device/async_copy.cuh"
#include "device/launch.cuh"
#include "device/pdl.cuh"
#include "device/sigmoid.cuh"
#include "dynamic_conv/cuda/backend.cuh"
#include "dynamic_conv/cuda/dispatch.cuh"

namespace mortar::dynamic_conv::cuda {
namespace {

constexpr int kStepThreads = 512;  ///< few CTAs: their number, not their size, costs time at launch

struct Params {
  StepProblem problem;
  unsigned columns;  ///< CTAs per row
};

/// The state of one thread's channels, dense in (D, L).
template <class Traits, int L>
struct DenseState {
  using X = typename Traits::X;
  static constexpr int kEntries = Traits::kChannels * L;
  device::Vector<X, kEntries> old;

  static __device__ __forceinline__ X* at(const StepProblem& p, std::int64_t slot, int channel) {
    return static_cast<X*>(p.state.data) + p.state.at(slot, 0, 0) + std::int64_t{channel} * L;
  }
  static __device__ __forceinline__ void prefetch(const StepProblem& p, std::int64_t slot,
                                                  int channel) {
    device::prefetch_lines(at(p, slot, channel), Traits::kChannels * L);
  }
  __device__ __forceinline__ void load(const StepProblem& p, std::int64_t slot, int channel) {
    device::load_once(old, static_cast<const X*>(at(p, slot, channel)));
  }
  /// The input `lag` steps ago, lag >= 1.
  __device__ __forceinline__ float get(int c, int lag) const { return old.get(c * L + L - lag); }
  __device__ __forceinline__ void store(const StepProblem& p, std::int64_t slot, int channel,
                                        const float (&x)[Traits::kChannels]) const {
    device::store_values_once<X, kEntries>(
        at(p, slot, channel), [&](int i) { return i % L == L - 1 ? x[i / L] : old.get(i + 1); });
  }
};

/// The state of one channel, by strides; L is at most the width.
template <class Traits>
struct StridedState {
  using X = typename Traits::X;
  float value[kMaxWidth + 1];  // by lag; [0] unused

  /// Nothing: its entries may lie in as many lines.
  static __device__ __forceinline__ void prefetch(const StepProblem&, std::int64_t, int) {}
  __device__ __forceinline__ void load(const StepProblem& p, std::int64_t slot, int channel) {
#pragma unroll
    for (int lag = 1; lag <= kMaxWidth; ++lag) {
      value[lag] = lag <= p.state_length
                       ? device::to_float(static_cast<const X*>(
                             p.state.data)[p.state.at(slot, channel, p.state_length - lag)])
                       : 0.0f;
    }
  }
  __device__ __forceinline__ float get(int, int lag) const { return value[lag]; }
  __device__ __forceinline__ void store(const StepProblem& p, std::int64_t slot, int channel,
                                        const float (&x)[1]) const {
#pragma unroll
    for (int lag = 1; lag <= kMaxWidth; ++lag) {
      if (lag <= p.state_length) {
        static_cast<X*>(p.state.data)[p.state.at(slot, channel, p.state_length - lag)] =
            device::from_float<X>(lag == 1 ? x[0] : value[lag - 1]);
      }
    }
  }
};

template <class Traits, class State>
__global__ void __launch_bounds__(kStepThreads) step_kernel(const __grid_constant__ Params params) {
  using X = typename Traits::X;
  using K = typename Traits::K;
  constexpr int kChannels = Traits::kChannels;
  const StepProblem& p = params.problem;
  const int width = Traits::kVector ? Traits::kWidth : p.width;

  // Coordinates and guard.
  device::pdl_trigger();
  const std::int64_t row = blockIdx.x / params.columns;
  const int channel =
      static_cast<int>(blockIdx.x % params.columns * blockDim.x + threadIdx.x) * kChannels;
  if (channel >= p.channels) return device::pdl_wait();
  const K* k = static_cast<const K*>(p.k.data) + p.k.row(row, 0) + std::int64_t{channel} * width;
  const X* x = static_cast<const X*>(p.x.data) + p.x.row(row, 0) + channel;
  X* y = static_cast<X*>(p.y.data) + p.y.row(row, 0) + channel;

  // Load: taps and x do not wait for the slot.
  device::prefetch_lines(k, kChannels * width);
  device::prefetch_lines(x, kChannels);
  if (p.slots == nullptr) State::prefetch(p, row, channel);
  device::pdl_wait();
  const std::int64_t slot = p.slot(row);
  typename Traits::Taps taps;
  taps.load(k, width);
  const auto input = device::load_once<X, kChannels>(x);
  float s[kChannels] = {};
  if (slot < 0) {  // padding
    device::store_once<X, kChannels>(y, s);
    return;
  }
  State state;
  state.load(p, slot, channel);

  // Compute and store.
  float window[Traits::kWidth][kChannels];
#pragma unroll
  for (int c = 0; c < kChannels; ++c) {
    window[0][c] = input.get(c);
#pragma unroll
    for (int lag = 1; lag < Traits::kWidth; ++lag) window[lag][c] = state.get(c, lag);
  }
  convolve<Traits>(taps, window, width, s);
  if (p.silu) {
#pragma unroll
    for (int c = 0; c < kChannels; ++c) s[c] *= device::sigmoid(s[c]);
  }
  device::store_once<X, kChannels>(y, s);
  state.store(p, slot, channel, window[0]);
}

// ------------------------------------------------------------------------------------------- host

template <class Traits, class State>
void launch_step(const StepProblem& p, Stream stream) {
  const std::int64_t groups = p.channels / Traits::kChannels;
  device::Launch launch;
  launch.threads = kStepThreads;
  while (launch.threads > 32 && launch.threads / 2 >= groups) launch.threads /= 2;
  Params params;
  params.problem = p;
  params.columns = static_cast<unsigned>(ceil_div<std::int64_t>(groups, launch.threads));
  const std::int64_t ctas = p.rows * params.columns;
  check(ctas <= std::numeric_limits<std::int32_t>::max(),
        "dynamic_conv_step: x must need at most 2^31 - 1 blocks of threads, got ", ctas);
  launch.grid = dim3(static_cast<unsigned>(ctas));
  launch.stream = stream;
  launch.pdl = true;
  device::launch<step_kernel<Traits, State>>("dynamic_conv_step", launch, params);
}

/// Whether the state is dense in (D, L) and each thread's part of it aligned.
template <class Traits, int L>
bool is_dense(const StepProblem& p) {
  if (p.state_length != L || p.state.channel_stride != L) return false;
  if (L > 1 && p.state.position_stride != 1) return false;
  const Signal as_signal = {p.state.data, p.state.sequence_stride, 0};
  return aligned(as_signal, p.x_dtype,
                 device::Vector<typename Traits::X, Traits::kChannels * L>::kAlignment);
}

}  // namespace

void step(const StepProblem& p, Stream stream) {
  with_traits<false>("dynamic_conv_step", p, [&](auto traits) {
    using Traits = decltype(traits);
    if (!fits<Traits>(p, {p.x, p.y}, {p.k})) return false;
    if constexpr (Traits::kVector) {
      constexpr int kWidth = Traits::kWidth;
      if (is_dense<Traits, kWidth>(p)) {
        launch_step<Traits, DenseState<Traits, kWidth>>(p, stream);
        return true;
      }
      if constexpr (kWidth > 1) {
        if (is_dense<Traits, kWidth - 1>(p)) {
          launch_step<Traits, DenseState<Traits, kWidth - 1>>(p, stream);
          return true;
        }
      }
      return false;
    } else {
      launch_step<Traits, StridedState<Traits>>(p, stream);
      return true;
    }
  });
}

}  // namespace mortar::dynamic_conv::cuda
