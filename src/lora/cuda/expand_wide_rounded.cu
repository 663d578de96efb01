// SPDX-License-Identifier: Apache-2.0
// y (+)= h B^T for ranks above 128 on sm_90a, B and y of one 16-bit type and the caller's h of
// float32, as vLLM's ops have it: rounded to that type as it is read.
//
// y[t, n] (+)= sum_r h[s, t, r] B_{a(t), s}[n, r]        N hidden out, r rank
// bytes  = 4 M sum_s N_s (y read and written) + 2 sum_a sum_s r N_s (B of adapters in use) + h; of
//          h and B from L2, for tiles of 64 tokens by 128 columns: 8 r M N / 128
// FLOP   = 2 M N r
// limit  : L2, which a tile of 64 by 128 asks for 32 KB per 1 MFLOP
// wrong  : lower ranks, where y is most of the work: expand_prefill.cu has more of it in flight
//
// The kernel is that of expand_wide.cu. Its producers read h into registers, round it and write it
// to the ring, and have the next ranks on their way meanwhile.
#include "device/wgmma.cuh"
#include "lora/cuda/backend.cuh"
#include "lora/cuda/expand_wide.cuh"

namespace mortar::lora::cuda {

void expand_wide_rounded(const ExpandParams& p, const ExpandPlan& c, Stream stream) {
  check(c.shape == kWideRoundedShape && p.h.rows_by_16 && p.h.dtype == DType::kFloat32,
        "lora_expand: the wide kernel that rounds h takes aligned rows of float32");
  device::visit_dtype<Float16DTypes>(p.y.dtype, "lora_expand", [&](auto tag) {
    using T = typename decltype(tag)::type;
    using namespace wide_expand;
    p.vector_y ? launch_traits<Traits<T, kWideRoundedShape, true, true>>(p, stream)
               : launch_traits<Traits<T, kWideRoundedShape, false, true>>(p, stream);
  });
}

}  // namespace mortar::lora::cuda
