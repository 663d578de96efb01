// SPDX-License-Identifier: Apache-2.0
// Row kernels of the backward, which read dy, and z but for 8-bit floats, where they lie. Included
// once per target.
#if defined(MORTAR_FP8_RMSNORM_BACKWARD_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MORTAR_FP8_RMSNORM_BACKWARD_ROWS_INL_H_
#undef MORTAR_FP8_RMSNORM_BACKWARD_ROWS_INL_H_
#else
#define MORTAR_FP8_RMSNORM_BACKWARD_ROWS_INL_H_
#endif

#include "fp8_rmsnorm/cpu/rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace mortar::fp8_rmsnorm::cpu {
namespace HWY_NAMESPACE {

static_assert(kVectors % 2 == 0, "vectors are stored in pairs");

/// Z, D: types of z, and of dy, residual_grad and dx.
template <class Z, class D>
void dot(const void* dy, const float* w, const void* z, std::int64_t n, Sums* sums) {
  FloatVec sum[kVectors];
  for (int j = 0; j < kVectors; ++j) sum[j] = at(sums->lane + j * kLanes);
  for_blocks(n, [&](std::int64_t i, auto block) {
    Z z_copy[kLanesOfSum];
    D dy_copy[kLanesOfSum];
    const Z* from_z = block.in(static_cast<const Z*>(z) + i, z_copy);
    const D* from_dy = block.in(static_cast<const D*>(dy) + i, dy_copy);
    for (int j = 0; j < kVectors; ++j) {
      const FloatVec g = hn::Mul(load_f32(from_dy + j * kLanes), at(w + i + j * kLanes));
      sum[j] = hn::MulAdd(g, load_f32(from_z + j * kLanes), sum[j]);
    }
  });
  for (int j = 0; j < kVectors; ++j) put(sum[j], sums->lane + j * kLanes);
}

/// kDw, kDx: what is wanted. kAdds: whether dx has something added.
template <class Z, class D, bool kDw, bool kDx, bool kAdds>
void gradients_of(const GradientRun& r) {
  const FloatVec rstd = hn::Set(FloatTag(), r.rstd), c = hn::Set(FloatTag(), r.c);
  for_blocks(r.n, [&](std::int64_t i, auto block) {
    Z z_copy[kLanesOfSum];
    D dy_copy[kLanesOfSum], added_copy[kLanesOfSum], dx_copy[kLanesOfSum];
    const Z* from_z = block.in(static_cast<const Z*>(r.z) + i, z_copy);
    const D* from_dy = block.in(static_cast<const D*>(r.dy) + i, dy_copy);
    const D* added = kAdds ? block.in(static_cast<const D*>(r.added) + i, added_copy) : nullptr;
    FloatVec dx[kVectors];
    for (int j = 0; j < kVectors; ++j) {
      const std::int64_t at_j = i + j * kLanes;
      const FloatVec v = load_f32(from_z + j * kLanes), g = load_f32(from_dy + j * kLanes);
      if (kDw) put(hn::MulAdd(g, hn::Mul(v, rstd), at(r.dw + at_j)), r.dw + at_j);
      if (!kDx) continue;
      const FloatVec dz = hn::NegMulAdd(v, c, hn::Mul(g, at(r.w + at_j)));
      dx[j] = kAdds ? hn::MulAdd(dz, rstd, load_f32(added + j * kLanes)) : hn::Mul(dz, rstd);
    }
    if (!kDx) return;
    D* to = block.out(static_cast<D*>(r.dx) + i, dx_copy);
    for (int j = 0; j < kVectors; j += 2) store_f32(dx[j], dx[j + 1], to + j * kLanes);
    block.done(static_cast<D*>(r.dx) + i, dx_copy);
  });
}

template <class Z, class D>
void gradients(const GradientRun& r) {
  if (r.dx == nullptr) return gradients_of<Z, D, true, false, false>(r);
  if (r.added != nullptr) {
    return r.dw != nullptr ? gradients_of<Z, D, true, true, true>(r)
                           : gradients_of<Z, D, false, true, true>(r);
  }
  return r.dw != nullptr ? gradients_of<Z, D, true, true, false>(r)
                         : gradients_of<Z, D, false, true, false>(r);
}

}  // namespace HWY_NAMESPACE
}  // namespace mortar::fp8_rmsnorm::cpu
HWY_AFTER_NAMESPACE();

#endif  // MORTAR_FP8_RMSNORM_BACKWARD_ROWS_INL_H_
