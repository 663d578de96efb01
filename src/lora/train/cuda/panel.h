// SPDX-License-Identifier: Apache-2.0
// Which panels, chunks of rows and kernels the sums over rows of LoRA training take: a pure
// function of sizes and of the shared memory of a thread block. Kernels for less of it make the
// same sums, but none of them ds: there dy is read twice.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>

#include "core/check.h"
#include "lora/train/cuda/config.h"
#include "lora/train/cuda/panel_problem.h"
#include "lora/train/cuda/panel_shapes.h"
#include "lora/train/cuda/stored_sums.h"
#include "mortar/lora.h"

namespace mortar::lora::train::cuda {

/// One such pass.
struct PanelPlan {
  int shape = 0;  ///< of kPanelShapes
  RowCut chunk;   ///< rows of a partial sum, whole stages
};

/// A thread block of whole_sums.cu has 64 columns and so many ranks. No bit depends on it. Of 8
/// three share an SM, of more two. (us of a backward of rank 8 on an H200, by 16 / 8: 512 x 4096 x
/// 14336 21.5 / 17.4; 512 x 14336 x 4096 20.8 / 17.3; 512 x 4096 x 4096 13.2 / 11.3.)
constexpr int whole_ranks(int width) { return width <= 8 ? 8 : width <= 16 ? 16 : 32; }

/// The backward of a call.
struct BackwardPlan {
  bool one_pass = false;  ///< over dy, for ds and dB; else ds is a product of its own
  /// lora/cuda/product.cu sums over rows from kLeastProductRanks on, where it takes the operands.
  bool products = false;
  /// whole_sums.cu: a thread block has all rows, and stores gradients.
  bool whole = false;
  int whole_ranks = 16;
  bool beside_ds = false;  ///< it starts beside ds, dB first: no bit depends on it
  bool together = true;    ///< dy_boxes.cu, if it takes the operands: no bit depends on it
  StoredBy stores = StoredBy::kModel;  ///< dA and dB of products: no bit depends on it
  bool boxes = true;                   ///< the same of panel_boxes.cu
  bool shares_dy = false;  ///< ds of float32 weights leaves half of the SMs to dB: the same
  /// Of dA and dx in one pass by input_boxes.cu, the same.
  DxPanels with_dx = DxPanels::kNone;
  PanelPlan dy, x;
};

inline std::string to_string(const PanelPlan& plan) {
  const PanelShape& s = kPanelShapes[plan.shape];
  return concat("ranks ", s.ranks, ", panels of ", s.columns, " columns, chunks of ",
                plan.chunk.at_once > 0 ? "at least " : "", plan.chunk.rows, " rows");
}
inline std::string to_string(const BackwardPlan& plan) {
  if (plan.whole) return "dy for ds, then for dB: all rows at once, with dA";
  return concat(plan.one_pass ? "ds and dB in one pass over dy: " : "dy for ds, then for dB: ",
                to_string(plan.dy), "; dA: ", to_string(plan.x),
                plan.products ? "; products for wide ranks" : "");
}

inline std::int64_t num_panels(const PanelProblem& p, const PanelShape& shape) {
  std::int64_t panels = 0;
  for (int i = 0; i < p.matrices; ++i) {
    panels += ceil_div<std::int64_t>(p.columns[i], shape.columns);
  }
  return panels;
}

inline constexpr double kBytesPerUs = 4.28e6;  ///< of the DRAM

/// What `chunks` of so many rows take, in microseconds.
inline double time_of(const PanelProblem& p, const PanelShape& shape, std::int64_t chunk_rows,
                      std::int64_t chunks) {
  const std::int64_t panels = num_panels(p, shape);
  const std::int64_t side_by_side = panels * ceil_div(p.width, shape.ranks);
  const std::int64_t row_bytes = shape.columns * 2;
  const std::int64_t waves = ceil_div(side_by_side * chunks, kPanelSms);
  // Chunks of several adapters are not all full.
  const std::int64_t rows = p.adapters > 0 ? p.rows : chunks * chunk_rows;
  // An SM passes little more than its share of what the DRAM does.
  const std::int64_t reading = std::max(side_by_side * rows * row_bytes,
                                        waves * kPanelSms * chunk_rows * row_bytes * 9 / 10);
  // Partials are written and read.
  const std::int64_t sums = 8 * chunks * panels * shape.columns * p.width;
  const std::int64_t ds = shape.makes_ds ? 8 * panels * p.rows * p.width : 0;
  return static_cast<double>(reading) / (kBytesPerUs * shape.rate) +
         static_cast<double>(waves) * shape.fixed_us + static_cast<double>(sums + ds) / kBytesPerUs;
}

/// A plan with its time.
struct PanelCut {
  PanelPlan plan;
  double us = -1;

