// SPDX-License-Identifier: Apache-2.0
// How x and h come to lie in shared memory as planes of parts (device/parts.cuh), for ldmatrix.
#pragma once

#include <cstdint>
#include <type_traits>

#include "device/any_float.cuh"
#include "device/convert.cuh"
#include "device/parts.cuh"
#include "device/split_k.cuh"
#include "device/vector.cuh"
#include "lora/cuda/params.cuh"

namespace mortar::lora::cuda {

inline constexpr int kPartsThreads = 128;  ///< of a CTA of both kernels of parts

/// Eight neighbouring elements of x, as they came from memory.
template <class T>
struct XPiece {
  static constexpr int kWords = 8 * sizeof(T) / 16;  ///< of 16 bytes
  uint4 v[kWords];

  /// An aligned piece, zeros unless `there`.
  __device__ __forceinline__ void load(bool there, const T* at) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      v[i] = make_uint4(0, 0, 0, 0);
      device::load_if(there, v[i], reinterpret_cast<const uint4*>(at) + i);
    }
  }
  /// Any piece, of which `left` elements exist.
  __device__ __forceinline__ void load_elements(const T* at, int left) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      constexpr int kElts = 8 / kWords;
      v[i] = device::load_some<T, kElts>(at + i * kElts, left - i * kElts).piece(0);
    }
  }
  /// Writes 16 bytes per plane, whose row starts at `row`, as ldmatrix wants them: piece 2i takes
  /// the first half of both 16-byte parts of a step, piece 2i + 1 the second.
  __device__ __forceinline__ void store(unsigned char* row, int piece, int plane_bytes) const {
    const std::uint32_t* words = reinterpret_cast<const std::uint32_t*>(v);
    std::uint32_t part[2][device::kParts<T>][2];
    device::split4<T>(words, part[0]);
    device::split4<T>(words + 2 * kWords, part[1]);
    uint2* at = reinterpret_cast<uint2*>(row) + piece / 2 * 4 + piece % 2;
#pragma unroll
    for (int i = 0; i < device::kParts<T>; ++i) {
      at[i * plane_bytes / 8] = make_uint2(part[0][i][0], part[1][i][0]);
      at[i * plane_bytes / 8 + 2] = make_uint2(part[0][i][1], part[1][i][1]);
    }
  }
};

/// Elements of a row of a plane of h: eight of them start in different banks, for ldmatrix.
MORTAR_HOST_DEVICE constexpr int h_pitch(int width) { return round_up(width, 16) + 8; }

