// SPDX-License-Identifier: Apache-2.0
// The inner loops of the CPU backend, as tables of functions: one table per SIMD level. The table
// in use depends on the machine alone, and within it a function is chosen by dtypes alone, so
// neither the batch nor the number of threads can change a result.
#pragma once

#include <cstdint>
#include <span>
#include <type_traits>

#include "core/dtype_visitor.h"

#if defined(__clang__)
#define MORTAR_UNROLL _Pragma("clang loop unroll(full)")
#else
#define MORTAR_UNROLL _Pragma("GCC unroll 16")
#endif

namespace mortar::lora::cpu {

inline constexpr std::int64_t kMaxShrinkTokens = 256;
inline constexpr std::int64_t kMaxShrinkRanks = 64;
/// Columns of a panel of packed B.
inline constexpr std::int64_t kPackColumns = 64;

/// out[t * out_stride + r] = sum_k x_rows[t][k] * a[r * a_row_stride + k], in float32.
///
/// K is cut into chunks of a fixed size. Within one, every (t, r) has lanes of its own: lane l sums
/// the elements k = l, l + lanes, ... in order (a shorter last step counts as padded with zeros),
/// one fixed tree adds the lanes, and the chunks are added in order. So the bits depend on K, the
/// level and the two rows alone.
struct ShrinkBlock {
  const void* const* x_rows = nullptr;
  std::int64_t num_tokens = 0;  ///< 0 to kMaxShrinkTokens
  const void* a = nullptr;
  std::int64_t a_row_stride = 0;
  std::int64_t num_ranks = 0;  ///< 0 to kMaxShrinkRanks
  std::int64_t hidden = 0;     ///< K
  float* out = nullptr;
  std::int64_t out_stride = 0;
};
using ShrinkKernel = void (*)(const ShrinkBlock&);

/// y_rows[t][n] = base_rows[t][n] + scale * sum_r h[t][r] * b[n][r] for n < num_columns; the sum
/// runs over r in order, in float32, from zero; then scale and base in one fused float32 step, and
/// one rounding.
///
/// `b` is packed by `PackKernel`. h has an entry per 32-bit unit of b or, of 16-bit b, one per
/// element, zero past the rank: float32, or pairs of bfloat16 for kernels of pairs.
struct ExpandBlock {
  const void* h = nullptr;
  std::int64_t h_stride = 0;  ///< entries from one token to the next
  std::int64_t num_tokens = 0;
  const std::uint32_t* b = nullptr;
  std::int64_t panel_stride = 0;
  std::int64_t units = 0;
  void* const* y_rows = nullptr;
  const void* const* base_rows = nullptr;  ///< of y's type: y_rows or others; null: base is zero
  std::int64_t num_rows = 0;  ///< of both, num_tokens or more: what comes next may be fetched
  std::int64_t num_columns = 0;
  float scale = 1;
};
using ExpandKernel = void (*)(const ExpandBlock&);

/// Packs rows of B (one per column of y) into panels of kPackColumns columns. A unit is the u-th
/// 32-bit word of a row, that is one float32 or two 16-bit values, zero past the end of the row and
/// for columns >= num_rows; that of column n lies at
/// out[n / kPackColumns * panel_stride + u * kPackColumns + n % kPackColumns]. Written are
/// round_up(units, 4) rows of every panel.
struct PackBlock {
  const void* rows = nullptr;
  std::int64_t row_bytes = 0;     ///< bytes used of each row
  std::int64_t stride_bytes = 0;  ///< bytes from one row to the next
  std::int64_t num_rows = 0;
  std::int64_t rows_after = 0;  ///< behind these, of the next block: fetched ahead
  std::uint32_t* out = nullptr;
  std::int64_t panel_stride = 0;  ///< words
};
using PackKernel = void (*)(const PackBlock&);

/// dst[i] = src[i] * scale, each of any float dtype, rounded once.
using ConvertKernel = void (*)(const void* src, DType src_dtype, float scale, std::int64_t count,
                               void* dst, DType dst_dtype);

/// Index of a float dtype in the tables below; any other dtype throws.
inline int float_index(DType dtype) {
  return visit_dtype<DTypeList<DType::kFloat32, DType::kBFloat16, DType::kFloat16>>(
      dtype, "lora", [](auto tag) {
        using T = typename decltype(tag)::type;
        return std::is_same_v<T, float> ? 0 : std::is_same_v<T, BFloat16> ? 1 : 2;
      });
}

struct Kernels {
  const char* level = "";
  ShrinkKernel shrink[3][3] = {};     ///< [x][a]
  ExpandKernel expand[3][3] = {};     ///< [b][y], h in float32
  ExpandKernel expand_pairs[2] = {};  ///< [y float32 or bfloat16], b and h bfloat16; or null
  PackKernel pack = nullptr;
  ConvertKernel convert = nullptr;
};

/// Tables that this machine can run, best first.
std::span<const Kernels* const> supported_kernels();

/// The table that the ops use: the first of supported_kernels(), unless a test chose another.
const Kernels& kernels();
/// Makes the ops use another table of supported_kernels(); null restores the first. Not safe while
/// an op runs.
void use_kernels(const Kernels* table);

}  // namespace mortar::lora::cpu
