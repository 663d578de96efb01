// SPDX-License-Identifier: Apache-2.0
// Multi-LoRA: y[t] (+)= scale_a * (x[t] A_a^T) B_a^T, where a is token t's own adapter.
//
// Dimensions: M tokens, L adapters, S slices that share x (q/k/v, gate/up), K hidden size in,
// N_s hidden size out of slice s, R rank. All strides are in elements, those of rows 0 or more.
//
// The method is that of Punica (arXiv:2310.18547) and S-LoRA (arXiv:2311.03285): group the
// tokens of a batch by adapter once per step, then *shrink* (x A^T) and *expand* (h B^T) every
// layer with that grouping.
//
// No op allocates, synchronises, copies or casts behind the caller's back. Every op takes its
// outputs and its workspace from the caller, checks all arguments before it writes anything and
// throws mortar::Error. Results are bitwise repeatable and batch-invariant: a token's result
// depends on its own row and its adapter only (docs/numerics.md).
//
// On CUDA the ops but lora_plan may read weights (with ranks, scales and table) and groups while
// kernels before the call still run, if these let it start early (programmatic dependent launch).
// What writes them must lie before lora_plan in the stream, or before another kernel that is
// launched without programmatic dependent launch, as all of PyTorch's are: one kernel in between
// suffices. With segments this holds only inside a captured graph, for what the graph itself
// writes.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>

#include "mortar/stream.h"
#include "mortar/tensor.h"

namespace mortar {

inline constexpr int kLoraMaxSlices = 8;
inline constexpr int kLoraMaxRank = 512;
inline constexpr std::int64_t kLoraMaxAdapters = 4096;
inline constexpr std::int64_t kLoraMaxTokens = 1 << 20;

/// One (adapter, slice) of a device table: 32 bytes, so that one memory sector holds it.
/// rank 0, or a pointer that is null or not 16-byte aligned, means that the adapter leaves this
/// slice alone.
struct LoraTableEntry {
  std::uint64_t a;    ///< address of A, dense [rank, K]
  std::uint64_t b;    ///< address of B, dense [N_s, rank]
  std::int32_t rank;  ///< 0 .. kLoraMaxRank; a larger or negative rank is treated as 0
  float scale;        ///< multiplies this adapter's delta
  std::uint64_t unused;
};
static_assert(sizeof(LoraTableEntry) == 32);

/// The adapter weights of one layer, in one of two forms.
///
/// Stacked: a[s] is [L, R_s, K] and b[s] is [L, N_s, R_s], last dimension dense, any other
/// strides (a and b may have the rank of one slice padded to R_s). `ranks` (int32 [L], optional)
/// holds each adapter's own rank, <= R_s for every slice: rows past it are never read. `scales`
/// (float32 [L], optional) multiplies each adapter's delta; 1 when absent.
/// Table: `table` is int64 [L, S, 4], the rows of LoraTableEntry, 16-byte aligned.
/// Both live on the device of x.
struct LoraWeights {
  int num_slices = 0;
  std::array<Tensor, kLoraMaxSlices> a, b;
  Tensor ranks;
  Tensor scales;
  Tensor table;
  DType dtype = DType::kFloat32;                      ///< of the table's pointees
  int max_rank = 0;                                   ///< largest rank of any (adapter, slice)
  std::int64_t num_adapters = 0;                      ///< L
  std::int64_t hidden = 0;                            ///< K
  std::array<std::int64_t, kLoraMaxSlices> widths{};  ///< N_s

  /// Throws unless 1 <= a.size() <= 8, a.size() == b.size() and the shapes agree. For a shrink
  /// alone leave b empty; for an expand alone leave a empty.
  static LoraWeights stacked(std::span<const Tensor> a, std::span<const Tensor> b,
                             const Tensor& ranks = {}, const Tensor& scales = {});
  /// `max_rank` bounds every rank in the table: entries above it are treated as rank 0.
  static LoraWeights from_table(const Tensor& table, DType dtype, int max_rank, std::int64_t hidden,
                                std::span<const std::int64_t> widths);
};

/// A grouping of the batch's tokens by adapter, on the device, in one of two forms.
///
/// Plan: made by lora_plan. Segments: four int32 tensors in the manner of vLLM's LoRA kernel
/// metadata: group g is adapter `ids[g]` (skipped if not in [0, L)) and owns the tokens
/// sorted_tokens[starts[g] .. starts[g] + counts[g]). No adapter has more than one group, and no
/// token is in two: what a grid sized for such groups cannot hold is left out. Entries of
/// sorted_tokens that no group owns are never read; ids, counts have G entries, starts at least G.
struct LoraGroups {
  Tensor plan;
  std::int64_t num_tokens = 0, num_adapters = 0;  ///< M and L that the plan was made for
  Tensor sorted_tokens, ids, counts, starts;

