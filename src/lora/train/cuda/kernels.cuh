// SPDX-License-Identifier: Apache-2.0
// The kernels of LoRA training, as functions that launch them.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <atomic>

#include "core/check.h"
#include "device/launch.cuh"
#include "lora/train/cuda/grad_sum.h"
#include "lora/train/cuda/params.cuh"
#include "lora/train/cuda/tiles.cuh"
#include "mortar/stream.h"

namespace mortar::lora::train::cuda {

/// On the current device all of an SM's memory is shared memory while kKernel runs. Kernels that
/// follow each other so need no new split of it, which waits until an SM is empty.
template <auto kKernel>
void prefer_shared() {
  static std::array<std::atomic<bool>, device::kMaxDevices> done{};
  std::atomic<bool>& own = done[device::current_device().index];
  if (own.load(std::memory_order_relaxed)) return;
  device::cuda_check(cudaFuncSetAttribute(kKernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                          cudaSharedmemCarveoutMaxShared),
                     "lora_train");
  own.store(true, std::memory_order_relaxed);
}

/// Whether a launch's own parameters say which rows and weights a thread block has: it may then
/// look them up, and ask for its first lines in L2, before it waits for the kernels before it.
inline bool looks_ahead(const PairTable& pairs, const RowGroups& rows) {
  return pairs.entries == nullptr && rows.offsets == nullptr && rows.groups == nullptr;
}

/// Which weights a product takes: A [r, K], or B^T [r, N].
enum class Side { kA, kB };

/// How the weights of all pairs lie, as [r, wide].
struct WeightLayout {
  /// Rows of ranks, dense along the wide dimension; else rows along it, dense in the ranks.
  bool rows_are_ranks;
  bool async, vectors;
  int parts;
};

/// h[row, j] = factor * sum over c of wide[row, c] W[j, c], for the columns of h from `first_slice`
/// on (one slice, or all of them), rounded; zeros past a rank and for base rows. Unless the plan is
/// fused: partials[part][position][j], the sums over the leaves of a part, instead.
struct ShrinkParams {
  PairTable pairs;
  RowGroups rows;
  Fetch wide;
  MaskParams mask;
  bool masked;
  Side side;
  int first_slice, num_slices;
  HiddenColumns hidden;
  int first_hidden, width;  ///< columns of h that this launch makes
  WeightLayout weights;
  std::int64_t columns;
  ShrinkPlan plan;
  int part_leaves;  ///< leaves of a part
  std::int64_t max_tiles;
  void* h;          ///< [M, hidden.width]
  float* partials;  ///< [parts][M][hidden.width]
  bool ahead;       ///< looks_ahead(), and nothing is dropped
  /// Of weights as columns of parts that a product makes h of: h's own columns of parts, and h
  /// itself, where they are wanted; ranks of the pairs as the caller gave them.
  void *sum_columns, *pair_columns;
  int copies;  ///< columns of a rank
  int ranks[kOwnPairs];
};
void shrink(const ShrinkParams& p, Policy policy, Stream stream);
void shrink_stream(const ShrinkParams& p, Policy policy, Stream stream);
/// The same for dense float32 rows without dropout, where the plan says so, or h itself if it is
/// fused; false for any other, and where shared memory is short.
bool shrink_float(const ShrinkParams& p, Stream stream);
/// Whether lora/cuda/product.cu takes the operands, whatever the plan is.
bool takes_products(const ShrinkParams& p, Policy policy);
void shrink_products(const ShrinkParams& p, Policy policy, Stream stream);

/// h[row, j] = factor * (sum of the parts), rounded; zeros past a rank and for base rows.
struct HiddenParams {
  PairTable pairs;
  RowGroups rows;
  HiddenColumns hidden;
  int first_slice, num_slices, first_hidden, width;
  int parts;
  const float* partials;
  void* h;
  DType dtype;  ///< of the weights
  int rows_of_block;
  std::int64_t max_tiles;
  bool early;  ///< y's kernel is launched at once; the one before has waited for all before it
  // For float32 weights alone. All but h's values may be left out, and h where these suffice.
  int copies;                        ///< columns of partials for a rank: 1 or kSumCopies
  const float* given;                ///< h itself, in place of partials
  void *sum_columns, *pair_columns;  ///< kSumCopies or kPairCopies columns of parts for a rank
};
void reduce_hidden(const HiddenParams& p, Stream stream);

/// out[row, c] = base[row, c] + mask * sum_j h[row, j] W[j, c], over slices from first_slice on.
struct ExpandParams {
  PairTable pairs;
  RowGroups rows;
  Fetch h;
  HiddenColumns hidden;
  Side side;
  int first_slice, num_slices, first_hidden, width;
  WeightLayout weights;
  std::int64_t columns;
  ExpandPlan plan;
  Matrix base, out;       ///< base null: nothing is added
  bool pairs_of_columns;  ///< two neighbouring columns of out and base move as one
  /// Out and base have the weights' type and rows of whole 16-byte vectors; 8 elements of a vector
  /// are one group of dropout.
  bool vectors;
  /// Whole vectors of neighbouring rows, without a base and without dropout.
  bool plain;
  MaskParams mask;
  bool masked;
  std::int64_t max_tiles;
  bool ahead;  ///< looks_ahead(); expand_float.cu alone
  bool lean;   ///< expand_stream.cu: all columns in vectors, and nothing is added
  /// expand_stream.cu lets its successor start before its own wait: that one reads what the kernel
  /// before this one writes only after a wait of its own.
  bool starts_next;
  GradSum beside;  ///< dB's, that the product of dx adds beside it
};
void expand(const ExpandParams& p, Stream stream);
/// The same for dense float32 h, weights, base and output of one adapter and one slice; false for
/// any other.
bool expand_float(const ExpandParams& p, Stream stream);
void expand_stream(const ExpandParams& p, Policy policy, Stream stream);
void expand_wide(const ExpandParams& p, Policy policy, Stream stream);
/// Of float32 weights beside a plain bfloat16 output, rows of one adapter, h in float32.
void expand_parts(const ExpandParams& p, Stream stream);
bool takes_products(const ExpandParams& p, Policy policy);
void expand_products(const ExpandParams& p, Policy policy, Stream stream);

/// The partial of (tile, j, c) is the sum over the rows of a chunk of s[row, first_hidden + j]
/// wide[row, c], for operands as sums of bfloat16 parts; partials lie as GradSums says.
struct OuterParams {
  PairTable pairs;
  RowGroups rows;
  Fetch wide, s;
  MaskParams mask;
  bool masked;
  int first_hidden, width;  ///< columns of s
  std::int64_t columns;
  int chunk_rows, ranks;
  std::int64_t max_tiles;
  Side side;
  float* partials;
  bool early;  ///< PanelParams'; outer_float.cu alone
};
void outer(const OuterParams& p, Stream stream);
/// The same for dense float32 rows without dropout; false for any other.
bool outer_float(const OuterParams& p, Stream stream);

/// One matrix of a pass of panel.cu or whole_sums.cu: x, or dy of a slice.
struct PanelOperand {
  Matrix wide;
  bool async;  ///< copies_async()
  int slice;   ///< the first; its B makes ds
  int num_slices;
  std::int64_t columns, mask_first;
  int first_panel, panels;
  int first_hidden, width;  ///< columns of s
  float* sums;              ///< partials, as GradSums has them; null: ds alone is wanted
  // For whole_sums.cu, whose operands may be of both sides: what others share or look up.
  Side side;
  const void* s;
  std::int64_t mask_columns;
  const std::int64_t* rng;
  std::uint32_t threshold;  ///< of dropout; 0: none of the operand
  int live;                 ///< columns of s up to the last one that has a gradient
};

/// Sums over the rows of each chunk of s[row, j] wide[row, c], for operands of one 16-bit type; and
/// ds[row, j] = sum over the columns of each panel of wide[row, c] B[c, j].
struct PanelParams {
  PairTable pairs;
  RowGroups rows;
  PanelOperand operands[kLoraMaxSlices + 1];
  int num_operands;
  const void* s;  ///< h or ds: dense [M, hidden_width]
  int hidden_width;
  HiddenColumns hidden;  ///< of one column for a rank
  int copies;            ///< columns for a rank, whose sums are added before they leave
  Side side;
  MaskParams mask;
  bool masked;
  int shape;          ///< of kPanelShapes
  int groups;         ///< of rank columns, thread blocks of one panel that share it in L2
  int group_columns;  ///< whole_octets() of the shape's
  RowCut chunk;
  std::int64_t max_tiles;
  /// Starts while the kernel before it runs, which has waited for all before it and writes nothing
  /// that is read here; and waits for that one before it stores, or, as a product, before it ends.
  /// Not if it makes ds.
  bool early;
  /// SMs that an early product takes, as the kernel before it leaves so many free for all its time;
  /// 0: all. Work is dealt out when it starts: to all SMs, half of it would wait for that kernel.
  int free_sms;
  bool beside_ds;  ///< whole_sums.cu: BackwardPlan's; the kernel before it has not waited for ds
  float* ds;       ///< partials, [panel of the operand][M][hidden_width]
  bool ahead;      ///< looks_ahead(), and nothing is dropped; not if it is early
};
void panels(const PanelParams& p, Stream stream);
/// The same sums over all rows of one adapter, stored as gradients: no partials, and no ds.
/// Operands of both sides may come together.
/// `ranks`: rank columns of a thread block, 8, 16 or 32.
void whole_sums(const PanelParams& p, int ranks, bool drops, Stream stream);
bool takes_products(const PanelParams& p, Policy policy);

/// ds[row, j] = factor * (the panels' partials in order), rounded; zeros past a rank and for base
/// rows.
struct DsParams {
  PairTable pairs;
  RowGroups rows;
  HiddenColumns hidden;
  int panels[kLoraMaxSlices];  ///< of each slice; 0: not made by panels
  const float* partials;       ///< [panel][M][hidden.width]
  void* ds;
  DType dtype;
  int parts;       ///< threads that share a sum: 1 or kDsParts
  int few_panels;  ///< that one thread adds
  int rows_of_block;
  std::int64_t max_tiles;
};
/// Threads that share the panels of a sum of ds, a quarter each, where these are more than one
/// thread has in flight, or twice as many of up to 16 ranks, beside which dA's thread blocks find
/// room if these are few; and the most sums of such a call: more fill the device without. (us of a
/// backward on an H200, one / four: 2048 x 5120 x 13824, rank 32, 48.4 / 46.7; 4096 x 1024 x 28672,
/// rank 16, 91.8 / 87.0; but 8192 x 6144 x 5120, rank 32, 98.8 / 102.0; 8192 x 3072 x 8192, rank 8,
/// 75.7 / 78.5.)
inline constexpr int kDsParts = 4, kFewPanels = 8;
inline constexpr std::int64_t kMostSharedSums = 96 << 10;
void sum_ds(const DsParams& p, Stream stream);

/// One matrix of partial sums over chunks of rows, laid out as its gradients mostly are: dA's
/// columns neighbour each other, and dB's ranks.
struct GradSums {
  Side side;
  int first_slice, num_slices, first_hidden, width;
  std::int64_t columns;
  RowCut chunk;
  /// [tile][width][grad_stride(columns)] for dA, [tile][columns][width]
  const float* partials;
};
/// Columns of partials of dA, whole vectors of four.
MORTAR_HOST_DEVICE constexpr std::int64_t grad_stride(std::int64_t columns) {
  return round_up<std::int64_t>(columns, 4);
}

/// Those of one adapter, of `chunks` tiles from `first` on, whose ranks begin at rank `column`;
/// without partials if it has no gradient.
MORTAR_HOST_DEVICE constexpr GradSum grad_sum_of(const PairEntry& pair, const GradSums& g,
                                                 int first, int chunks, int column = 0) {
  GradSum to;
  to.of_a = g.side == Side::kA;
  to.out = pair.grad(to.of_a);
  if (g.partials == nullptr || to.out.data == nullptr || pair.rank == 0) return to;
  to.dense = to.of_a ? static_cast<int>(grad_stride(g.columns)) : g.width;
  to.stride = std::int64_t{to.dense} * (to.of_a ? g.width : g.columns);
  to.partials = g.partials + first * to.stride + std::int64_t{column} * (to.of_a ? to.dense : 1);
  to.columns = g.columns;
  to.chunks = chunks;
  to.ranks = pair.rank;
  to.adds = (pair.adds >> (to.of_a ? 0 : 1) & 1) != 0;
  return to;
}

/// dA and dB: partials in order, added to what is there if asked.
struct WeightGradParams {
  PairTable pairs;
  RowGroups rows;
  HiddenColumns hidden;
  GradSums sums[kLoraMaxSlices + 1];
  unsigned first_block[kLoraMaxSlices + 2];
  int num_sums = 0;
  int num_adapters;
};
void sum_weight_grads(WeightGradParams* p, Stream stream);

/// Writes up to kUploadEntries entries of the table of pairs into the workspace.
inline constexpr int kUploadEntries = 16;
struct UploadParams {
  PairEntry* to;
  int count;
  PairEntry entries[kUploadEntries];
};
void upload(const UploadParams& p, Stream stream);

/// The problem that other kernels are given: without adapters whose delta is dropped whole.
Problem without_dropped(const Problem& p);
/// Whether all adapters are such; then the next two do everything.
bool drops_all(const Problem& p);
void forward_dropped(const Problem& p, Stream stream);
/// Of the adapters that are.
void backward_dropped(const Problem& p, Stream stream);

}  // namespace mortar::lora::train::cuda
