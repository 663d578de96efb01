// SPDX-License-Identifier: Apache-2.0
// y (+)= h B^T for ranks above 128, on the warpgroup tensor cores of sm_90a, B, h and y of one
// 16-bit type.
//
// y[t, n] (+)= sum_r h[s, t, r] B_{a(t), s}[n, r]        N hidden out, r rank
// bytes  = 4 M sum_s N_s (y read and written) + 2 sum_a sum_s r N_s (B of adapters in use) + h; of
//          h and B from L2, for tiles of 128 tokens by 128 columns: 4 r M N / 128
// FLOP   = 2 M N r
// 2048 tokens of one adapter, qkv, r256: 57 MB -> 13 us of DRAM, 6.4 GFLOP -> 10 us
// limit  : L2, which a tile of 128 by 128 asks for 32 KB per 2 MFLOP
// wrong  : lower ranks, where y is nearly all of the work: expand_prefill.cu keeps it in flight
//
// A CTA takes one or two tiles of 64 tokens of one adapter, a warpgroup each, and 128 columns. A
// further warpgroup streams ranks through a ring of stages, 64 of them in the swizzle that wgmma
// reads: with cp.async, or one of its threads asks the tensor copy engine for boxes, which starts
// sooner but has h wait behind B of all CTAs of an SM. Two CTAs fit an SM: one reads and writes y
// while the other computes; or one of two tiles, which has twice the stages. The sum is one chain
// over ranks from zero, as in the other kernels; the permutation of columns is theirs too.
#include <iterator>

#include "device/wgmma.cuh"
#include "lora/cuda/backend.cuh"
#include "lora/cuda/expand_wide.cuh"

namespace mortar::lora::cuda {
namespace {

using namespace wide_expand;

/// Other shapes are those of expand_wide_parts.cu, expand_wide_walk.cu and expand_wide_kept.cu.
/// Rows of y that are not aligned are rare, and have a kernel of one shape alone.
template <class T>
void launch_shape(int shape, const ExpandParams& p, Stream stream) {
  const bool alone = shape == kWideAloneShape;
  check(shape == 0 || ((shape == 1 || alone) && p.vector_y),
        "lora_expand: no wide kernel of shape ", shape);
  if (shape == 1) return launch_traits<Traits<T, 1, true>>(p, stream);
  if (alone) return launch_traits<Traits<T, kWideAloneShape, true>>(p, stream);
  p.vector_y ? launch_traits<Traits<T, 0, true>>(p, stream)
             : launch_traits<Traits<T, 0, false>>(p, stream);
}

}  // namespace

void expand_wide(const ExpandParams& p, const ExpandPlan& c, Stream stream) {
  check(!p.h.raw && p.tiles.tile_tokens == 64 && c.shape < static_cast<int>(std::size(kWideShapes)),
        "lora_expand: the wide kernel needs tiles of 64 tokens and a finished h");
  if (c.shape == kWideKeptShape) return expand_wide_kept(p, stream);
  if (kWideShapes[c.shape].walks) return expand_wide_walk(p, c, stream);
  if (kWideShapes[c.shape].float_weights) return expand_wide_parts(p, c, stream);
  if (p.h.dtype == DType::kFloat32) return expand_wide_rounded(p, c, stream);
  check(p.h.vector, "lora_expand: the wide kernel needs an h of aligned 16-bit rows");
  device::visit_dtype<Float16DTypes>(p.y.dtype, "lora_expand", [&](auto tag) {
    launch_shape<typename decltype(tag)::type>(c.shape, p, stream);
  });
}

}  // namespace mortar::lora::cuda
