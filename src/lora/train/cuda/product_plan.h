// SPDX-License-Identifier: Apache-2.0
// How the product of lora/cuda/product.cu is cut for LoRA training, and the time that it takes by a
// model: pure functions of sizes and of the number of SMs.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/int_math.h"
#include "lora/cuda/product.h"
#include "lora/train/cuda/shrink_time.h"

namespace mortar::lora::train::cuda {

/// Ranks (columns of h) from which products are considered: a tile has at least so many.
inline constexpr int kLeastProductRanks = 64;
/// The same for h and ds of columns of parts (part_columns.cuh), three of each rank: all, as dense
/// rows then pass as boxes to clusters that store h. (us of a backward on an H200, by the stream
/// and partial sums, 8 ranks / by these, 16: 8192 x 4096 x 4096 100.2 / 81.5; 4096 x 5120 x 5120
/// 64.4 / 53.9.)
inline constexpr int kLeastPartProductRanks = 24;
/// Ranks from which products sum over rows where they are known to take the operands: half of a
/// tile is zeros then, but memory binds it, and panels of so many ranks wait for their MMAs.
inline constexpr int kLeastRowProductRanks = 24;

/// One product as the model of its time sees it.
struct ProductSizes {
  std::int64_t rows = 0, depth = 0, columns = 0;  ///< of the output, and what is summed
  double stored = 0;  ///< bytes that the output takes in DRAM's time, with the base that is read
};

/// Microseconds on an H200: `step_us` is the time of a step of 64 elements of the depth on an SM,
/// bound by one SM's share of L2 (6 TB/s over all), by the MMA (2 columns of 128 rows a clock and
/// 64 elements), and never below that of a lone thread block.
inline constexpr double kRampUs = 3.5, kLoneStepUs = 0.25, kMmaUs = 4 / 1755.0;
inline constexpr double kL2BytesPerUs = 6e6, kDramBytesPerUs = 4e6;
inline double product_us(const ProductSizes& p, int tile_columns, int parts, int sms,
                         double least_step_us = kLoneStepUs,
                         double l2_bytes_per_us = kL2BytesPerUs) {
  using namespace lora::cuda;
  const std::int64_t clusters = std::max(sms / kProductCluster, 1);
  const std::int64_t units =
      std::max<std::int64_t>(ceil_div<std::int64_t>(p.rows, kProductCluster * kProductRows) *
                                 ceil_div<std::int64_t>(p.columns, tile_columns) * parts,
                             1);
  const std::int64_t waves = ceil_div(units, clusters);
  const double steps = static_cast<double>(
      ceil_div<std::int64_t>(ceil_div<std::int64_t>(p.depth, kProductStep), parts));
  const double stage_bytes = 2.0 * kProductStep * (kProductRows + tile_columns / 2.0);
  const double busy = static_cast<double>(kProductCluster * std::min(units, clusters));
  const double step_us =
      std::max({least_step_us, tile_columns * kMmaUs, stage_bytes * busy / l2_bytes_per_us});
  const double end_us = 0.4 + tile_columns / 256.0;
  const double read = 2.0 * static_cast<double>(p.rows) * static_cast<double>(p.depth);
  return kRampUs + std::max((read + p.stored) / kDramBytesPerUs,
                            static_cast<double>(waves) * (steps * step_us + end_us));
}

/// Thread blocks of a product: whole clusters.
constexpr std::int64_t product_blocks(std::int64_t rows, int width, int tile_columns, int parts) {
  using namespace lora::cuda;
  return ceil_div<std::int64_t>(rows, kProductCluster * kProductRows) * kProductCluster *
         ceil_div(width, tile_columns) * parts;
}

/// Tiles of columns of parts that have half of the rows, those of 32 and of 64 ranks.
inline constexpr int kHalfPartTile = 96, kWidestPartTile = 192;
constexpr int split_rows(int tile_columns) {
  return tile_columns == kHalfPartTile || tile_columns == kWidestPartTile
             ? lora::cuda::kProductRows / 2
             : lora::cuda::kProductRows;
}
/// Its tiles: a cluster has one.
constexpr std::int64_t split_tiles(std::int64_t rows, int width, int tile_columns) {
  return ceil_div<std::int64_t>(rows, split_rows(tile_columns)) * ceil_div(width, tile_columns);
}

/// A cut and its time. Parts of the depth leave partials, or (`split`) are those of a cluster.
struct ProductCut {
  int columns = 64, parts = 1;
  double us = 0;
  bool split = false;
  int rows = lora::cuda::kProductRows;  ///< of a tile
};

/// For h and ds, whose depth is long: an SM's shared memory fills at 66 KB/us, so that a step of
/// 128 rows by 64, 128 and 256 columns takes at least 0.4, 0.5 and 0.75 us, and L2 gives more than
/// to short ones. With these, and with what the ends below take, the model chose plans that took
/// 1.007 times as long as the best on average, and 1.08 at most, of 14 plans for each of 30 sizes
/// on an H100 (512 to 16,384 rows, 2,048 to 14,336 columns, ranks 64 to 512).
inline constexpr double kLongL2BytesPerUs = 7.3e6;
inline constexpr double kStageBytesPerUs = 66e3;
constexpr double long_step_us(int tile_columns) {
  return 2.0 * lora::cuda::kProductStep * (lora::cuda::kProductRows + tile_columns) /
         kStageBytesPerUs;
}

/// Columns of a tile of dA or dB: as many of the ranks as a thread block takes.
constexpr int rows_tile(int width) { return width <= 64 ? 64 : width <= 128 ? 128 : 256; }

/// The same for a launch, of which no bit depends: 192 where 256 would be a quarter empty, or where
/// a rank's `copies` are added in their tile.
constexpr int rows_launch_tile(int width, int copies) {
  const int tile = rows_tile(width);
  if (copies > 1) return tile < 256 && width <= tile / (8 * copies) * (8 * copies) ? tile : 192;
  return tile == 256 && ceil_div(width, 192) * 192 < ceil_div(width, 256) * 256 ? 192 : tile;
}

/// The same with dropout, of which a tile of 256 has no registers: each draws anew.
constexpr int rows_masked_tile(int width, int copies) {
  const int tile = rows_launch_tile(width, copies);
  return tile < 256 ? tile : ceil_div(width, 192) < ceil_div(width, 128) ? 192 : 128;
}

/// dA or dB: sums over rows of `width` ranks by `columns`, in chunks whose partials are added. Made
/// for the SMs of an H200 on every device, because summation trees follow from the chunks.
inline ProductCut cut_rows(std::int64_t rows, std::int64_t columns, int width) {
  constexpr int kSms = 132;
  ProductCut best;
  const int tile = rows_tile(width);
  for (int parts = 1; parts <= 16; ++parts) {
    const double partials = 4.0 * parts * static_cast<double>(columns) * width;
    const double us =
        product_us({columns, rows, width, partials / 2}, tile, parts, kSms) + partials / 5e6;
    if (best.us > 0 && us >= best.us) continue;
    best = {tile, parts, us};
  }
  return best;
}

/// The same on so many SMs, by a model in which what an SM's shared memory takes binds a step: of
/// dA, of dB beside ds, and of columns of parts, whose `copies` are added before partials leave.
/// These cost what they take from L2 and more.
/// `least_us`: of so many chunks, what else binds.
template <class Least>
ProductCut cut_rows_on(std::int64_t rows, std::int64_t columns, int width, int copies, int sms,
                       const Least& least_us) {
  constexpr double kPartialBytesPerUs = 1.4e6, kPartUs = 0.2;
  ProductCut best;
  const int tile = rows_tile(width);
  for (int parts = 1; parts <= 16; ++parts) {
    const double partials = 4.0 * parts * static_cast<double>(columns) * width / copies;
    const double sums =
        product_us({columns, rows, width}, tile, parts, sms, long_step_us(tile), kLongL2BytesPerUs);
    const double us =
        std::max(sums, least_us(parts)) + partials / kPartialBytesPerUs + parts * kPartUs;
    if (best.us > 0 && us >= best.us) continue;
    best = {tile, parts, us};
  }
  return best;
}
/// dA beside dx, and sums of columns of parts: on all SMs. (us of a backward on an H200, as above /
/// by these: rank 128, 8192 x 5120 x 5120 122.5 / 116.2; float32 weights, rank 16, 8192 x 4096 x
/// 4096 97.9 / 90.6, 4096 x 5120 x 5120 61.9 / 57.4.)
inline ProductCut cut_rows_alone(std::int64_t rows, std::int64_t columns, int width,
                                 int copies = 1) {
  return cut_rows_on(rows, columns, width, copies, 132, [](int) { return 0.0; });
}
/// dB beside ds, on the SMs that ds leaves: thread blocks that have whole rows, or clusters of
/// these, fill half of the device, or all of it. Where both pass dy at the same time, what one has
/// read is in L2 for the other if dB's tiles of that time have as few columns. (us of a backward on
/// an H200, as above / by these: rank 64, 8192 x 4096 x 14336 165 / 149, 4096 x 5120 x 5120 62.6 /
/// 57.0, 4096 x 2560 x 9728 76.2 / 64.4, 16384 x 2048 x 2048 91.1 / 81.7, 8192 x 2048 x 8192 90.5 /
/// 86.3; rank 128, 8192 x 4096 x 4096 98.6 / 91.7.)
inline ProductCut cut_rows_beside(std::int64_t rows, std::int64_t columns, int width) {
  constexpr int kSms = 132, kFewest = 16;
  constexpr double kL2Bytes = 30e6;
  std::int64_t blocks = std::max<std::int64_t>(product_blocks(rows, width, rows_tile(width), 1), 1);
  while (2 * blocks <= kSms / 2) blocks *= 2;
  const auto free = static_cast<int>(kSms - blocks);
  if (free < kFewest) return cut_rows_on(rows, columns, width, 1, kSms, [](int) { return 0.0; });
  return cut_rows_on(rows, columns, width, 1, free, [&](int parts) {
    using namespace lora::cuda;
    const std::int64_t at_once = free / kProductCluster * kProductCluster * kProductRows / parts;
    const double row_bytes = 2.0 * static_cast<double>(rows);
    const double found =
        std::min(1.0, kL2Bytes / (row_bytes * static_cast<double>(std::min(columns, at_once))));
    return kRampUs + row_bytes * static_cast<double>(columns) / kDramBytesPerUs * (2 - found);
  });
}

/// What ds and dB take together. dB's thread blocks start where ds leaves SMs free, and what both
/// read of dy comes from memory once: ds on half of the SMs and dB on the others may take less than
/// one after the other on all. (8192 x 4096 and 64 ranks on an H100: 46 us for 57.)
class BesideRowSums {
 public:
  /// `cut`: of dB.
  BesideRowSums(std::int64_t rows, std::int64_t columns, int width, int sms, const ProductCut& cut)
      : rows_(rows),
        columns_(columns),
        width_(width),
        sms_(sms),
        cut_(cut),
        alone_us_(sums_us(sms)) {}
  BesideRowSums(std::int64_t rows, std::int64_t columns, int width, int sms)
      : BesideRowSums(rows, columns, width, sms, cut_rows_beside(rows, columns, width)) {}

