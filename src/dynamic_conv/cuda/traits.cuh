// SPDX-License-Identifier: Apache-2.0
// Compile-time choices of a kernel, and the access to W taps of V channels that follows from them.
#pragma once

#include <type_traits>

#include "device/vector.cuh"
#include "dynamic_conv/problem.h"

namespace mortar::dynamic_conv::cuda {

/// Channels of one thread: as many as make 16 bytes of taps (8 for W = 1), or the next even divisor
/// where W is no power of two (12 to 28 bytes in equal power-of-two pieces: the warp's pieces
/// interleave, but the first-level cache joins them).
template <class T>
constexpr int vector_channels(int width) {
  const int taps = 16 / static_cast<int>(sizeof(T));  // in 16 bytes
  if (width == 1) return taps / 2;
  if (width == 2 || width == 3) return taps / 2;
  if (width == 4) return taps / 4;
  if (width == 8) return 1;
  return sizeof(T) == 2 ? 2 : 1;
}

/// W known and all rows aligned to the vectors below.
template <class T, int W, int kChannels_ = vector_channels<T>(W)>
struct VectorTraits {
  using X = T;
  using K = T;
  static constexpr bool kVector = true;
  static constexpr int kWidth = W;
  static constexpr int kChannels = kChannels_;
  static constexpr int kSignalAlignment = kChannels * int{sizeof(T)};
  using TapVector = device::Vector<T, kChannels * W>;
  static constexpr int kTapAlignment = TapVector::kAlignment;
  static constexpr int kPieces = TapVector::kPieces;

  struct Taps {
    TapVector taps;

    __device__ __forceinline__ void load(const T* p, int) { device::load_once(taps, p); }
    /// Tap that multiplies the input `lag` steps ago.
    __device__ __forceinline__ float get(int channel, int lag) const {
      return taps.get(channel * W + W - 1 - lag);
    }
  };

  /// dk[c][w] = g[c] * x[W - 1 - w][c].
  __device__ static __forceinline__ void store_gradient(T* dk, const float (&g)[kChannels],
                                                        const float (&x)[W][kChannels], int) {
    device::store_values_once<T, kChannels * W>(
        dk, [&](int i) { return g[i / W] * x[W - 1 - i % W][i / W]; });
  }
};

/// Any W up to the maximum, any alignment, any pair of dtypes: one channel a thread.
template <class X_, class K_>
struct ScalarTraits {
  using X = X_;
  using K = K_;
  static constexpr bool kVector = false;
  static constexpr int kWidth = kMaxWidth;
  static constexpr int kChannels = 1;
  static constexpr int kSignalAlignment = sizeof(X);
  static constexpr int kTapAlignment = sizeof(K);
  static constexpr int kPieces = kMaxWidth;

  struct Taps {
    device::Vector<K, 1> tap[kMaxWidth];  // by lag

    __device__ __forceinline__ void load(const K* p, int width) {
#pragma unroll
      for (int lag = 0; lag < kMaxWidth; ++lag) {
        if (lag < width) tap[lag] = device::load<K, 1>(p + width - 1 - lag);
      }
    }
    __device__ __forceinline__ float get(int, int lag) const { return tap[lag].get(0); }
  };

  __device__ static __forceinline__ void store_gradient(K* dk, const float (&g)[1],
                                                        const float (&x)[kMaxWidth][1], int width) {
#pragma unroll
    for (int lag = 0; lag < kMaxWidth; ++lag) {
      if (lag < width) dk[width - 1 - lag] = device::from_float<K>(g[0] * x[lag][0]);
    }
  }
};

inline constexpr int kMaxThreads =
    128;  ///< of a CTA: small ones let registers be shared out finely

/// Registers of the loads of one step: taps, and `signals` of x's kind.
template <class Traits>
constexpr int step_registers(int signals) {
  return int{sizeof(typename Traits::Taps)} / 4 +
         signals * ((Traits::kChannels * int{sizeof(typename Traits::X)} + 3) / 4);
}

/// Steps whose loads are in flight at once, an even number within a budget of registers. For W = 6
/// and 7 in pieces ptxas spills from four steps on, whatever the cap.
template <class Traits>
constexpr int steps_ahead(int signals, int budget) {
  if (Traits::kVector && Traits::kWidth > 5 && Traits::kPieces > 2) return 2;
  const int steps = budget / step_registers<Traits>(signals) / 2 * 2;
  return steps > 8 ? 8 : steps < 2 ? 2 : steps;
}

/// CTAs that an SM must hold, which caps the registers of a thread: `fixed` for addresses and the
/// walk, what is in flight, one per value of the `windows` and of the sums, and `per_piece` for
/// taps in pieces. Found by compiling: a cap that is too low spills values in flight, and a spill
/// waits for its load.
template <class Traits>
constexpr int min_ctas(int fixed, int signals, int ahead, int windows, int per_piece) {
  const int registers = fixed + ahead * step_registers<Traits>(signals) +
                        (windows * (Traits::kWidth - 1) + 2) * Traits::kChannels +
                        per_piece * (Traits::kPieces - 1);
  return registers > 128 ? 4 : 65536 / (kMaxThreads * round_up(registers, 8));
}

/// s = sum over lags of tap * x, oldest input first: the one order of every backend.
template <class Traits>
__device__ __forceinline__ void convolve(const typename Traits::Taps& taps,
                                         const float (&x)[Traits::kWidth][Traits::kChannels],
                                         int width, float (&s)[Traits::kChannels]) {
#pragma unroll
  for (int c = 0; c < Traits::kChannels; ++c) {
    s[c] = 0;
#pragma unroll
    for (int lag = Traits::kWidth - 1; lag >= 0; --lag) {
      if (Traits::kVector || lag < width) s[c] = fmaf(taps.get(c, lag), x[lag][c], s[c]);
    }
  }
}

}  // namespace mortar::dynamic_conv::cuda
