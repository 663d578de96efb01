// SPDX-License-Identifier: Apache-2.0
// The product of sm_90a for wide ranks: out[m, n] = sum over d of a[m, d] b[n, d], for
// operands of one 16-bit type of which either dimension may be dense.
#pragma once

#include <cstdint>

#include "lora/train/cuda/grad_sum.h"
#include "lora/train/cuda/row_cut.h"
#include "mortar/lora.h"
#include "mortar/stream.h"
#include "mortar/tensor.h"

namespace mortar::lora::cuda {

inline constexpr int kProductStep = 64;   ///< elements of the depth in a stage
inline constexpr int kProductRows = 128;  ///< rows of a thread block's tile
inline constexpr int kProductCluster =
    2;  ///< thread blocks of a cluster, whose rows are neighbours
inline constexpr int kMostProductPairs = kLoraMaxSlices;  ///< of all segments together
inline constexpr int kMostProductParts = 8;  ///< of a cluster whose thread blocks share the depth

/// A matrix [rows, depth].
struct ProductOperand {
  const void* data = nullptr;
  std::int64_t rows = 0, depth = 0;
  std::int64_t stride = 0;  ///< elements between neighbours of the dimension that is not dense
  bool rows_dense = false;  ///< else the depth is
};

/// What becomes of the sums.
enum class ProductEnd {
  kPartials,  ///< float32, a plane for each part of the depth
  kStore,     ///< rounded to the operands' type, after `base`, if any, was added
  /// Float32 values of which b has three columns of bfloat16 parts each, and the values' own parts
  /// (lora/train/cuda/part_columns.cuh): of one tile a pair, in clusters that share the depth.
  kForms,
};

/// How the work is cut. No bit depends on anything but the depth's leaves.
struct ProductPlan {
  /// Of a tile: 64, 96 (kForms), 128, 192 (of kStore not where sums are over rows) or 256; 128 with
  /// a base.
  int columns = 128;
  int parts = 1;          ///< of the depth
  std::int64_t leaf = 0;  ///< depth of one MMA chain, whole steps; 0: all of a part
  int leaves = 1;         ///< of a part, a power of two, that are added in pairs
  int clusters = 0;       ///< of the launch: as many as run at once
  bool defers = false;    ///< tiles of 256 columns leave while the next ones are multiplied
  /// Of a tile of clusters that share the depth. Of 64 columns half as many are taken where b is
  /// dense along the depth, else all.
  int rows = kProductRows;
};

/// One product, of one or several pairs of operands.
struct Product {
  DType dtype = DType::kBFloat16;
  /// Rows offsets[i] to offsets[i + 1] are of segment i, which has operands b of its own: those of
  /// its pair k are b[i * pairs + k]. Null: one segment has all rows.
  const std::int32_t* offsets = nullptr;
  int segments = 1;
  int pairs = 1;
  /// Of sums over rows with offsets: these cut the depth. All share a[0] and b[0], segment i stores
  /// columns[i], and partials are of chunks of its rows, numbered through all segments.
  lora::train::cuda::RowCut chunk;
  bool along_depth =
      false;  ///< pairs are summed; else all share a[0] and make columns of their own
  /// b without data: its segment has none, and sums of zeros.
  ProductOperand a[kMostProductPairs], b[kMostProductPairs];
  std::int64_t first_column[kMostProductPairs] = {};  ///< of the output
  std::int64_t columns[kMostProductPairs] = {};       ///< that a pair stores, whole eights
  /// Whether what is stored is scaled, by a factor for each b, with zeros in columns past b's rows
  /// whatever `a` holds.
  bool scaled = false;
  float factor[kMostProductPairs] = {};

  /// Dropout on a[0], of bfloat16 (lora/train/dropout.h), by a threshold for each b: of sums over
  /// rows and of kForms. Null: none.
  const std::int64_t* rng = nullptr;
  std::int64_t mask_columns = 0, mask_first = 0;  ///< both in whole Philox blocks
  std::uint32_t thresholds[kMostProductPairs] = {};

  ProductEnd end = ProductEnd::kStore;
  /// Starts and stores while the kernel before it runs, which has waited for all before it and
  /// neither writes the operands nor touches the output; and waits for its end. Sums over rows.
  bool early = false;
  /// Three neighbouring octets of b's rows are the parts of one (lora/train/cuda/part_columns.cuh),
  /// which are added: partials have a third of the columns. Of sums over rows.
  bool adds_copies = false;
  float* partials = nullptr;
  std::int64_t part_stride = 0, row_stride = 0, column_stride = 0;  ///< one of the last two is 1
  void* out = nullptr;  ///< rows of whole 16-byte pieces, as base's
  const void* base = nullptr;
  std::int64_t out_stride = 0, base_stride = 0;
  /// Of kForms, where `out` may be null: columns of parts, and how many values each b has.
  void *sum_columns = nullptr, *pair_columns = nullptr;
  int values[kMostProductPairs] = {};

  /// Partial sums of an earlier kernel, which warps that copy nothing add meanwhile: of rows whose
  /// depth is dense, rounded.
  lora::train::cuda::GradSum beside;
};

/// Whether an operand's rows can be copied: 16-byte pieces, in sizes that the copy engine takes.
bool takes_product(const ProductOperand& operand);

void launch_product(const char* op, const Product& product, const ProductPlan& plan, Stream stream);
/// The same of what is stored without a base, in tiles of 64 or 128 columns, or of half of the rows
/// and 64 columns or (kForms) 96 and 192: clusters of as many thread blocks as parts have one tile
/// each, and add their parts. No pairs are summed.
void launch_split_product(const char* op, const Product& product, const ProductPlan& plan,
                          Stream stream);

}  // namespace mortar::lora::cuda
