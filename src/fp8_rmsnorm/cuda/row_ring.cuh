// SPDX-License-Identifier: Apache-2.0
// Rows on their way into shared memory: copies by 16-byte vectors, and access to a lane's own.
#pragma once

#include <cstdint>

#include "device/async_copy.cuh"
#include "fp8_rmsnorm/cuda/elements.cuh"

namespace mortar::fp8_rmsnorm::cuda {

/// The lanes of a warp that share a row. They copy adjacent vectors of 16 bytes of it together, and
/// read back those of their own columns: that is why the vectors of a warp lie in this order, and
/// why lanes meet between the two.
struct Lanes {
  int first;  ///< lane of the warp that has the first piece
  int count;  ///< of lanes that share a row, within this warp: a power of two
  int lane;   ///< this one, from `first`
};

/// One operand of a thread's pieces: 2^vector_shift vectors of 16 bytes each.
struct Vectors {
  const char* data;  ///< at the lanes' first column of row 0
  std::int64_t row_bytes;
  int size_shift, vector_shift;
  int columns_left;  ///< from the lanes' first column to the end of the row
  bool aligned;

  __device__ __forceinline__ Vectors(const Rows& rows, int elements, int column, int hidden,
                                     bool aligned_)
      : size_shift(size_shift_of(rows.dtype)),
        vector_shift(log2_of(elements) + size_shift - 4),
        columns_left(hidden - column),
        aligned(aligned_) {
    row_bytes = rows.row_stride << size_shift;
    data = static_cast<const char*>(rows.data) + (std::int64_t{column} << size_shift);
  }

  __device__ __forceinline__ static int size_shift_of(DType dtype) {
    if (dtype == DType::kFloat32) return 2;
    return dtype == DType::kBFloat16 || dtype == DType::kFloat16 ? 1 : 0;
  }
  __device__ __forceinline__ int count() const { return 1 << vector_shift; }

  /// Where vector c of the lanes' columns lies in the ring.
  __device__ __forceinline__ int slot(const Lanes& lanes, int c) const {
    return (c & (count() - 1)) * 32 + lanes.first + (c >> vector_shift);
  }

  /// use(vector, its slot, bytes from the lanes' first column, elements that are in the row) for
  /// every vector that this lane copies, `ahead` columns on.
  template <class Use>
  __device__ __forceinline__ void for_each(const Lanes& lanes, int ahead, const Use& use) const {
    const int elements = 16 >> size_shift;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (j >= count()) break;
      const int c = j * lanes.count + lanes.lane, left = columns_left - ahead - c * elements;
      if (left > 0) use(slot(lanes, c), (ahead << size_shift) + c * 16, min(left, elements));
    }
  }

  /// The same in a loop, for uses that are long and rare.
  template <class Use>
  __device__ __forceinline__ void for_each_slowly(const Lanes& lanes, int ahead,
                                                  const Use& use) const {
    const int elements = 16 >> size_shift;
#pragma unroll 1
    for (int j = 0; j < count(); ++j) {
      const int c = j * lanes.count + lanes.lane, left = columns_left - ahead - c * elements;
      if (left > 0) use(slot(lanes, c), (ahead << size_shift) + c * 16, min(left, elements));
    }
  }

  /// Starts the copy of a row into the ring.
  __device__ __forceinline__ void copy(uint4* to, const Lanes& lanes, std::int64_t row,
                                       int ahead) const {
    const char* from = data + row * row_bytes;
    if (aligned) {
      for_each(lanes, ahead,
               [&](int at, int bytes, int) { device::cp_async_16(to + at, from + bytes); });
      return;
    }
    for_each_slowly(lanes, ahead, [&](int at, int bytes, int elements) {
      to[at] = load_unaligned(from + bytes, 1 << size_shift, elements);
    });
  }
};

/// Scales of x on their way: of the aligned 16 bytes that hold one, those up to it are copied.
struct ScaleVectors {
  std::uintptr_t data;  ///< of row 0 and the thread's first column
  std::int64_t row_bytes;
  int size_shift, group_shift;

