// SPDX-License-Identifier: Apache-2.0
// Warpgroup matrix multiply of sm_90a: wgmma.m64nNk16 on 16-bit operands in shared memory, with
// float32 sums. PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions".
//
// Operands lie in rows of 64 elements (128 bytes) with the 128-byte swizzle (device/swizzle.cuh),
// rows one after another; blocks start at multiples of 1024 bytes. A row is dense along the depth
// (K), or along the operand's rows. Kernels that call these guard their bodies with
// __CUDA_ARCH_FEAT_SM90_ALL.
#pragma once

#ifndef MORTAR_SM90A
#error "include device/wgmma.cuh in the .cu itself and configure anew (cmake/MortarCuda.cmake)"
#endif

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "device/async_copy.cuh"
#include "device/bulk_copy.cuh"

namespace mortar::device {

/// Along which dimension the rows of a block in shared memory are dense.
enum class Major {
  kDepth,  ///< the one that is summed over
  kRows,   ///< that of the operand's rows
};

/// Matrix descriptor of a swizzled block at shared-memory address `address`: groups of 8 rows of
/// 128 bytes are `group_bytes` apart. Blocks that are dense along the operand's rows have 64 of
/// these, and lie `block_bytes` apart; the others go on for as many rows as there are. To step by
/// 16 elements of the depth, add descriptor_step().
__device__ __forceinline__ std::uint64_t wgmma_descriptor(std::uint32_t address,
                                                          int block_bytes = 16,
                                                          int group_bytes = 1024) {
  constexpr std::uint64_t kSwizzle128 = std::uint64_t{1} << 62;
  const std::uint64_t leading = static_cast<std::uint64_t>(block_bytes / 16) << 16;
  const std::uint64_t stride = static_cast<std::uint64_t>(group_bytes / 16) << 32;
  return kSwizzle128 | stride | leading | ((address & 0x3ffff) >> 4);
}
constexpr std::uint64_t descriptor_step(Major major) {
  return (major == Major::kDepth ? 16 * 2 : 16 * 128) / 16;
}
inline constexpr std::uint64_t kDescriptorStep = descriptor_step(Major::kDepth);

/// Orders the warpgroup's accesses to registers before the next wgmma.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/// Waits until at most N committed groups are in flight.
template <int N>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
/// Keeps the compiler from reading sums before the wait that precedes this, or from writing them
/// after the wgmma that follows.
template <int N>
__device__ __forceinline__ void wgmma_keep(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// clang-format off
// PTX names every register of the result: ten numbers, and eight operands, at a time.
#define MORTAR_TEN(t)                                                                             \
  "%" #t "0, %" #t "1, %" #t "2, %" #t "3, %" #t "4, "                                            \
  "%" #t "5, %" #t "6, %" #t "7, %" #t "8, %" #t "9, "
#define MORTAR_EIGHT(i)                                                                           \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]),    \
  "+f"(d[i + 6]), "+f"(d[i + 7])
#define MORTAR_32(i)                                                                              \
  MORTAR_EIGHT(i), MORTAR_EIGHT(i + 8), MORTAR_EIGHT(i + 16), MORTAR_EIGHT(i + 24)
#define MORTAR_TENS_0_1 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, " MORTAR_TEN(1)
#define MORTAR_TENS_0_2 MORTAR_TENS_0_1 MORTAR_TEN(2)
#define MORTAR_TENS_0_5 MORTAR_TENS_0_2 MORTAR_TEN(3) MORTAR_TEN(4) MORTAR_TEN(5)
#define MORTAR_TENS_0_8 MORTAR_TENS_0_5 MORTAR_TEN(6) MORTAR_TEN(7) MORTAR_TEN(8)
#define MORTAR_TENS_0_11 MORTAR_TENS_0_8 MORTAR_TEN(9) MORTAR_TEN(10) MORTAR_TEN(11)

/// One wgmma of n columns of one 16-bit type. The numbers of its operands follow those of the
/// results.
#define MORTAR_WGMMA_OF(type, n, results, a_at, b_at, add_at, a_major, b_major, ...)              \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" add_at ", 0;\n"                               \
               "wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type " {" results "}, "  \
               "%" a_at ", %" b_at ", p, 1, 1, %" a_major ", %" b_major ";\n}\n"                  \
               : __VA_ARGS__ : "l"(a), "l"(b), "r"(add), "n"(kA), "n"(kB))
#define MORTAR_WGMMA(...)                                                                         \
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {                                               \
    MORTAR_WGMMA_OF("bf16", __VA_ARGS__);                                                         \
  } else {                                                                                        \
    MORTAR_WGMMA_OF("f16", __VA_ARGS__);                                                          \
  }

/// d = a b^T, plus d if `add`, for a [64, 16] and b [kN, 16]; asynchronous. Thread 32 w + l of the
/// warpgroup holds in d[4 j + 2 h + c] row 16 w + 8 h + l / 4, column 8 j + l % 4 * 2 + c.
template <class T, int kN, Major kMajorA = Major::kDepth, Major kMajorB = Major::kDepth>
__device__ __forceinline__ void wgmma(float* d, std::uint64_t a, std::uint64_t b, int add) {
  static_assert(kN == 16 || kN == 32 || kN == 48 || kN == 64 || kN == 96 || kN == 128 ||
                    kN == 144 || kN == 192 || kN == 256,
                "one of those below");
  constexpr int kA = static_cast<int>(kMajorA), kB = static_cast<int>(kMajorB);
  if constexpr (kN == 16) {
    MORTAR_WGMMA("16", "%0, %1, %2, %3, %4, %5, %6, %7",
        "8", "9", "10", "11", "12",
        MORTAR_EIGHT(0))
  } else if constexpr (kN == 32) {
    MORTAR_WGMMA("32", "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15",
        "16", "17", "18", "19", "20",
        MORTAR_EIGHT(0), MORTAR_EIGHT(8))
  } else if constexpr (kN == 48) {
    MORTAR_WGMMA("48", MORTAR_TENS_0_1 "%20, %21, %22, %23",
        "24", "25", "26", "27", "28",
        MORTAR_EIGHT(0), MORTAR_EIGHT(8), MORTAR_EIGHT(16))
  } else if constexpr (kN == 64) {
    MORTAR_WGMMA("64", MORTAR_TENS_0_2 "%30, %31",
        "32", "33", "34", "35", "36",
        MORTAR_32(0))
  } else if constexpr (kN == 96) {
    MORTAR_WGMMA("96", MORTAR_TENS_0_2 MORTAR_TEN(3) "%40, %41, %42, %43, %44, %45, %46, %47",
        "48", "49", "50", "51", "52",
        MORTAR_32(0), MORTAR_EIGHT(32), MORTAR_EIGHT(40))
  } else if constexpr (kN == 128) {
    MORTAR_WGMMA("128", MORTAR_TENS_0_5 "%60, %61, %62, %63",
        "64", "65", "66", "67", "68",
        MORTAR_32(0), MORTAR_32(32))
  } else if constexpr (kN == 144) {
    MORTAR_WGMMA("144", MORTAR_TENS_0_5 MORTAR_TEN(6) "%70, %71",
        "72", "73", "74", "75", "76",
        MORTAR_32(0), MORTAR_32(32), MORTAR_EIGHT(64))
  } else if constexpr (kN == 192) {
    MORTAR_WGMMA("192", MORTAR_TENS_0_8 "%90, %91, %92, %93, %94, %95",
        "96", "97", "98", "99", "100",
        MORTAR_32(0), MORTAR_32(32), MORTAR_32(64))
  } else if constexpr (kN == 256) {
    MORTAR_WGMMA("256", MORTAR_TENS_0_11 "%120, %121, %122, %123, %124, %125, %126, %127",
        "128", "129", "130", "131", "132",
        MORTAR_32(0), MORTAR_32(32), MORTAR_32(64), MORTAR_32(96))
  }
}

/// One wgmma of n columns of bfloat16 whose first operand is in registers.
#define MORTAR_WGMMA_REGISTERS(n, results, a0, a1, a2, a3, b_at, add_at, ...)                      \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" add_at ", 0;\n"                               \
               "wgmma.mma_async.sync.aligned.m64n" n "k16.f32.bf16.bf16 {" results "}, "           \
               "{%" a0 ", %" a1 ", %" a2 ", %" a3 "}, %" b_at ", p, 1, 1, 0;\n}\n"                 \
               : __VA_ARGS__ : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add))