  double operator()(double us, std::int64_t blocks) const {
    // After ds dB's start is hidden; but it finds little of dy in L2.
    const double read_us = 2.0 * static_cast<double>(rows_ * columns_) / kDramBytesPerUs;
    const double after = us + alone_us_ - 2 + read_us / 2;
    return blocks + kFewestSms > sms_ ? after
                                      : std::min(after, std::max(us, sums_us(sms_ - blocks)));
  }
  /// SMs that so many thread blocks of ds leave to all of dB; 0: dB takes too long on these.
  int free_sms(std::int64_t blocks) const {
    const std::int64_t free = sms_ - blocks;
    return free >= kFewestSms && sums_us(free) < 2 * alone_us_ + 8 ? static_cast<int>(free) : 0;
  }

 private:
  static constexpr int kFewestSms = 16;

  /// dB on so many SMs.
  double sums_us(std::int64_t on) const {
    return product_us({columns_, rows_, width_}, cut_.columns, cut_.parts, static_cast<int>(on),
                      long_step_us(cut_.columns), kLongL2BytesPerUs);
  }

  std::int64_t rows_, columns_;
  int width_, sms_;
  ProductCut cut_;
  double alone_us_;
};
/// What h takes.
struct Alone {
  double operator()(double us, std::int64_t /*blocks*/) const { return us; }
};

/// h or ds: sums over columns, cut into a power of two of parts, each some of the tree's `leaves`;
/// a kernel that adds the parts follows. `splits`: by the model that compares it with clusters that
/// share the depth; else by one fitted before, to these products alone.
template <class Total = Alone>
ProductCut cut_shrink(std::int64_t rows, std::int64_t columns, int width, int leaves, bool splits,
                      int sms, const Total& total = {}) {
  ProductCut best;
  for (const int tile : {64, 128}) {
    // A thread holds the sums of three levels of the tree, or of two.
    for (int parts = tile == 64 ? 1 : 2; parts <= leaves; parts *= 2) {
      const double partials = 4.0 * parts * static_cast<double>(rows) * width;
      const ProductSizes sizes{rows, columns, width, partials / 2};
      const double own =
          splits ? product_us(sizes, tile, parts, sms, long_step_us(tile), kLongL2BytesPerUs) +
                       3.5 + parts + partials / 5e6
                 : product_us(sizes, tile, parts, sms) + 1.5 + partials / 5e6;
      const double us = total(own, product_blocks(rows, width, tile, parts));
      if (best.us > 0 && us >= best.us) continue;
      best = {tile, parts, us};
    }
  }
  return best;
}

/// h or ds where no two thread blocks share a row's sum: rounded as it leaves the product.
template <class Total = Alone>
ProductCut cut_whole_shrink(std::int64_t rows, std::int64_t columns, int width, int sms,
                            const Total& total = {}) {
  ProductCut best;
  const double stored = 2.0 * static_cast<double>(rows) * width;
  for (const int tile : {256, 128, 64}) {
    if (tile > 64 && tile >= 2 * width) continue;
    const double own = product_us({rows, columns, width, stored}, tile, 1, sms, long_step_us(tile),
                                  kLongL2BytesPerUs);
    const double us = total(own, product_blocks(rows, width, tile, 1));
    if (best.us > 0 && us >= best.us) continue;
    best = {tile, 1, us};
  }
  return best;
}

/// The tile of a launch, of which no bit depends: 192 columns where 256 would be a quarter empty.
inline ProductCut launch_tile(ProductCut cut, int width) {
  if (cut.columns == 256 && ceil_div(width, 192) == ceil_div(width, 256)) cut.columns = 192;
  return cut;
}

/// A step of 128 rows by 64 elements of which some are dropped, by two warpgroups; and how many
/// times what its model says the stream takes with dropout, above 64 ranks. (us of h on an H100,
/// by the stream / the product / the product's model: 2048 x 4096, rank 128 31 / 23 / 22, rank 256
/// 42 / 34 / 36; 4096 x 14336, rank 128 119 / 97 / 99, rank 256 231 / 169 / 162.)
inline constexpr double kDrawUs = 0.95, kMaskedStreamTime = 1.7;

/// Leaves that a thread of the product of clusters that share the depth adds, by columns of a tile.
constexpr int most_split_leaves(int tile_columns) { return tile_columns == 128 ? 2 : 4; }

/// h or ds by that product: of a power of two of parts. `only`: columns of a tile, if not 0.
template <class Total = Alone>
ProductCut cut_split_shrink(std::int64_t rows, std::int64_t columns, int width, int leaves, int sms,
                            const Total& total = {}, int only = 0, double least_step_us = 0) {
  constexpr double kEndUs = 1.1, kEndPartUs = 0.5;  // sums from block to block
  constexpr double kSplitL2BytesPerUs = 9.2e6;      // neighbours read the same rows
  ProductCut best;
  const double bytes = 2.0 * static_cast<double>(rows) * static_cast<double>(columns + width);
  for (const int tile : {64, kHalfPartTile, 128, kWidestPartTile}) {
    if (only != 0 ? tile != only : split_rows(tile) < lora::cuda::kProductRows) continue;
    const std::int64_t tiles = std::max<std::int64_t>(split_tiles(rows, width, tile), 1);
    for (int parts = std::max(leaves / most_split_leaves(tile), 2); parts <= leaves; parts *= 2) {
      const std::int64_t at_once = std::max<std::int64_t>(clusters_at_once(parts, 1, sms), 1);
      const double busy = static_cast<double>(parts * std::min(tiles, at_once));
      const double stage_bytes = 2.0 * lora::cuda::kProductStep * (split_rows(tile) + tile);
      const double step_us = std::max({stage_bytes / kStageBytesPerUs, tile * kMmaUs,
                                       stage_bytes * busy / kSplitL2BytesPerUs, least_step_us});
      const double steps = static_cast<double>(
          ceil_div<std::int64_t>(ceil_div<std::int64_t>(columns, lora::cuda::kProductStep), parts));
      const double own = kRampUs + std::max(bytes / kDramBytesPerUs,
                                            static_cast<double>(ceil_div(tiles, at_once)) *
                                                (steps * step_us + kEndUs + kEndPartUs * parts));
      const double us = total(own, tiles * parts);
      if (best.us > 0 && us >= best.us) continue;
      best = {tile, parts, us, true, split_rows(tile)};
    }
  }
  return best;
}

/// Columns of parts of h or ds that one tile has, so that its thread blocks store what these make:
/// those of 64 ranks.
inline constexpr int kMostPartTile = kWidestPartTile;

/// h of one tile a row by `cut`, in tiles of half of the rows where these are one wave: twice as
/// many thread blocks, which send each other half as much at the end, some 16 bytes a clock. In two
/// waves b's columns, which come from L2 twice as often, cost more. (Forward on an H100, tiles of
/// 128 / 64 rows, us: rank 64, 4096 x 4096 x 4096 34.2 / 32.4, 1024 x 7168 x 2048 15.7 / 14.8, but
/// 8192 x 4096 x 14336 114.3 / 116.7.)
inline ProductCut half_tiles(ProductCut cut, std::int64_t rows, int width, int leaves, int sms) {
  constexpr int kRows = lora::cuda::kProductRows / 2;
  if (!cut.split || cut.columns > kHalfPartTile || cut.columns < width) return cut;
  const int fewest = std::max(leaves / most_split_leaves(cut.columns), 2);
  for (int parts = leaves; parts >= fewest; parts /= 2) {
    if (ceil_div<std::int64_t>(rows, kRows) > clusters_at_once(parts, 1, sms)) continue;
    cut.parts = parts;
    cut.rows = kRows;
    break;
  }
  return cut;
}

/// h or ds of so many leaves by either kernel. `splits`: clusters may share the depth.
template <class Total = Alone>
ProductCut cut_leaves(std::int64_t rows, std::int64_t columns, int width, int leaves, bool splits,
                      int sms, const Total& total = {}) {
  if (leaves == 1) return cut_whole_shrink(rows, columns, width, sms, total);
  const ProductCut apart = cut_shrink(rows, columns, width, leaves, splits, sms, total);
  if (!splits) return apart;
  const ProductCut split = cut_split_shrink(rows, columns, width, leaves, sms, total);
  return leaves == 2 || split.us <= apart.us ? split : apart;
}

/// How many leaves sums over columns have: one where tiles of the whole depth fill the device, as
/// partial sums would only cost registers, or memory and a kernel that adds them; two where twice
/// as many tiles do. (8192 x 4096 and 512 ranks on an H100: h 75 us, and 17 for its parts.) From
/// sizes alone, for the SMs of an H200, as bits follow from it. `beside`: of ds, with dB beside it.
inline int product_leaves(std::int64_t rows, std::int64_t columns, int width, bool beside,
                          int most) {
  constexpr int kSms = 132;
  if (width < kLeastProductRanks || rows < lora::cuda::kProductRows) return most;
  const auto choose = [&](const auto& total) {
    int best = most;
    double least = 0;
    for (const int leaves : {most, 2, 1}) {
      const double us = cut_leaves(rows, columns, width, leaves, true, kSms, total).us;
      if (least > 0 && us > least) continue;
      least = us;
      best = leaves;
    }
    return best;
  };
  return beside ? choose(BesideRowSums(rows, columns, width, kSms)) : choose(Alone());
}

/// Whether tiles of 256 columns of y or dx leave while the next ones are multiplied: where that
/// takes as long as what an SM lets out, some 30 KB a microsecond. (us of a forward on an H200, at
/// once / meanwhile: 8192 x 4096 x 4096, rank 512 119.2 / 114.3, 384 97.1 / 92.2, 256 75.0 / 72.0,
/// but 4096 x 5120 x 13824, rank 192 80.8 / 81.4; a backward of rank 128 93.2 / 95.9.)
inline bool defers_tile(int width) {
  constexpr double kTileUs = 2.0 * lora::cuda::kProductRows * 256 / 30e3;
  return ceil_div(width, lora::cuda::kProductStep) * 256 * kMmaUs >= kTileUs;
}

/// y or dx: sums over ranks. `arrays`: of the output's size that pass.
inline ProductCut cut_expand(std::int64_t rows, std::int64_t columns, int width, int arrays,
                             int sms) {
  ProductCut best;
  const double stored = 2.0 * arrays * static_cast<double>(rows) * static_cast<double>(columns);
  for (const int tile : {256, 128}) {
    if (arrays > 1 && tile == 256) continue;  // the base's tile is one stage more of 128 columns
    const std::int64_t depth = width + (arrays - 1) * lora::cuda::kProductStep;
    const double us = product_us({rows, depth, columns, stored}, tile, 1, sms);
    if (best.us > 0 && us >= best.us) continue;
    best = {tile, 1, us};
  }
  return best;
}

}  // namespace mortar::lora::train::cuda
