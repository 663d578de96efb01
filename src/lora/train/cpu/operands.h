// SPDX-License-Identifier: Apache-2.0
// What the block kernels of serving (lora/cpu/kernels.h) take: matrices with dense rows, packed
// panels, and rows of x or dy as they are, or copied with dropped elements as zeros.
#pragma once

#include <cstdint>

#include "lora/cpu/kernels.h"
#include "lora/train/problem.h"

namespace mortar::lora::train::cpu {

inline constexpr std::int64_t kLineBytes = 64;

/// Cuts a workspace into pieces of whole cache lines; without one it only counts.
class Arena {
 public:
  explicit Arena(void* memory) : memory_(static_cast<char*>(memory)) {}
  void* take(std::int64_t bytes) {
    char* at = memory_ == nullptr ? nullptr : memory_ + used_;
    used_ += round_up(bytes, kLineBytes);
    return at;
  }
  std::int64_t used() const { return used_; }

 private:
  char* memory_;
  std::int64_t used_ = 0;  ///< a multiple of kLineBytes
};

/// A run of columns of a wide matrix.
struct Columns {
  std::int64_t first = 0, count = 0;
};

/// Copies those columns of `m`, a view of `rows` rows, to a matrix with dense rows of `width`.
void copy_columns(const Matrix& m, std::int64_t rows, Columns columns, std::int64_t width,
                  char* to);

/// Weights [columns of the output, ranks] packed as the expand kernel takes them.
struct Packed {
  std::uint32_t* words = nullptr;
  std::int64_t units = 0;  ///< 32-bit words of a row
  std::int64_t panel_stride = 0;

  Packed(std::uint32_t* to, std::int64_t rank, DType dtype);
  static std::int64_t bytes(std::int64_t columns, std::int64_t rank, DType dtype);

  /// `m` is [columns, rank].
  void put_all(const Matrix& m, Columns columns, std::int64_t rank) const;
  /// The same of matrices side by side: zeros wherever no element comes, then each matrix, whose
  /// ranks begin at first_rank.
  void clear(Columns columns) const;
  void put(const Matrix& m, Columns columns, std::int64_t first_rank, std::int64_t rank) const;
};

/// Element (row, c) of a wide matrix draws by row * columns + first + c.
struct Mask {
  std::uint32_t threshold = 0;
  std::int64_t columns = 0, first = 0;
  std::uint64_t seed = 0, offset = 0;

  /// Writes zeros to what is dropped of elements [begin, begin + count) of a row.
  void apply(std::int64_t row, std::int64_t begin, std::int64_t count, DType dtype,
             void* values) const;
};

/// Rows of a wide matrix: pointers to `count` rows, into the matrix itself, or, if its rows are not
/// dense or elements are dropped, into a copy.
struct WideRows {
  const Matrix* matrix;
  std::int64_t width;
  Mask mask;

  bool copies() const { return mask.threshold > 0 || (matrix->col_stride != 1 && width > 1); }
  const void* row(std::int64_t index, void* copy) const;
  /// Columns [begin, begin + count) of a row, with dropped elements as zeros.
  void copy_row(std::int64_t index, std::int64_t begin, std::int64_t count, void* to) const;
};

inline Matrix transposed(const Matrix& m) { return {m.data, m.col_stride, m.row_stride, m.dtype}; }

/// x and dy of a call as rows, with what dropout drops of them.
class WideOperands {
 public:
  explicit WideOperands(const Problem& p);
  /// No mask where the call does not drop elements of `on`.
  Mask mask(std::uint32_t threshold, LoraDropoutOn on, int slice) const;
  WideRows x(std::uint32_t threshold) const {
    return {&p_.x, p_.hidden, mask(threshold, LoraDropoutOn::kInput, 0)};
  }
  WideRows dy(std::uint32_t threshold, int slice) const {
    const SliceView& s = p_.slices[slice];
    return {&s.dy, s.width, mask(threshold, LoraDropoutOn::kDelta, slice)};
  }

 private:
  const Problem& p_;
  std::uint64_t seed_ = 0, offset_ = 0;
};

}  // namespace mortar::lora::train::cpu