/// Four neighbouring ranks of h, of which `left` exist, as they came from memory.
__device__ __forceinline__ float4 load_h(const HView& h, std::int64_t at, int left) {
  if (h.dtype == DType::kFloat32) {
    const auto v = device::load_some<float, 4>(static_cast<const float*>(h.data) + at, left);
    return make_float4(v.get(0), v.get(1), v.get(2), v.get(3));
  }
  float v[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = i < left ? device::load_as_float(h.data, h.dtype, at + i) : 0;
  return make_float4(v[0], v[1], v[2], v[3]);
}

/// Planes of parts of h in shared memory, made of quads: four neighbouring ranks of a token.
template <class Tr>
struct HPlanes {
  using TW = typename Tr::TW;
  unsigned char* planes;
  DType round_to;  ///< what h is rounded to first; float32: nothing
  int pitch, rank;
  int quads;      ///< of a token, which MMA steps read
  int log_quads;  ///< the quads that are counted, a power of two

  /// h takes the dtype of B where y has it too, as in the kernels for one 16-bit type.
  __device__ __forceinline__ HPlanes(unsigned char* at, int width, int own_rank, DType weights,
                                     DType y)
      : planes(at),
        round_to(weights == y ? weights : DType::kFloat32),
        pitch(h_pitch(width)),
        rank(own_rank),
        quads(ceil_div(own_rank, 16) * 4),
        log_quads(device::ceil_log2(quads)) {}
  __device__ __forceinline__ int bytes() const { return Tr::kTokens * pitch * 2; }
  __device__ __forceinline__ int place(int i) const { return i >> log_quads; }
  __device__ __forceinline__ int quad(int i) const { return i & ((1 << log_quads) - 1); }

  __device__ __forceinline__ void store(int i, float4 v) const {
    if constexpr (std::is_same_v<TW, device::AnyFloat>) {
      device::visit_checked_dtype(FloatDTypes(), round_to, [&](auto tag) {
        using T = typename decltype(tag)::type;
        const auto round = [](float f) { return device::to_float(device::from_float<T>(f)); };
        v = make_float4(round(v.x), round(v.y), round(v.z), round(v.w));
      });
    }
    std::uint32_t lower[Tr::kPartsH], upper[Tr::kPartsH];
    if constexpr (Tr::kPartsH == 2) {
      device::split_in_two(v.x, v.y, lower);
      device::split_in_two(v.z, v.w, upper);
    } else {
      device::split2(v.x, v.y, lower);
      device::split2(v.z, v.w, upper);
    }
    std::uint32_t* row = reinterpret_cast<std::uint32_t*>(planes) + place(i) * pitch / 2;
#pragma unroll
    for (int part = 0; part < Tr::kPartsH; ++part, row += bytes() / 4) {
      row[device::plane_word(2 * quad(i))] = lower[part];
      row[device::plane_word(2 * quad(i) + 1)] = upper[part];
    }
  }
};

/// The planes from a whole h, zeros from the rank to a whole step. Rows without a token stay as
/// they are: each row of the product depends on its own row of h alone.
template <class Tr>
__device__ __forceinline__ void make_h(const HPlanes<Tr>& to, const HView& h, const Tile& tile,
                                       const int* tokens, int first_row, int slice) {
#pragma unroll 1
  for (int i = threadIdx.x; to.place(i) < tile.count; i += kPartsThreads) {
    const int row = h_row(h, tile, first_row, to.place(i), tokens[to.place(i)]);
    if (row < 0 || to.quad(i) >= to.quads) continue;
    const int r = to.quad(i) * 4;
    float4 v = make_float4(0, 0, 0, 0);
    if (r < to.rank) v = load_h(h, slice * h.slice_stride + row * h.row_stride + r, to.rank - r);
    to.store(i, v);
  }
}

/// The planes from the split-K partials of shrink: two lanes add a quad.
template <class Tr>
struct HSum {
  const HPlanes<Tr>& to;
  const HView& h;
  const Tile& tile;
  const int* tokens;
  int first_row, slice, middle;
  device::SplitKSum<2> partials;

  __device__ __forceinline__ HSum(const HPlanes<Tr>& planes, const HView& from, const Tile& t,
                                  const int* own_tokens, int first, int own_slice)
      : to(planes),
        h(from),
        tile(t),
        tokens(own_tokens),
        first_row(first),
        slice(own_slice),
        middle(static_cast<int>(first_leaves(from.num_slabs))),
        partials(from.slab_stride) {}
  /// Finds the partials of quad i.
  __device__ __forceinline__ void seek(int i) {
    partials.num = 0;
    const int place = to.place(i), r = to.quad(i) * 4;
    if (place >= tile.count || r >= to.rank) return;
    const int row = h_row(h, tile, first_row, place, tokens[place]);
    if (row < 0) return;
    partials.seek(
        static_cast<const float*>(h.data) + slice * h.slice_stride + row * h.row_stride + r,
        h.num_slabs, middle);
  }
  /// After seek() of the thread's first quad and partials.load(). Called by whole warps.
  __device__ __forceinline__ void make() {
#pragma unroll 1
    for (int base = 0; to.place(base) < tile.count; base += kPartsThreads / 2) {
      const int i = base + static_cast<int>(threadIdx.x) / 2;
      if (base > 0) {
        seek(i);
        partials.load();
      }
      const float4 v = partials.sum(middle);
      const int r = to.quad(i) * 4, left = to.rank - r;
      if (threadIdx.x % 2 != 0 || to.place(i) >= tile.count || to.quad(i) >= to.quads) continue;
      // What lies past the rank was never written.
      to.store(i, make_float4(left > 0 ? v.x : 0.0f, left > 1 ? v.y : 0.0f, left > 2 ? v.z : 0.0f,
                              left > 3 ? v.w : 0.0f));
    }
  }
};

}  // namespace mortar::lora::cuda
