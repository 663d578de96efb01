// SPDX-License-Identifier: Apache-2.0
// The three products of LoRA training on up to kStepRows rows, made of serving's block kernels.
#pragma once

#include <cstdint>

#include "lora/train/cpu/config.h"
#include "lora/train/cpu/operands.h"
#include "lora/train/cpu/row_chunks.h"

namespace mortar::lora::train::cpu {

/// One thread's buffers.
struct Scratch {
  Scratch() = default;
  /// Takes them from an arena: for rows of up to `width` columns and `hidden_width` columns of h.
  Scratch(Arena* arena, std::int64_t width, std::int64_t hidden_width);

  char* rows = nullptr;            ///< [kCopyRows, width]
  std::uint32_t* panel = nullptr;  ///< [kStepRows, kPackColumns]
  float* tile = nullptr;           ///< [kStepRows, kTileColumns]
  char* entries = nullptr;         ///< [kStepRows, hidden_width]
  char* h = nullptr;               ///< [kStepRows, hidden_width], of the dtype of the weights
  char* ds = nullptr;
};

/// Rows of h or ds: those of the batch, or of the step.
struct NarrowRows {
  char* data = nullptr;
  std::int64_t stride = 0;  ///< bytes from one row to the next
  bool by_step = false;
  char* at(const StepRows& rows, std::int64_t i) const {
    return data + (by_step ? i : rows.row(i)) * stride;
  }
};

/// `count` elements from element `begin` of a row, in float32.
void load_row(const Matrix& m, std::int64_t row, std::int64_t begin, std::int64_t count, float* to);
/// The other way, rounded once.
void store_row(const Matrix& m, std::int64_t row, std::int64_t begin, std::int64_t count,
               const float* from);

/// The dtype of `scratch->entries`: bfloat16 where the kernels of bfloat16 pairs serve these
/// weights, else float32.
DType entry_dtype(DType weight);

/// to[m, first_column + r] = factor * sum_c wide[m, c] a[r, c], rounded to `dtype`.
void shrink_rows(const WideRows& wide, const StepRows& rows, const Matrix& a, std::int64_t rank,
                 float factor, const NarrowRows& to, std::int64_t first_column, DType dtype,
                 Scratch* scratch);

/// Where an expand writes.
struct OutRows {
  Matrix out;
  Matrix base;  ///< null: nothing is added
  std::int64_t width = 0;
  Mask mask;
  /// Whether the kernel can write rows where they lie, and read those of the base where they do.
  bool in_place() const {
    return mask.threshold == 0 && dense(out) &&
           (base.data == nullptr || (base.dtype == out.dtype && dense(base)));
  }

 private:
  bool dense(const Matrix& m) const { return m.col_stride == 1 || width == 1; }
};

/// out[m, c] = base[m, c] + mask * sum_r h[m, r] b[c, r] with h in `scratch->entries` (rows
/// `stride` entries apart, zeros past the rank) and b packed.
void expand_rows(const OutRows& out, const StepRows& rows, const Packed& b, std::int64_t stride,
                 DType weight, Scratch* scratch);

/// out = base for rows without an adapter.
void copy_rows(const OutRows& out, const StepRows& rows, Scratch* scratch);

/// The dtype of entries that outer_rows takes for wide rows of a dtype.
DType outer_entry_dtype(DType wide, DType weight);

/// sums[r, c] (+)= sum over rows of entries[r, row] wide[row, first + c] for those columns: entries
/// are [rank, kStepRows] of outer_entry_dtype, with a zero behind an odd number of rows; those of
/// bfloat16 with room for whole tiles of 16 ranks, which twice the memory of `rank` has.
void outer_rows(const WideRows& wide, const StepRows& rows, Columns columns, const void* entries,
                std::int64_t rank, bool add, DType weight, float* sums, Scratch* scratch);

}  // namespace mortar::lora::train::cpu