  __device__ __forceinline__ ScaleVectors(const Input& in, int column)
      : size_shift(Vectors::size_shift_of(in.x_scale.dtype)), group_shift(log2_of(in.x_group)) {
    row_bytes = in.x_scale.row_stride << size_shift;
    data = reinterpret_cast<std::uintptr_t>(in.x_scale.data) +
           (static_cast<std::uintptr_t>(column >> group_shift) << size_shift);
  }
  __device__ __forceinline__ std::uintptr_t at(std::int64_t row, int ahead) const {
    return data +
           static_cast<std::uintptr_t>(row * row_bytes + ((ahead >> group_shift) << size_shift));
  }
  __device__ __forceinline__ void copy(uint4* to, std::int64_t row, int ahead) const {
    const std::uintptr_t address = at(row, ahead);
    const int before = static_cast<int>(address & 15);
    device::cp_async_16(device::smem_address(to), reinterpret_cast<const void*>(address - before),
                        before + (1 << size_shift));
  }
  __device__ __forceinline__ float read(const uint4* vector, std::int64_t row, int ahead) const {
    const char* p = reinterpret_cast<const char*>(vector) + (at(row, ahead) & 15);
    if (size_shift == 2) return *reinterpret_cast<const float*>(p);
    return __uint_as_float(std::uint32_t{*reinterpret_cast<const std::uint16_t*>(p)} << 16);
  }
};

/// A lane's own kElements values of a dtype known at run time.
template <int kElements>
__device__ __forceinline__ void read_own(const uint4* vectors, DType dtype,
                                         float (&out)[kElements]) {
  const auto unpack = [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int kPerVector = 16 / int{sizeof(T)};
#pragma unroll
    for (int j = 0; j < kElements / kPerVector; ++j) {
      const uint4 vector = vectors[j * 32];
#pragma unroll
      for (int q = 0; q < kPerVector / 4; ++q) {
        float quad[4];
        unpack4<T>(vector, q, quad);
#pragma unroll
        for (int i = 0; i < 4; ++i) out[j * kPerVector + 4 * q + i] = quad[i];
      }
    }
  };
  if (dtype == DType::kBFloat16) return unpack(TypeTag<__nv_bfloat16>());
  if (dtype == DType::kFloat16) return unpack(TypeTag<__half>());
  unpack(TypeTag<float>());
}

/// The other way, rounded to nearest even.
template <int kElements>
__device__ __forceinline__ void write_own(uint4* vectors, DType dtype,
                                          const float (&v)[kElements]) {
  if (dtype == DType::kFloat32) {
#pragma unroll
    for (int j = 0; j < kElements / 4; ++j) {
      vectors[j * 32] = make_uint4(__float_as_uint(v[4 * j]), __float_as_uint(v[4 * j + 1]),
                                   __float_as_uint(v[4 * j + 2]), __float_as_uint(v[4 * j + 3]));
    }
    return;
  }
  const auto pack = [&](auto tag) {
    using T = typename decltype(tag)::type;
#pragma unroll
    for (int j = 0; j < kElements / 8; ++j) {
      vectors[j * 32] = make_uint4(device::pack2<T>(v[8 * j], v[8 * j + 1]),
                                   device::pack2<T>(v[8 * j + 2], v[8 * j + 3]),
                                   device::pack2<T>(v[8 * j + 4], v[8 * j + 5]),
                                   device::pack2<T>(v[8 * j + 6], v[8 * j + 7]));
    }
  };
  if (dtype == DType::kBFloat16) {
    pack(TypeTag<__nv_bfloat16>());
  } else {
    pack(TypeTag<__half>());
  }
}

/// Waits until at most `pending` of this thread's committed groups are in flight.
__device__ __forceinline__ void wait_for_copies(int pending) {
  switch (pending) {
    case 0:
      return device::cp_async_wait<0>();
    case 1:
      return device::cp_async_wait<1>();
    case 2:
      return device::cp_async_wait<2>();
    case 3:
      return device::cp_async_wait<3>();
    case 4:
      return device::cp_async_wait<4>();
    case 5:
      return device::cp_async_wait<5>();
    case 6:
      return device::cp_async_wait<6>();
    default:
      return device::cp_async_wait<7>();
  }
}

/// Waits for the `count` threads of row group `group`: whole warps, at a barrier of their own.
__device__ __forceinline__ void row_group_barrier(int group, int count) {
  asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "r"(count) : "memory");
}

}  // namespace mortar::fp8_rmsnorm::cuda