/// The same of bfloat16, `a` in registers, as the A operand of mma.sync m16n8k16: thread 32 w + l
/// has of rows 16 w + l / 4 and eight below elements l % 4 * 2 and the next, and eight after them.
/// They must stay until the product has been waited for.
template <int kN>
__device__ __forceinline__ void wgmma(float* d, const std::uint32_t (&a)[4], std::uint64_t b,
                                      int add) {
  static_assert(kN == 16 || kN == 32 || kN == 48 || kN == 64 || kN == 128, "one of those below");
  if constexpr (kN == 16) {
    MORTAR_WGMMA_REGISTERS("16", "%0, %1, %2, %3, %4, %5, %6, %7",
        "8", "9", "10", "11", "12", "13",
        MORTAR_EIGHT(0));
  } else if constexpr (kN == 32) {
    MORTAR_WGMMA_REGISTERS("32",
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15",
        "16", "17", "18", "19", "20", "21",
        MORTAR_EIGHT(0), MORTAR_EIGHT(8));
  } else if constexpr (kN == 48) {
    MORTAR_WGMMA_REGISTERS("48", MORTAR_TENS_0_1 "%20, %21, %22, %23",
        "24", "25", "26", "27", "28", "29",
        MORTAR_EIGHT(0), MORTAR_EIGHT(8), MORTAR_EIGHT(16));
  } else if constexpr (kN == 64) {
    MORTAR_WGMMA_REGISTERS("64", MORTAR_TENS_0_2 "%30, %31",
        "32", "33", "34", "35", "36", "37",
        MORTAR_32(0));
  } else {
    MORTAR_WGMMA_REGISTERS("128", MORTAR_TENS_0_5 "%60, %61, %62, %63",
        "64", "65", "66", "67", "68", "69",
        MORTAR_32(0), MORTAR_32(32));
  }
}
#undef MORTAR_TEN
#undef MORTAR_EIGHT
#undef MORTAR_32
#undef MORTAR_TENS_0_1
#undef MORTAR_TENS_0_2
#undef MORTAR_TENS_0_5
#undef MORTAR_TENS_0_8
#undef MORTAR_TENS_0_11
#undef MORTAR_WGMMA_OF
#undef MORTAR_WGMMA_REGISTERS
#undef MORTAR_WGMMA
// clang-format on

/// Gives registers of a whole warpgroup back, or takes them.
template <int kRegisters>
__device__ __forceinline__ void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace mortar::device