  void offer(const PanelPlan& other, double other_us) {
    if (us >= 0 && other_us >= us) return;
    us = other_us;
    plan = other;
  }
};

/// How products cut these rows.
inline ProductCut product_cut(const PanelProblem& p, std::int64_t all_columns) {
  if (p.beside_product()) return cut_rows_beside(p.rows, all_columns, p.width);
  const bool alone = p.copies > 1 || p.width > kMostRanks;
  return alone ? cut_rows_alone(p.rows, all_columns, p.width, p.copies)
               : cut_rows(p.rows, all_columns, p.width);
}

/// So many chunks of rows, each a multiple of `unit`.
inline RowCut cut_evenly(std::int64_t rows, std::int64_t chunks, int unit) {
  return RowCut{static_cast<int>(round_up<std::int64_t>(
      ceil_div<std::int64_t>(std::max<std::int64_t>(rows, 1), chunks), unit))};
}

/// Chunks of one adapter's rows: one to three waves of them, or as the product cuts wide ranks.
inline void offer_chunks(const PanelProblem& p, int shape_index, PanelCut* best) {
  const PanelShape& shape = kPanelShapes[shape_index];
  if (p.by_products() && !shape.makes_ds) {
    std::int64_t all_columns = 0;
    for (int i = 0; i < p.matrices; ++i) all_columns += p.columns[i];
    const ProductCut product = product_cut(p, all_columns);
    return best->offer({shape_index, cut_evenly(p.rows, product.parts, lora::cuda::kProductStep)},
                       product.us);
  }
  const std::int64_t side_by_side =
      std::max<std::int64_t>(num_panels(p, shape) * ceil_div(p.width, shape.ranks), 1);
  for (int waves = 1; waves <= 3; ++waves) {
    const RowCut chunk =
        cut_evenly(p.rows, std::max<std::int64_t>(waves * kPanelSms / side_by_side, 1),
                   shape.rows * shape.groups);
    const std::int64_t chunks =
        std::max<std::int64_t>(ceil_div<std::int64_t>(p.rows, chunk.rows), 1);
    best->offer({shape_index, chunk}, time_of(p, shape, chunk.rows, chunks));
  }
}

/// Chunks of several adapters' rows, of which each leaves half a chunk on average. Of few adapters
/// the kernels choose the size.
inline void offer_even_chunks(const PanelProblem& p, int shape_index, PanelCut* best) {
  const PanelShape& shape = kPanelShapes[shape_index];
  const int unit = shape.rows * shape.groups;
  const std::int64_t side_by_side =
      std::max<std::int64_t>(num_panels(p, shape) * ceil_div(p.width, shape.ranks), 1);
  const double rows_of_start = shape.fixed_us * shape.rate * kSmBytesPerUs / (2 * shape.columns);
  RowCut even =
      even_cut(p.rows, p.adapters, unit, side_by_side, kPanelSms, static_cast<int>(rows_of_start));
  // Shorter chunks would leave more bytes than they read.
  even.rows = std::max(even.rows, round_up(2 * p.width, unit));
  const std::int64_t all = even_waves(p.adapters, side_by_side, kPanelSms);
  for (const std::int64_t waves :
       {std::int64_t{1}, std::int64_t{2}, ceil_div<std::int64_t>(all, 2), all}) {
    const std::int64_t chunks = waves * kPanelSms / side_by_side;
    if (2 * chunks <= p.adapters) continue;
    const std::int64_t rows = round_up<std::int64_t>(
        std::max<std::int64_t>(ceil_div(2 * p.rows, 2 * chunks - p.adapters), even.rows), unit);
    PanelPlan plan{shape_index, even};
    if (p.adapters > kMostEvenAdapters) {
      plan.chunk = RowCut{static_cast<int>(std::min<std::int64_t>(rows, kMostCutRows))};
    }
    best->offer(plan, time_of(p, shape, rows, chunks));
  }
}

/// The cheapest plan, with `smem` bytes of shared memory, that makes ds or does not; of time -1 if
/// no shape is wide enough.
inline PanelCut choose_panels(const PanelProblem& p, bool makes_ds, int smem) {
  PanelCut best;
  for (int i = 0; i < static_cast<int>(kPanelShapes.size()); ++i) {
    const PanelShape& shape = kPanelShapes[i];
    if (shape.makes_ds != makes_ds || panel_smem(shape) > smem) continue;
    const bool too_wide = shape.ranks > 16 && shape.ranks >= 2 * p.width;
    if (shape.ranks < p.width && (makes_ds || shape.ranks < kMostRanks)) continue;
    // Wide ranks have one chain over a chunk's rows.
    const bool one_chain = shape.ranks == kMostRanks && shape.groups == 1;
    if (p.adapters > 0) {
      if (p.by_products()) {
        if (one_chain) best.offer({i, segment_chunks(p)}, 0);
      } else if (!too_wide) {
        offer_even_chunks(p, i, &best);
      }
      continue;
    }
    if (!makes_ds && p.by_products() != one_chain) continue;
    if (too_wide && !one_chain) continue;
    offer_chunks(p, i, &best);
  }
  return best;
}

/// Whether dA and dB come from thread blocks that have all rows (whole_sums.cu): of few rows, as a
/// launch that adds partials costs more than what these take longer. Wide ranks take more of a
/// thread block, and are read for again above 32. Of more rows, dy that is much wider than x is
/// better read once, for ds and dB. (us of a backward, without / with: on an H100, 2048 x 4096 x
/// 4096 and 2048 x 2048 x 8192, rank 16, 36.6 / 31.3 and 36.4 / 40.0; 4096 x 4096 x 4096, rank 16,
/// 57.5 / 62.8; on an H200, rank 32, 1024 x 4096 x 4096 20.9 / 19.9, 1536 rows 25.6 / 25.9; rank
/// 24, 1536 x 3584 x 3584 25.6 / 29.2; rank 64, 512 x 4096 x 4096 16.9 / 17.6, 768 rows 18.3 /
/// 20.9.)
inline bool sums_whole(const PanelProblem& dy, const PanelProblem& x) {
  constexpr std::int64_t kMostElements = 20 << 20, kMostOfWide = 7 << 20, kFewRows = 1024;
  const int width = std::max(dy.width, x.width);
  const std::int64_t most_rows = width <= 16 ? 2048 : width <= 32 ? 1024 : width <= 64 ? 256 : 0;
  if (x.rows == 0 || x.rows > most_rows || x.adapters > 0) return false;
  std::int64_t dy_columns = 0;
  for (int i = 0; i < dy.matrices; ++i) dy_columns += dy.columns[i];
  if (x.rows > kFewRows && dy_columns > 2 * x.columns[0]) return false;
  return x.rows * (dy_columns + x.columns[0]) <= (width <= 32 ? kMostElements : kMostOfWide);
}

/// Whether thread blocks of such panels of x, as many as SMs at most, leave few SMs idle.
constexpr bool fills_with_dx(DxPanels panels, std::int64_t blocks, std::int64_t chunks,
                             std::int64_t sms) {
  if (blocks > sms) return false;
  if (panels == DxPanels::k128) return chunks > 1 && 6 * blocks >= 5 * sms;
  return 8 * blocks >= 7 * sms;
}

/// Whether dx comes in the pass over x for dA (input_boxes.cu), beside which it costs little, and
/// in what panels. Of several adapters these have 256 columns, which are up to 32 ranks. So have
/// those of one adapter up to 16, with dropout 32; its thread blocks have an SM each: where a
/// seventh of these would have none, dx apart has all. Of more ranks chunks are those of products,
/// which have half as many thread blocks of 128 columns as there are SMs: so panels have 64, with
/// an SM each. Where these are too many, of up to 48 ranks they have 128, and of more 64, two an
/// SM, if x and dx fit L2. (us of a backward on an H200, apart / 64 / 64 in pairs / 128: rank 64,
/// 4096 x 4096 x 4096 48.5 / 41.1 / 45.5 / 47.1; 8192 x 4096 x 14336 170 / 163 / 167 / 169; 1024 x
/// 7168 x 2048 - / 26.4 / 22.8 / 24.3; rank 32, 4096 x 8192 x 1024 58.0 / 53.1 / 54.5 / 52.1; 2048
/// x 5120 x 13824 - / 57.9 / 55.5 / 54.1; rank 24, 6001 x 3584 x 18944 124.8 / 124.8 / 124.1 /
/// 117.3; 12345 x 2560 x 2560 86.2 / 90.8 / 99.2 / 86.6. On an H100, apart / in one pass: rank 16,
/// 8192 x 14336 x 4096, 112 thread blocks, 216 / 220.)
inline DxPanels dx_panels(const PanelProblem& x, const PanelPlan& plan, int sms, std::int64_t l2) {
  using enum DxPanels;
  if (x.width > kPanelShapes[plan.shape].ranks) return kNone;
  const bool wide_panels = plan.shape == kInputPanels || plan.shape == kInputPanels32;
  if (x.adapters > 0) return wide_panels ? k256 : segments_with_dx(x) ? k64 : kNone;
  const std::int64_t chunks = ceil_div<std::int64_t>(x.rows, plan.chunk.rows);
  const auto blocks = [&](DxPanels panels) {
    return ceil_div<std::int64_t>(x.columns[0], dx_columns(panels)) * chunks;
  };
  const auto fills = [&](DxPanels panels) { return 8 * blocks(panels) >= std::int64_t{7} * sms; };
  // Those of choose_input have been found to fill the SMs.
  if (wide_panels) return x.by_products() || fills(k256) ? k256 : kNone;
  if (plan.shape != kChainPanels) return kNone;
  const bool fits_l2 = 4 * x.rows * x.columns[0] <= l2;
  if (blocks(k64) <= sms) return fits_l2 || fills(k64) ? k64 : kNone;
  if (x.width <= 48) return k128;
  if (fits_l2) return k64Pairs;
  return fills_with_dx(k128, blocks(k128), chunks, sms) ? k128 : kNone;
}

/// Whether these start beside ds, where dB is most of the work: thread blocks of dA then wait for
/// the end of dx, not beside it. (us of a backward on an H200, beside dx / ds: rank 8, 512 x 4096 x
/// 14336 17.4 / 16.7, 1024 x 4096 x 14336 26.9 / 25.4; rank 16 19.4 / 17.8, 28.4 / 25.6, but 512 x
/// 4096 x 4096 11.8 / 12.5, 1500 x 5120 x 5120 22.8 / 23.7.)
inline bool starts_beside_ds(const PanelProblem& dy, const PanelProblem& x) {
  std::int64_t dy_columns = 0;
  for (int i = 0; i < dy.matrices; ++i) dy_columns += dy.columns[i];
  return dy_columns >= 2 * x.columns[0];
}

/// The plan with which they do.
inline BackwardPlan whole_plan(std::int64_t rows, int ranks, bool beside_ds) {
  BackwardPlan plan;
  plan.whole = true;
  plan.whole_ranks = ranks;
  plan.beside_ds = beside_ds;
  plan.dy.chunk = plan.x.chunk = RowCut{static_cast<int>(rows)};
  return plan;
}

/// The same of one adapter where products would sum over rows, which is up to 32 ranks: dy that
/// comes once, by panel_boxes.cu, saves half of the time that it takes from memory and more, and
/// each chunk of rows costs its partials. (us of a backward on an H200, two passes / one: rank 24,
/// 12345 x 2560 x 2560 84.7 / 74.2; 4096 x 4096 x 4096 51.8 / 45.9; 4096 x 4096 x 2048 43.1 / 42.1;
/// 8192 x 4096 x 1024 69.3 / 71.3; rank 32, 2048 x 5120 x 13824 54.0 / 47.6; 8192 x 4096 x 14336
/// 164 / 135; 4096 x 4096 x 4096 49.0 / 44.4; 20000 x 1024 x 1024 58.1 / 58.5; 4096 x 8192 x 1024
/// 53.6 / 58.5.)
inline bool pays_at_once(const PanelProblem& dy, const PanelPlan& one) {
  constexpr double kChunkUs = 0.08, kLeastUs = 0.5;
  double elements = 0;
  for (int i = 0; i < dy.matrices; ++i) elements += static_cast<double>(dy.rows * dy.columns[i]);
  const auto chunks = static_cast<double>(ceil_div<std::int64_t>(dy.rows, one.chunk.rows));
  return elements / kBytesPerUs > kChunkUs * chunks + kLeastUs;
}

/// Chunks of more than 32 ranks with dx: by panels of 64 columns, or of 128, an SM for each thread
/// block; 0: these are too short, or leave too many SMs idle. (us of a backward on an H200, rank
/// 64, by chunks for products / by these: 8192 x 2560 x 2560 53.8 / 49.1, 8192 x 3072 x 3072 62.7 /
/// 59.5, 4096 x 5120 x 5120 57.0 / 52.8, 8192 x 5120 x 13824 160.7 / 158.1; but of 195 rows, 777 x
/// 3584 x 3584 17.3 / 19.0.)
inline int chunks_with_dx(const PanelProblem& x) {
  constexpr std::int64_t kFewestRows = 512;
  for (const DxPanels panels : {DxPanels::k64, DxPanels::k128}) {
    const std::int64_t wide = ceil_div<std::int64_t>(x.columns[0], dx_columns(panels));
    const std::int64_t chunks = std::min(kPanelSms / wide, x.rows / kFewestRows);
    if (chunks > 0 && fills_with_dx(panels, chunks * wide, chunks, kPanelSms)) {
      return static_cast<int>(chunks);
    }
  }
  return 0;
}

/// The sums of x. Of 17 to 32 ranks with dx where products would have a chunk in one chain: panels
/// of 256 columns, in which a row's piece is four times as long, if these fill the SMs with chunks
/// that are not short. (us of a backward on an H200, one chain / these: rank 24, 4096 x 8192 x 2048
/// 70.3 / 61.5, 4096 x 4096 x 4096 46.1 / 43.3, 8192 x 3584 x 3584 71.6 / 68.9; rank 32, 10000 x
/// 1536 x 8960 98.5 / 93.1, 6001 x 2048 x 6144 55.1 / 52.3; but with chunks of 128 rows, 2048 x
/// 2048 x 8192 29.2 / 29.6, and with four of five SMs at work 2048 x 5120 x 13824 46.6 / 47.3.)
inline PanelPlan choose_input(const PanelProblem& x, int smem) {
  constexpr int kFewestRows = 256;
  PanelPlan chain = choose_panels(x, false, smem).plan;
  if (segments_with_dx(x)) chain.chunk = dx_chunks(x);
  const int ranks = kPanelShapes[kInputPanels32].ranks;
  if (!x.with_dx || x.adapters > 0 || !x.by_products() || x.width > kMostRanks) return chain;
  if (x.width > ranks) {
    const int chunks = chunks_with_dx(x);
    if (chunks > 0) chain.chunk = cut_evenly(x.rows, chunks, lora::cuda::kProductStep);
    return chain;
  }
  PanelProblem wide = x;
  wide.products = false;
  const PanelPlan plan = choose_panels(wide, false, smem).plan;
  const std::int64_t panels =
      ceil_div<std::int64_t>(x.columns[0], kPanelShapes[plan.shape].columns);
  const bool fills = 100 * panels * x.rows >= 82 * kPanelSms * plan.chunk.rows;
  return plan.chunk.rows >= kFewestRows && fills ? plan : chain;
}

/// One pass over dy if its partials cost less than reading dy again. `needs_ds`: ds is wanted; that
/// dB is too is taken for granted, as the bits of ds follow from the choice.
inline BackwardPlan choose_backward(const PanelProblem& dy, const PanelProblem& x, bool needs_ds,
                                    int smem) {
  BackwardPlan plan;
  plan.x = choose_input(x, smem);
  const PanelCut two = choose_panels(dy, false, smem);
  plan.dy = two.plan;
  if (!needs_ds) return plan;
  const PanelCut one = choose_panels(dy, true, smem);
  if (one.us < 0) return plan;
  // Shrink reads dy at this share of the DRAM's rate, and takes so long before and after.
  constexpr double kShrinkRate = 0.65, kShrinkUs = 5;
  double shrink = 0;
  for (int i = 0; i < dy.matrices; ++i) {
    shrink +=
        static_cast<double>(2 * dy.rows * dy.columns[i]) / (kBytesPerUs * kShrinkRate) + kShrinkUs;
  }
  // The partials of ds are added by a launch of their own.
  constexpr double kSumUs = 2;
  if (dy.adapters == 0 && dy.by_products() ? pays_at_once(dy, one.plan)
                                           : one.us + kSumUs < two.us + shrink) {
    plan.one_pass = true;
    plan.dy = one.plan;
  }
  return plan;
}

}  // namespace mortar::lora::train::cuda
