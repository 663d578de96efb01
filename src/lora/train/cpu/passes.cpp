// SPDX-License-Identifier: Apache-2.0
#include "lora/train/cpu/passes.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/dtype_visitor.h"

namespace mortar::lora::train::cpu {

using lora::cpu::ExpandBlock;
using lora::cpu::float_index;
using lora::cpu::kernels;
using lora::cpu::kMaxShrinkRanks;
using lora::cpu::kPackColumns;
using lora::cpu::ShrinkBlock;

constexpr std::int64_t kFloatBytes = sizeof(float);

void load_row(const Matrix& m, std::int64_t row, std::int64_t begin, std::int64_t count,
              float* to) {
  const std::int64_t at = row * m.row_stride + begin * m.col_stride;
  if (m.col_stride == 1 || count == 1) {
    const char* from = static_cast<const char*>(m.data) + at * dtype_size(m.dtype);
    if (m.dtype == DType::kFloat32) {
      std::memcpy(to, from, count * kFloatBytes);
    } else {
      kernels().convert(from, m.dtype, 1.0f, count, to, DType::kFloat32);
    }
    return;
  }
  visit_dtype<FloatDTypes>(m.dtype, "lora_train", [&](auto tag) {
    const auto* from = static_cast<const typename decltype(tag)::type*>(m.data) + at;
    for (std::int64_t i = 0; i < count; ++i) to[i] = to_float(from[i * m.col_stride]);
  });
}

void store_row(const Matrix& m, std::int64_t row, std::int64_t begin, std::int64_t count,
               const float* from) {
  const std::int64_t at = row * m.row_stride + begin * m.col_stride;
  if (m.col_stride == 1 || count == 1) {
    kernels().convert(from, DType::kFloat32, 1.0f, count,
                      static_cast<char*>(m.data) + at * dtype_size(m.dtype), m.dtype);
    return;
  }
  visit_dtype<FloatDTypes>(m.dtype, "lora_train", [&](auto tag) {
    using T = typename decltype(tag)::type;
    T* to = static_cast<T*>(m.data) + at;
    for (std::int64_t i = 0; i < count; ++i) to[i * m.col_stride] = from_float<T>(from[i]);
  });
}

Scratch::Scratch(Arena* arena, std::int64_t width, std::int64_t hidden_width) {
  const std::int64_t entry_columns = round_up<std::int64_t>(hidden_width, 8);
  rows = static_cast<char*>(arena->take(kCopyRows * width * kFloatBytes));
  panel = static_cast<std::uint32_t*>(arena->take(kStepRows * kPackColumns * kFloatBytes));
  tile = static_cast<float*>(arena->take(kStepRows * kTileColumns * kFloatBytes));
  entries = static_cast<char*>(arena->take(kStepRows * entry_columns * kFloatBytes));
  h = static_cast<char*>(arena->take(kStepRows * hidden_width * kFloatBytes));
  ds = static_cast<char*>(arena->take(kStepRows * hidden_width * kFloatBytes));
}

DType entry_dtype(DType weight) {
  const bool pairs = weight == DType::kBFloat16 && kernels().expand_pairs[0] != nullptr;
  return pairs ? DType::kBFloat16 : DType::kFloat32;
}

DType outer_entry_dtype(DType wide, DType weight) {
  return wide == weight ? entry_dtype(weight) : DType::kFloat32;
}

void shrink_rows(const WideRows& wide, const StepRows& rows, const Matrix& a, std::int64_t rank,
                 float factor, const NarrowRows& to, std::int64_t first_column, DType dtype,
                 Scratch* scratch) {
  float sums[kStepRows * kMaxShrinkRanks];
  const void* pointers[kStepRows];
  const std::int64_t size = dtype_size(dtype);
  const std::int64_t row_bytes = wide.width * dtype_size(wide.matrix->dtype);
  const std::int64_t most = wide.copies() ? kCopyRows : kStepRows;
  for (std::int64_t begin = 0; begin < rows.count; begin += most) {
    ShrinkBlock block;
    block.num_tokens = std::min(most, rows.count - begin);
    for (std::int64_t i = 0; i < block.num_tokens; ++i) {
      pointers[i] = wide.row(rows.row(begin + i), scratch->rows + i * row_bytes);
    }
    block.x_rows = pointers;
    block.a_row_stride = a.row_stride;
    block.hidden = wide.width;
    block.out = sums;
    block.out_stride = kMaxShrinkRanks;
    for (std::int64_t r = 0; r < rank; r += kMaxShrinkRanks) {
      block.a = static_cast<const char*>(a.data) + r * a.row_stride * size;
      block.num_ranks = std::min(kMaxShrinkRanks, rank - r);
      kernels().shrink[float_index(wide.matrix->dtype)][float_index(dtype)](block);
      for (std::int64_t i = 0; i < block.num_tokens; ++i) {
        kernels().convert(sums + i * kMaxShrinkRanks, DType::kFloat32, factor, block.num_ranks,
                          to.at(rows, begin + i) + (first_column + r) * size, dtype);
      }
    }
  }
}

namespace {

/// What kernels of pairs do where they round to bfloat16.
void flush_subnormals(std::int64_t count, float* values) {
  for (std::int64_t i = 0; i < count; ++i) {
    if (std::abs(values[i]) < std::numeric_limits<float>::min()) {
      values[i] = std::copysign(0.0f, values[i]);
    }
  }
}

}  // namespace

void expand_rows(const OutRows& out, const StepRows& rows, const Packed& b, std::int64_t stride,
                 DType weight, Scratch* scratch) {
  void* pointers[kStepRows];
  const void* base_pointers[kStepRows];
  const bool pairs = entry_dtype(weight) == DType::kBFloat16;
  const bool flushes = pairs && out.out.dtype == DType::kBFloat16;
  const bool in_place = out.in_place() && !(pairs && out.out.dtype == DType::kFloat16);
  const std::int64_t size = dtype_size(out.out.dtype);
  const std::int64_t step = in_place ? std::max<std::int64_t>(out.width, 1) : kTileColumns;
  static_assert(kTileColumns % kPackColumns == 0, "a tile is whole panels");
  ExpandBlock block;
  block.h_stride = pairs ? stride / 2 : stride;
  block.panel_stride = b.panel_stride;
  block.units = b.units;
  block.y_rows = pointers;
  const bool adds = in_place && out.base.data != nullptr;
  const bool onto_itself =
      out.base.data == out.out.data && out.base.row_stride == out.out.row_stride;
  if (adds) block.base_rows = onto_itself ? pointers : base_pointers;
  const int y = float_index(in_place ? out.out.dtype : DType::kFloat32);
  const auto kernel = pairs ? kernels().expand_pairs[y] : kernels().expand[float_index(weight)][y];
  block.num_tokens = block.num_rows = rows.count;
  block.h = scratch->entries;
  for (std::int64_t c = 0; c < out.width; c += step) {
    block.num_columns = std::min(step, out.width - c);
    block.b = b.words + c / kPackColumns * b.panel_stride;
    for (std::int64_t i = 0; i < rows.count; ++i) {
      if (!in_place) {
        pointers[i] = scratch->tile + i * kTileColumns;
        continue;
      }
      const std::int64_t row = rows.row(i);
      pointers[i] = static_cast<char*>(out.out.data) + (row * out.out.row_stride + c) * size;
      if (!adds) continue;
      base_pointers[i] =
          static_cast<const char*>(out.base.data) + (row * out.base.row_stride + c) * size;
    }
    kernel(block);
    for (std::int64_t i = 0; !in_place && i < rows.count; ++i) {
      float base[kTileColumns];
      float* sum = scratch->tile + i * kTileColumns;
      out.mask.apply(rows.row(i), c, block.num_columns, DType::kFloat32, sum);
      if (out.base.data != nullptr) {
        load_row(out.base, rows.row(i), c, block.num_columns, base);
        for (std::int64_t j = 0; j < block.num_columns; ++j) sum[j] += base[j];
      }
      if (flushes) flush_subnormals(block.num_columns, sum);
      store_row(out.out, rows.row(i), c, block.num_columns, sum);
    }
  }
}

void copy_rows(const OutRows& out, const StepRows& rows, Scratch* scratch) {
  if (out.base.data == out.out.data && out.base.data != nullptr) return;
  for (std::int64_t i = 0; i < rows.count; ++i) {
    for (std::int64_t c = 0; c < out.width; c += kTileColumns) {
      const std::int64_t count = std::min(kTileColumns, out.width - c);
      if (out.base.data == nullptr) {
        std::fill_n(scratch->tile, count, 0.0f);
      } else {
        load_row(out.base, rows.row(i), c, count, scratch->tile);
      }
      store_row(out.out, rows.row(i), c, count, scratch->tile);
    }
  }
}

namespace {

/// Up to kPackColumns columns of the rows, none of them dropped, as units of a panel: float32.
void fill_panel(const Matrix& m, const StepRows& rows, Columns columns, std::uint32_t* panel) {
  for (std::int64_t i = 0; i < rows.count; ++i) {
    auto* to = reinterpret_cast<float*>(panel + i * kPackColumns);
    load_row(m, rows.row(i), columns.first, columns.count, to);
    std::fill(to + columns.count, to + kPackColumns, 0.0f);
  }
}

/// The same in pairs of 16-bit values of two rows.
void fill_pairs(const Matrix& m, const StepRows& rows, Columns columns, std::uint32_t* panel) {
  std::uint16_t copies[2][kPackColumns] = {};
  const auto row = [&](std::int64_t i, std::uint16_t* copy) -> const std::uint16_t* {
    const auto* from = static_cast<const std::uint16_t*>(m.data) + rows.row(i) * m.row_stride +
                       columns.first * m.col_stride;
    if (m.col_stride == 1 && columns.count == kPackColumns) return from;
    for (std::int64_t j = 0; j < columns.count; ++j) copy[j] = from[j * m.col_stride];
    return copy;
  };
  for (std::int64_t i = 0; i < rows.count; i += 2, panel += kPackColumns) {
    const std::uint16_t* low = row(i, copies[0]);
    if (i + 1 == rows.count) {
      for (std::int64_t j = 0; j < kPackColumns; ++j) panel[j] = low[j];
      continue;
    }
    const std::uint16_t* high = row(i + 1, copies[1]);
    for (std::int64_t j = 0; j < kPackColumns; ++j) {
      panel[j] = low[j] | static_cast<std::uint32_t>(high[j]) << 16;
    }
  }
}

}  // namespace

void outer_rows(const WideRows& wide, const StepRows& rows, Columns columns, const void* entries,
                std::int64_t rank, bool add, DType weight, float* sums, Scratch* scratch) {
  void* pointers[8 * kLoraMaxRank];
  const bool pairs = outer_entry_dtype(wide.matrix->dtype, weight) == DType::kBFloat16;
  ExpandBlock block;
  block.h = entries;
  block.h_stride = pairs ? kStepRows / 2 : kStepRows;
  block.num_tokens = block.num_rows = rank;
  block.b = scratch->panel;
  block.units = pairs ? ceil_div<std::int64_t>(rows.count, 2) : rows.count;
  block.y_rows = pointers;
  if (add) block.base_rows = pointers;
  // Columns [first, first + count) of `from`, to the sums from `to` on.
  const auto add_columns = [&](const Matrix& from, const StepRows& at, Columns these, float* to) {
    for (std::int64_t c = 0; c < these.count; c += kPackColumns) {
      block.num_columns = std::min(kPackColumns, these.count - c);
      (pairs ? fill_pairs : fill_panel)(from, at, {these.first + c, block.num_columns},
                                        scratch->panel);
      for (std::int64_t r = 0; r < rank; ++r) pointers[r] = to + r * columns.count + c;
      (pairs ? kernels().expand_pairs[0] : kernels().expand[0][0])(block);
    }
  };
  if (wide.mask.threshold == 0) return add_columns(*wide.matrix, rows, columns, sums);
  // Dropped elements are drawn for a tile of columns at a time.
  const Matrix tile{scratch->tile, kTileColumns, 1, wide.matrix->dtype};
  const std::int64_t row_bytes = kTileColumns * dtype_size(tile.dtype);
  for (std::int64_t c = 0; c < columns.count; c += kTileColumns) {
    const std::int64_t count = std::min(kTileColumns, columns.count - c);
    for (std::int64_t i = 0; i < rows.count; ++i) {
      wide.copy_row(rows.row(i), columns.first + c, count,
                    reinterpret_cast<char*>(scratch->tile) + i * row_bytes);
    }
    add_columns(tile, {nullptr, 0, rows.count}, {0, count}, sums + c);
  }
}

}  // namespace mortar::lora::train::cpu
