// SPDX-License-Identifier: Apache-2.0
// y (+)= h B^T for many tokens per adapter of float32 adapters under a bfloat16 y, on the warpgroup
// tensor cores of sm_90a.
//
// y[t, n] (+)= sum_r h[s, t, r] B_{a(t), s}[n, r]        N hidden out, r rank
// bytes  = 4 M sum_s N_s (y read and written) + 4 sum_a sum_s r N_s (B of adapters in use) + h; of
//          h and B from L2, for tiles of 64 tokens by 128 columns: 6 r M N / 64
// FLOP   = 6 M N r: three products of parts (src/device/parts.cuh)
// 2048 tokens of one adapter, qkv, r256: 61 MB -> 14 us of DRAM, 19 GFLOP -> 30 us
// limit  : L2, and the tensor cores: 64 ranks of a tile take 48 KB of L2 (1,780 clocks at 27 bytes
//          each) and 770 clocks of tensor cores; of two tiles that share B 64 KB (2,370) and 1,540
// wrong  : ranks up to 64, where B is split anew for every tile: expand_wide_kept.cu keeps parts;
//          several steps a CTA up to rank 256, where expand_wide_walk.cu keeps those of h
//
// The kernel is that of expand_wide.cu, its ring and sums those of expand_wide_parts.cuh. Producers
// read B into registers, split it and write planes of parts, and have the next rows on their way
// meanwhile; with one tile a CTA h as well. With two tiles rows of B wait in shared memory to be
// split, those of two stages, and h comes as it is: consumers split their own rows into the
// registers that wgmma reads, which would else read planes of it from shared memory once for every
// product. Products and sums are in the order of expand_parts.cu.
#include "device/wgmma.cuh"
#include "lora/cuda/backend.cuh"
#include "lora/cuda/expand_wide.cuh"

namespace mortar::lora::cuda {

void expand_wide_parts(const ExpandParams& p, const ExpandPlan& c, Stream stream) {
  check(p.two_parts && kWideShapes[c.shape].float_weights && p.vector_y &&
            p.y.dtype == DType::kBFloat16 && p.h.rows_by_16 && p.h.dtype == DType::kFloat32 &&
            p.weights.dtype == DType::kFloat32,
        "lora_expand: the wide kernel of parts takes aligned rows of h and weights in float32 and "
        "an aligned bfloat16 y");
  using wide_expand::launch_traits, wide_expand::Traits;
  c.shape == kWidePartsShape
      ? launch_traits<Traits<__nv_bfloat16, kWidePartsShape, true>>(p, stream)
      : launch_traits<Traits<__nv_bfloat16, kWidePairPartsShape, true>>(p, stream);
}

}  // namespace mortar::lora::cuda
