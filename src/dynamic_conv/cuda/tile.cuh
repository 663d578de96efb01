// SPDX-License-Identifier: Apache-2.0
// Where a CTA works, which sequence it begins in, and inputs that lie before its first step.
#pragma once

#include "dynamic_conv/config.h"
#include "dynamic_conv/cuda/traits.cuh"

namespace mortar::dynamic_conv::cuda {

/// How the grid is cut; channel blocks vary fastest, so that neighbours share DRAM pages.
struct Grid {
  int steps = 0;         ///< of a chunk
  unsigned chunks = 0;   ///< of T
  unsigned columns = 0;  ///< blocks of D
};

/// Steps [begin, end) of batch row b, from `channel` on.
struct Tile {
  int b, channel;
  int begin, end;

  template <int kChannels>
  __device__ static __forceinline__ Tile make(const Shape& shape, const Grid& grid) {
    const unsigned column = blockIdx.x % grid.columns, rest = blockIdx.x / grid.columns;
    Tile t;
    t.b = static_cast<int>(rest / grid.chunks);
    t.channel = static_cast<int>(column * blockDim.x + threadIdx.x) * kChannels;
    t.begin = static_cast<int>(rest % grid.chunks) * grid.steps;
    t.end = min(t.begin + grid.steps, shape.time);
    return t;
  }

  /// A boundary between sequences belongs to one chunk: the one that it ends, or the first.
  __device__ __forceinline__ bool owns(int boundary) const {
    return boundary <= end && (boundary > begin || begin == 0);
  }
};

/// last_start_not_after by a whole warp: 32 probes a round, so 1,000 sequences take two trips to
/// the cache. Every lane must take part.
__device__ __forceinline__ int find_sequence(const Sequences& s, int t) {
  int low = 0, high = s.count;  // the answer lies in [low, high)
  while (high - low > 1) {
    const int stride = ceil_div(high - low, 32);
    const int probe = low + static_cast<int>(threadIdx.x % 32) * stride;
    const bool not_after = probe < high && s.bound(probe) <= t;
    const int passed = __popc(__ballot_sync(0xffffffffu, not_after));
    low += max(passed - 1, 0) * stride;
    high = min(high, low + stride);
  }
  return low;
}

__device__ __forceinline__ Walk walk_at(const Shape& shape, const Tile& tile) {
  int index = tile.b;
  if (shape.sequences.packed()) {
    index = tile.begin == 0 ? 0 : find_sequence(shape.sequences, tile.begin);
  }
  return Walk::at(shape.sequences, index, tile.begin);
}

template <class T>
__device__ __forceinline__ T* at(const Signal& s, std::int64_t offset) {
  return static_cast<T*>(s.data) + offset;
}
template <class T>
__device__ __forceinline__ T* at(const State& s, std::int64_t offset) {
  return static_cast<T*>(s.data) + offset;
}

/// `v`, of which the compiler knows nothing: keeps it from hoisting the addresses of rare paths out
/// of the main loop, where their registers would be spilled.
__device__ __forceinline__ int opaque(int v) {
  asm volatile("" : "+r"(v));
  return v;
}

/// out[c] = the input of the walk's sequence at step t, which may lie before the sequence: then it
/// comes from the initial state, or is zero.
template <class Traits>
__device__ __forceinline__ void read_input(const Shape& shape, const Signal& x,
                                           const State& initial, const Tile& tile, const Walk& walk,
                                           int t, float (&out)[Traits::kChannels]) {
  using X = typename Traits::X;
  constexpr int kChannels = Traits::kChannels;
  const int position = shape.state_length + t - walk.start;
  const int channel = opaque(tile.channel);
  if (t >= walk.start) {
    const auto bits = device::load<X, kChannels>(at<X>(x, x.row(opaque(tile.b), t) + channel));
#pragma unroll
    for (int c = 0; c < kChannels; ++c) out[c] = bits.get(c);
    return;
  }
#pragma unroll
  for (int c = 0; c < kChannels; ++c) {
    out[c] =
        position >= 0 && initial.given()
            ? device::to_float(*at<const X>(initial, initial.at(walk.index, channel + c, position)))
            : 0.0f;
  }
}

/// x[j] = the input j + 1 steps before t, as the step at t expects it.
template <class Traits>
__device__ __forceinline__ void read_history(const Shape& shape, const Signal& x,
                                             const State& initial, const Tile& tile,
                                             const Walk& walk, int t,
                                             float (&window)[Traits::kWidth][Traits::kChannels]) {
#pragma unroll
  for (int j = 0; j + 1 < Traits::kWidth; ++j) {
    if (Traits::kVector || j + 1 < shape.width) {
      read_input<Traits>(shape, x, initial, tile, walk, t - 1 - j, window[j]);
    }
  }
}

inline constexpr int kHistoryLoads = 4;  ///< in flight

/// The same with the loads of several steps in flight together, which takes one trip to memory
/// instead of W - 1, and the registers of these loads: the forward at W = 8 has none left.
template <class Traits>
__device__ __forceinline__ void read_history_at_once(
    const Shape& shape, const Signal& x, const State& initial, const Tile& tile, const Walk& walk,
    int t, float (&window)[Traits::kWidth][Traits::kChannels]) {
  using X = typename Traits::X;
  constexpr int kChannels = Traits::kChannels;
  constexpr int kRows = Traits::kWidth - 1;
  const int channel = opaque(tile.channel);
  const X* row = at<const X>(x, x.row(opaque(tile.b), t - 1) + channel);
#pragma unroll
  for (int first = 0; first < kRows; first += kHistoryLoads) {
    device::Vector<X, kChannels> bits[kHistoryLoads];
#pragma unroll
    for (int i = 0; i < kHistoryLoads; ++i) {
      const int j = first + i;
      bits[i] = {};
      if (j < kRows && (Traits::kVector || j + 1 < shape.width) && t - 1 - j >= walk.start) {
        bits[i] = device::load<X, kChannels>(row);
      }
      row -= x.time_stride;
    }
#pragma unroll
    for (int i = 0; i < kHistoryLoads; ++i) {
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        if (first + i < kRows) window[first + i][c] = bits[i].get(c);
      }
    }
  }
  if (t - kRows >= walk.start || !initial.given()) return;
#pragma unroll
  for (int j = 0; j < kRows; ++j) {
    if ((Traits::kVector || j + 1 < shape.width) && t - 1 - j < walk.start) {
      read_input<Traits>(shape, x, initial, tile, walk, t - 1 - j, window[j]);
    }
  }
}

/// p moved by bytes: a step of time in bytes is an operand from constant memory, where one in
/// elements would take registers to be scaled.
template <class T>
__device__ __forceinline__ T* advance(T* p, std::int64_t bytes) {
  using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
  return reinterpret_cast<T*>(reinterpret_cast<Byte*>(p) + bytes);
}

/// window[j] becomes window[j + 1]; costs no instruction once loops are unrolled by a multiple of
/// W.
template <int kRows, int kChannels>
__device__ __forceinline__ void shift(float (&window)[kRows][kChannels]) {
#pragma unroll
  for (int j = kRows - 1; j > 0; --j) {
#pragma unroll
    for (int c = 0; c < kChannels; ++c) window[j][c] = window[j - 1][c];
  }
}

}  // namespace mortar::dynamic_conv::cuda
