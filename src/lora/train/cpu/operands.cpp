// SPDX-License-Identifier: Apache-2.0
#include "lora/train/cpu/operands.h"

#include <algorithm>
#include <cstring>

#include "lora/train/cpu/drop.h"

namespace mortar::lora::train::cpu {
namespace {

/// to[i] = from[i * stride], elements of `size` bytes.
void gather(const char* from, std::int64_t stride, std::int64_t count, std::int64_t size,
            char* to) {
  if (stride == 1) {
    std::memcpy(to, from, count * size);
  } else if (size == 4) {
    for (std::int64_t i = 0; i < count; ++i) std::memcpy(to + 4 * i, from + 4 * i * stride, 4);
  } else {
    for (std::int64_t i = 0; i < count; ++i) std::memcpy(to + 2 * i, from + 2 * i * stride, 2);
  }
}

/// Elements of 2 or 4 bytes, (rows, columns) from any strides to any strides.
template <class T>
void copy_elements(const T* from, std::int64_t from_row, std::int64_t from_col, std::int64_t rows,
                   std::int64_t columns, T* to, std::int64_t to_row, std::int64_t to_col) {
  // Blocks of 64 rows, so that neither side leaves the cache.
  for (std::int64_t r0 = 0; r0 < rows; r0 += 64) {
    for (std::int64_t c0 = 0; c0 < columns; c0 += 64) {
      const std::int64_t r1 = std::min(r0 + 64, rows), c1 = std::min(c0 + 64, columns);
      for (std::int64_t r = r0; r < r1; ++r) {
        for (std::int64_t c = c0; c < c1; ++c) {
          to[r * to_row + c * to_col] = from[r * from_row + c * from_col];
        }
      }
    }
  }
}

}  // namespace

void copy_columns(const Matrix& m, std::int64_t rows, Columns columns, std::int64_t width,
                  char* to) {
  const auto copy = [&]<class T>(T) {
    copy_elements(static_cast<const T*>(m.data) + columns.first * m.col_stride, m.row_stride,
                  m.col_stride, rows, columns.count, reinterpret_cast<T*>(to) + columns.first,
                  width, std::int64_t{1});
  };
  m.dtype == DType::kFloat32 ? copy(std::uint32_t()) : copy(std::uint16_t());
}

Packed::Packed(std::uint32_t* to, std::int64_t rank, DType dtype)
    : words(to),
      units(ceil_div<std::int64_t>(rank * dtype_size(dtype), 4)),
      panel_stride(round_up<std::int64_t>(units, 4) * lora::cpu::kPackColumns) {}

std::int64_t Packed::bytes(std::int64_t columns, std::int64_t rank, DType dtype) {
  return ceil_div(columns, lora::cpu::kPackColumns) * Packed(nullptr, rank, dtype).panel_stride * 4;
}

void Packed::put_all(const Matrix& m, Columns columns, std::int64_t rank) const {
  if (m.col_stride != 1) {
    clear(columns);
    return put(m, columns, 0, rank);
  }
  const std::int64_t size = dtype_size(m.dtype);
  lora::cpu::PackBlock block;
  block.rows = static_cast<const char*>(m.data) + columns.first * m.row_stride * size;
  block.row_bytes = rank * size;
  block.stride_bytes = m.row_stride * size;
  block.num_rows = columns.count;
  block.out = words + columns.first / lora::cpu::kPackColumns * panel_stride;
  block.panel_stride = panel_stride;
  lora::cpu::kernels().pack(block);
}

void Packed::clear(Columns columns) const {
  if (units == 0) return;  // of an adapter without a pair
  constexpr std::int64_t kPanel = lora::cpu::kPackColumns;
  const std::int64_t end = columns.first + columns.count;
  for (std::int64_t c = columns.first; c < end; c += kPanel) {
    std::uint32_t* panel = words + c / kPanel * panel_stride;
    const bool whole = end - c >= kPanel;  // then only half of the last unit may stay empty
    std::fill(panel + (whole ? (units - 1) * kPanel : 0), panel + panel_stride, 0u);
  }
}

namespace {

/// Rank `at` of a panel's columns, and with kPair the next one too: both halves of the words.
template <bool kPair, class T>
void put_rank(const T* from, std::int64_t row_stride, std::int64_t col_stride, std::int64_t count,
              std::int64_t at, std::uint32_t* panel) {
  constexpr std::int64_t kPerWord = 4 / sizeof(T);  // elements of a word
  std::uint32_t* words = panel + at / kPerWord * lora::cpu::kPackColumns;
  const auto put = [&](std::int64_t stride) {
    if constexpr (kPair) {
      const T* next = from + col_stride;
      for (std::int64_t i = 0; i < count; ++i) {
        words[i] = from[i * stride] | static_cast<std::uint32_t>(next[i * stride]) << 16;
      }
    } else {
      T* to = reinterpret_cast<T*>(words) + at % kPerWord;
      for (std::int64_t i = 0; i < count; ++i) to[i * kPerWord] = from[i * stride];
    }
  };
  row_stride == 1 ? put(1) : put(row_stride);  // a stride that is known makes vectors
}

}  // namespace

void Packed::put(const Matrix& m, Columns columns, std::int64_t first_rank,
                 std::int64_t rank) const {
  constexpr std::int64_t kPanel = lora::cpu::kPackColumns;
  const auto put_panel = [&]<class T>(T, std::int64_t first, std::int64_t count) {
    std::uint32_t* panel = words + first / kPanel * panel_stride;
    const T* from = static_cast<const T*>(m.data) + first * m.row_stride;
    for (std::int64_t r = 0; r < rank; ++r, from += m.col_stride) {
      const std::int64_t at = first_rank + r;
      if (sizeof(T) == 2 && at % 2 == 0 && r + 1 < rank) {
        put_rank<true>(from, m.row_stride, m.col_stride, count, at, panel);
        ++r, from += m.col_stride;
      } else {
        put_rank<false>(from, m.row_stride, m.col_stride, count, at, panel);
      }
    }
  };
  for (std::int64_t c = columns.first; c < columns.first + columns.count; c += kPanel) {
    const std::int64_t count = std::min(kPanel, columns.first + columns.count - c);
    m.dtype == DType::kFloat32 ? put_panel(std::uint32_t(), c, count)
                               : put_panel(std::uint16_t(), c, count);
  }
}

namespace {

/// Of elements [begin, begin + count) of a tensor; whole groups together.
template <class T>
void drop(const Draws& draws, std::uint64_t begin, std::int64_t count, T* values) {
  for (std::int64_t i = 0; i < count;) {
    const std::uint64_t at = begin + static_cast<std::uint64_t>(i), group = at / kMaskGroup;
    const auto from = static_cast<int>(at % kMaskGroup);
    if (from == 0 && count - i >= kMaskGroup) {
      const std::int64_t groups = (count - i) / kMaskGroup;
      drop_groups(draws, group, groups, values + i);
      i += groups * kMaskGroup;
      continue;
    }
    const auto n = static_cast<int>(std::min<std::int64_t>(kMaskGroup - from, count - i));
    const std::uint32_t keep = keep_bits(draws.seed, draws.offset, group, draws.threshold) >> from;
    for (int j = 0; j < n; ++j) {
      if ((keep >> j & 1u) == 0) values[i + j] = 0;
    }
    i += n;
  }
}

}  // namespace

void Mask::apply(std::int64_t row, std::int64_t begin, std::int64_t count, DType dtype,
                 void* values) const {
  if (threshold == 0) return;
  if (threshold >= kDropAll) {
    std::memset(values, 0, count * dtype_size(dtype));
    return;
  }
  const std::uint64_t at = static_cast<std::uint64_t>(row) * columns + first + begin;
  const Draws draws{seed, offset, threshold};
  dtype_size(dtype) == 4 ? drop(draws, at, count, static_cast<std::uint32_t*>(values))
                         : drop(draws, at, count, static_cast<std::uint16_t*>(values));
}

void WideRows::copy_row(std::int64_t index, std::int64_t begin, std::int64_t count,
                        void* to) const {
  const std::int64_t size = dtype_size(matrix->dtype);
  const std::int64_t at = index * matrix->row_stride + begin * matrix->col_stride;
  gather(static_cast<const char*>(matrix->data) + at * size, matrix->col_stride, count, size,
         static_cast<char*>(to));
  mask.apply(index, begin, count, matrix->dtype, to);
}

const void* WideRows::row(std::int64_t index, void* copy) const {
  if (!copies()) {
    return static_cast<const char*>(matrix->data) +
           index * matrix->row_stride * dtype_size(matrix->dtype);
  }
  copy_row(index, 0, width, copy);
  return copy;
}

WideOperands::WideOperands(const Problem& p) : p_(p) {
  if (p.rng == nullptr) return;
  seed_ = static_cast<std::uint64_t>(p.rng[0]);
  offset_ = static_cast<std::uint64_t>(p.rng[1]);
}

Mask WideOperands::mask(std::uint32_t threshold, LoraDropoutOn on, int slice) const {
  Mask m;
  if (p_.drop_on != on) return m;
  m.threshold = threshold;
  m.columns = on == LoraDropoutOn::kInput ? p_.hidden : p_.total_width;
  m.first = on == LoraDropoutOn::kInput ? 0 : p_.slices[slice].first_column;
  m.seed = seed_;
  m.offset = offset_;
  return m;
}

}  // namespace mortar::lora::train::cpu
