// SPDX-License-Identifier: Apache-2.0
// How row kernels walk over a run: in blocks of 32 elements, the last one through copies. Included
// once per target.
#if defined(MORTAR_FP8_RMSNORM_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MORTAR_FP8_RMSNORM_ROWS_INL_H_
#undef MORTAR_FP8_RMSNORM_ROWS_INL_H_
#else
#define MORTAR_FP8_RMSNORM_ROWS_INL_H_
#endif

#include <cstdint>
#include <cstring>

#include "core/simd-inl.h"
#include "fp8_rmsnorm/cpu/row_kernels.h"

HWY_BEFORE_NAMESPACE();
namespace mortar::fp8_rmsnorm::cpu {
namespace HWY_NAMESPACE {
using namespace mortar::HWY_NAMESPACE;

inline constexpr int kVectors = kLanesOfSum / static_cast<int>(kLanes);  ///< of a block
static_assert(kPadding == kLanesOfSum, "scratch is padded to whole blocks");

HWY_INLINE FloatVec at(const float* p) { return hn::Load(FloatTag(), p); }
HWY_INLINE void put(FloatVec v, float* p) { hn::Store(v, FloatTag(), p); }
HWY_INLINE BitsVec magnitude(FloatVec v) { return hn::BitCast(BitsTag(), hn::Abs(v)); }

/// Where a kernel finds and leaves a block in the caller's memory: there.
struct WholeBlock {
  template <class T>
  HWY_INLINE const T* in(const T* p, T (&)[kLanesOfSum]) const {
    return p;
  }
  template <class T>
  HWY_INLINE T* out(T* p, T (&)[kLanesOfSum]) const {
    return p;
  }
  template <class T>
  HWY_INLINE void done(T*, const T (&)[kLanesOfSum]) const {}
};

/// A last block of fewer elements: in a copy, with zeros behind them.
struct PartBlock {
  std::int64_t count;

  template <class T>
  const T* in(const T* p, T (&copy)[kLanesOfSum]) const {
    std::memset(copy, 0, sizeof(copy));
    std::memcpy(copy, p, bytes<T>());
    return copy;
  }
  template <class T>
  T* out(T*, T (&copy)[kLanesOfSum]) const {
    return copy;
  }
  template <class T>
  void done(T* p, const T (&copy)[kLanesOfSum]) const {
    std::memcpy(p, copy, bytes<T>());
  }

 private:
  template <class T>
  std::size_t bytes() const {
    return static_cast<std::size_t>(count) * sizeof(T);
  }
};

/// body(i, block) for every block of a run, which begins at element i.
template <class Body>
HWY_INLINE void for_blocks(std::int64_t n, const Body& body) {
  std::int64_t i = 0;
  for (; i + kLanesOfSum <= n; i += kLanesOfSum) body(i, WholeBlock{});
  if (i < n) body(i, PartBlock{n - i});
}

/// body(i) for every vector of scratch, padding included.
template <class Body>
HWY_INLINE void for_vectors(std::int64_t n, const Body& body) {
  for (std::int64_t i = 0; i < n; i += kPadding) {
    for (std::int64_t j = 0; j < kPadding; j += kLanes) body(i + j);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace mortar::fp8_rmsnorm::cpu
HWY_AFTER_NAMESPACE();

#endif  // MORTAR_FP8_RMSNORM_ROWS_INL_H_
