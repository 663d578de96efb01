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
// further warpgroup streams ranks through a ring of cp.async stages, 64 of them in the swizzle that
// wgmma reads. Two CTAs fit an SM: one reads and writes y while the other computes. The sum is one
// chain over ranks from zero, as in the other kernels; the permutation of columns is theirs too.
#include <cstddef>
#include <iterator>
#include <utility>

#include "device/wgmma.cuh"
#include "lora/cuda/backend.cuh"
#include "lora/cuda/expand_wide.cuh"

namespace mortar::lora::cuda {
namespace {

using namespace wide_expand;
using Launch = void (*)(const ExpandParams&, Stream);

/// Others are those of expand_wide_parts.cu, expand_wide_walk.cu and expand_wide_kept.cu.
template <class T, int kShape, bool kVectorY>
constexpr Launch launch_of() {
  if constexpr (kWideShapes[kShape].float_weights || kWideShapes[kShape].walks) {
    return nullptr;
  } else {
    return launch_traits<Traits<T, kShape, kVectorY>>;
  }
}

template <class T, std::size_t... kShapes>
void launch_shape(int shape, const ExpandParams& p, Stream stream,
                  std::index_sequence<kShapes...>) {
  static constexpr Launch kLaunches[] = {launch_of<T, static_cast<int>(kShapes), true>()...};
  static constexpr Launch kAnyY[] = {launch_of<T, static_cast<int>(kShapes), false>()...};
  (p.vector_y ? kLaunches : kAnyY)[shape](p, stream);
}

}  // namespace

void expand_wide(const ExpandParams& p, const ExpandPlan& c, Stream stream) {
  constexpr std::size_t kCount = std::size(kWideShapes);
  check(!p.h.raw && p.tiles.tile_tokens == 64 && static_cast<std::size_t>(c.shape) < kCount,
        "lora_expand: the wide kernel needs tiles of 64 tokens and a finished h");
  if (c.shape == kWideKeptShape) return expand_wide_kept(p, stream);
  if (kWideShapes[c.shape].walks) return expand_wide_walk(p, c, stream);
  if (kWideShapes[c.shape].float_weights) return expand_wide_parts(p, c, stream);
  if (p.h.dtype == DType::kFloat32) return expand_wide_rounded(p, c, stream);
  check(p.h.vector, "lora_expand: the wide kernel needs an h of aligned 16-bit rows");
  device::visit_dtype<Float16DTypes>(p.y.dtype, "lora_expand", [&](auto tag) {
    launch_shape<typename decltype(tag)::type>(c.shape, p, stream,
                                               std::make_index_sequence<kCount>());
  });
}

}  // namespace mortar::lora::cuda