  /// A plan that lora_plan has made, or will have made, of so many tokens and adapters. It may be
  /// larger than they need. The ops refuse other sizes than their own; a plan that holds others
  /// than said here they refuse on the CPU, and on CUDA, where nothing is read back, they leave
  /// their outputs untouched.
  static LoraGroups from_plan(const Tensor& plan, std::int64_t num_tokens,
                              std::int64_t num_adapters);
  static LoraGroups from_segments(const Tensor& sorted_tokens, const Tensor& ids,
                                  const Tensor& counts, const Tensor& starts);
};

/// Number of int32 elements of a plan for up to `num_tokens` tokens and `num_adapters` adapters.
std::int64_t lora_plan_size(std::int64_t num_tokens, std::int64_t num_adapters);

/// Groups tokens by adapter, stably, in one launch.
///
/// token_adapter: int32 or int64 [M], dense; -1 is a base token, and any id outside [0, L) is
///   treated as one (and counted for lora_plan_report). plan: int32 [>= lora_plan_size(M, L)],
///   dense, 16-byte aligned, written whole. M <= kLoraMaxTokens, L <= kLoraMaxAdapters.
/// A captured CUDA graph may be replayed after token_adapter has changed.
void lora_plan(const Tensor& token_adapter, std::int64_t num_adapters, const Tensor& plan,
               Stream stream);

/// What lora_plan saw. Reading it waits for the stream: a debugging aid, not for the hot path.
struct LoraPlanReport {
  std::int64_t num_tokens = 0;           ///< M
  std::int64_t num_adapters = 0;         ///< L
  std::int64_t num_active = 0;           ///< tokens with an adapter
  std::int64_t num_groups = 0;           ///< distinct adapters among them
  std::int64_t num_out_of_range = 0;     ///< ids outside [-1, L)
  std::int64_t first_out_of_range = -1;  ///< the first such token, -1 if none
};
LoraPlanReport lora_plan_report(const Tensor& plan, Stream stream);

/// h[s, t, :rank] = scale * scale_a * (x[t] A_{a,s}^T).
///
/// x: [M, K] float32/float16/bfloat16. weights: `a` of any of these dtypes. h: [S, M, R] with
/// R >= max_rank, float32 or the dtype of x, last dimension dense. Columns past an adapter's rank
/// are written as zero. Rows of base tokens are left untouched, unless `zero_rows` is given:
/// int32 or int64 [M], rows whose entry lies outside [0, L) are then written as zero.
/// workspace: uint8 [>= lora_shrink_workspace(...)], 16-byte aligned; for lora_apply as well never
/// over twice h in float32, ranks by 8, and 16 MB (24 MB with float32 weights under a bfloat16 x).
void lora_shrink(const Tensor& x, const LoraWeights& weights, const LoraGroups& groups,
                 const Tensor& h, float scale, const Tensor& zero_rows, const Tensor& workspace,
                 Stream stream);
std::int64_t lora_shrink_workspace(const Tensor& x, const LoraWeights& weights);

/// y[t, offset_s : offset_s + N_s] (+)= h[s, t, :rank] B_{a,s}^T, offset_s = offset + N_0 + ... .
///
/// h: [S, M, R], float32/float16/bfloat16. weights: `b`. y: [M, N >= offset + sum N_s],
/// float32/float16/bfloat16, last dimension dense. h is rounded to the dtype of B first when B is
/// 16-bit and y has the same dtype; the product is summed in float32. add_inputs: add to y
/// (in float32, rounded once), else overwrite. Rows of base tokens are left untouched.
/// The adapters' own scales are not applied again: lora_shrink has done so.
void lora_expand(const Tensor& h, const LoraWeights& weights, const LoraGroups& groups,
                 const Tensor& y, std::int64_t offset, bool add_inputs, Stream stream);

/// lora_shrink and lora_expand in one call; h stays in the workspace. y must not overlap x or the
/// workspace. Scales multiply the finished sums over the rank, in float32: an h that is rounded to
/// 16 bits on the way has none in it.
void lora_apply(const Tensor& x, const LoraWeights& weights, const LoraGroups& groups,
                const Tensor& y, std::int64_t offset, float scale, bool add_inputs,
                const Tensor& workspace, Stream stream);
std::int64_t lora_apply_workspace(const Tensor& x, const LoraWeights& weights);

/// The kernels that lora_apply would run for such arguments, with their shapes and the bytes of
/// workspace that they use, as one line of text. Launches nothing. With MORTAR_LOG=launch in the
/// environment every call of the three ops on CUDA writes its own to stderr.
std::string lora_launch_plan(const Tensor& x, const LoraWeights& weights, const Tensor& y,
                             std::int64_t offset);

/// Fewest bytes that lora_apply can move for `num_tokens` tokens that have an adapter and
/// adapters in use of the given total rank x (K + N_s) elements; what the benchmarks divide by.
struct LoraTraffic {
  std::int64_t weight_bytes = 0;
  std::int64_t x_bytes = 0;
  std::int64_t y_bytes = 0;
  std::int64_t flops = 0;
  std::int64_t bytes() const { return weight_bytes + x_bytes + y_bytes; }
};
/// `ranks[a * S + s]` for the adapters in use, `tokens[a]` their token counts.
LoraTraffic lora_traffic(std::int64_t hidden, std::span<const std::int64_t> widths,
                         std::span<const int> ranks, std::span<const std::int64_t> tokens,
                         DType activation, DType weight, bool add_inputs);

}  // namespace mortar
