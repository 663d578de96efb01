// SPDX-License-Identifier: Apache-2.0
// Copies of boxes of a matrix to shared memory by the tensor copy engine (TMA) of sm_90: one thread
// asks, a barrier in shared memory counts the bytes. PTX ISA, "cp.async.bulk.tensor".
#pragma once

#include <cuda.h>

#include <cstdint>

#include "core/check.h"
#include "device/barrier.cuh"
#include "device/cache_policy.cuh"
#include "device/driver.h"
#include "mortar/tensor.h"

namespace mortar::device {

inline constexpr int kBoxColumns = 64;  ///< 16-bit elements of a swizzled row

/// Sets `map` to an array of 16-bit elements of kDims dimensions, neighbours of the first side by
/// side, of the others `strides` elements apart, that is copied in boxes whose rows are in the
/// 128-byte swizzle. What lies past the array arrives as zeros. Address and strides are multiples
/// of 16 bytes.
///
/// The map is written where it stays: the driver wants it aligned to 64 bytes, and GCC 12 aligns a
/// returned value less before it is copied to its place.
template <int kDims>
void set_tensor_map(CUtensorMap& map, DType dtype, const void* data,
                    const std::int64_t (&sizes)[kDims], const std::int64_t (&strides)[kDims - 1],
                    const int (&box)[kDims]) {
  cuuint64_t all[kDims], apart[kDims - 1];
  cuuint32_t boxes[kDims], steps[kDims];
  for (int i = 0; i < kDims; ++i) {
    all[i] = static_cast<cuuint64_t>(sizes[i]);
    if (i > 0) apart[i - 1] = static_cast<cuuint64_t>(2 * strides[i - 1]);
    boxes[i] = static_cast<cuuint32_t>(box[i]);
    steps[i] = 1;
  }
  const auto type =
      dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const auto encode = [&] {
    return Driver::get().encode_tensor_map(
        &map, type, kDims, const_cast<void*>(data), all, apart, boxes, steps,
        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
        CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUresult result = encode();
  if (result == CUDA_ERROR_INVALID_CONTEXT) [[unlikely]] {
    // A thread that has used no device yet, as one of autograd's, has no context: this gives it
    // that of its current device.
    int device = 0;
    cuda_check(cudaGetDevice(&device), "tensor map");
    cuda_check(cudaSetDevice(device), "tensor map");
    result = encode();
  }
  cuda_check(result, "tensor map");
}

/// The same of a matrix of `lines` rows of `dense` elements, `stride` elements apart, in boxes of
/// 64 elements by `box_lines` rows.
inline void set_tensor_map(CUtensorMap& map, DType dtype, const void* data, std::int64_t dense,
                           std::int64_t lines, std::int64_t stride, int box_lines) {
  set_tensor_map<2>(map, dtype, data, {dense, lines}, {stride}, {kBoxColumns, box_lines});
}

/// Whether set_tensor_map() takes a matrix.
inline bool takes_tensor_map(const void* data, std::int64_t dense, std::int64_t lines,
                             std::int64_t stride) {
  constexpr std::int64_t kMost = std::int64_t{1} << 31;
  return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && stride % 8 == 0 && stride >= dense &&
         stride < kMost && dense > 0 && dense < kMost && lines > 0 && lines < kMost;
}

#ifdef __CUDACC__

__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap& map) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
#endif
}

/// Copies the box whose first element is (line, column), and counts its bytes at the barrier.
__device__ __forceinline__ void copy_box(std::uint32_t to, const CUtensorMap& map, int column,
                                         int line, Mbarrier* barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3}], [%4];" ::"r"(to),
      "l"(&map), "r"(column), "r"(line), "r"(smem_address(&barrier->word))
      : "memory");
#endif
}
/// The same of what nobody reads again: it leaves L2 before other lines do.
__device__ __forceinline__ void copy_box_once(std::uint32_t to, const CUtensorMap& map, int column,
                                              int line, Mbarrier* barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(&map), "r"(column), "r"(line), "r"(smem_address(&barrier->word)), "l"(kEvictFirst)
      : "memory");
#endif
}
/// The same to the same place of every CTA of the cluster whose bit is set in `ctas`; the bytes are
/// counted at the barrier of each.
__device__ __forceinline__ void copy_box_to(std::uint16_t ctas, std::uint32_t to,
                                            const CUtensorMap& map, int column, int line,
                                            Mbarrier* barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(&map), "r"(column), "r"(line), "r"(smem_address(&barrier->word)), "h"(ctas)
      : "memory");
#endif
}
/// copy_box() and copy_box_to() of an array of five dimensions, from the elements `column` of the
/// first and `line` of the last one on.
__device__ __forceinline__ void copy_box5(std::uint32_t to, const CUtensorMap& map, int column,
                                          int line, Mbarrier* barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %5, %5, %5, %3}], [%4];" ::"r"(to),
      "l"(&map), "r"(column), "r"(line), "r"(smem_address(&barrier->word)), "r"(0)
      : "memory");
#endif
}
__device__ __forceinline__ void copy_box5_to(std::uint16_t ctas, std::uint32_t to,
                                             const CUtensorMap& map, int column, int line,
                                             Mbarrier* barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %6, %6, %6, %3}], [%4], %5;" ::"r"(to),
      "l"(&map), "r"(column), "r"(line), "r"(smem_address(&barrier->word)), "h"(ctas), "r"(0)
      : "memory");
#endif
}

/// The other way: the box whose first element is (line, column) from shared memory. What lies past
/// the matrix is left out. Asynchronous, in the group that the next store_boxes_commit() closes.
__device__ __forceinline__ void store_box(const CUtensorMap& map, int column, int line,
                                          std::uint32_t from) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group.L2::cache_hint "
      "[%0, {%1, %2}], [%3], %4;" ::"l"(&map),
      "r"(column), "r"(line), "r"(from), "l"(kEvictFirst)
      : "memory");
#endif
}
__device__ __forceinline__ void store_boxes_commit() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}
/// Waits until all groups of this thread but the last kLeft have read shared memory.
template <int kLeft = 0>
__device__ __forceinline__ void store_boxes_wait_read() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kLeft) : "memory");
#endif
}
/// Waits until all groups of this thread have ended.
__device__ __forceinline__ void store_boxes_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
#endif
}

#endif

}  // namespace mortar::device
