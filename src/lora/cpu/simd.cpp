// SPDX-License-Identifier: Apache-2.0
// One table of functions for every SIMD level that Highway compiles this file for.
//
// Levels: AVX2 (with FMA and F16C), AVX-512, NEON, and the baseline of the compiler. The ones left
// out differ from those in nothing that these loops use.
#define HWY_DISABLED_TARGETS \
  (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "lora/cpu/simd.cpp"
#include "hwy/foreach_target.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/dtype_visitor.h"
#include "core/int_math.h"
#include "hwy/highway.h"
#include "lora/cpu/pack-inl.h"
#include "lora/cpu/simd.h"
#include "lora/cpu/units-inl.h"

HWY_BEFORE_NAMESPACE();
#undef MORTAR_LEVEL_NAMESPACE
#define MORTAR_LEVEL_NAMESPACE HWY_NAMESPACE
#include "lora/cpu/expand-inl.h"
#include "lora/cpu/shrink-inl.h"

namespace mortar {
namespace HWY_NAMESPACE {
namespace {

template <class S, class D>
void convert_row(const S* src, float scale, std::int64_t count, D* dst) {
  const FloatVec factor = hn::Set(FloatTag(), scale);
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    store_f32(hn::Mul(load_f32(src + i), factor), dst + i);
  }
  for (; i < count; ++i) dst[i] = from_float<D>(to_float(src[i]) * scale);
}

void convert(const void* src, DType src_dtype, float scale, std::int64_t count, void* dst,
             DType dst_dtype) {
  visit_dtype<FloatDTypes>(src_dtype, "lora", [&](auto from) {
    using S = typename decltype(from)::type;
    visit_dtype<FloatDTypes>(dst_dtype, "lora", [&](auto to) {
      using D = typename decltype(to)::type;
      convert_row(static_cast<const S*>(src), scale, count, static_cast<D*>(dst));
    });
  });
}

template <class X>
constexpr void fill_shrink(lora::cpu::ShrinkKernel (&row)[3]) {
  row[0] = shrink<ShrinkUnit<X, float>>;
  row[1] = shrink<ShrinkUnit<X, BFloat16>>;
  row[2] = shrink<ShrinkUnit<X, Float16>>;
}

template <class B>
constexpr void fill_expand(lora::cpu::ExpandKernel (&row)[3]) {
  row[0] = expand<ExpandUnit<B, float>>;
  row[1] = expand<ExpandUnit<B, BFloat16>>;
  row[2] = expand<ExpandUnit<B, Float16>>;
}

constexpr lora::cpu::Kernels make_table() {
  lora::cpu::Kernels table;
  table.level = HWY_STR(HWY_NAMESPACE);
  fill_shrink<float>(table.shrink[0]);
  fill_shrink<BFloat16>(table.shrink[1]);
  fill_shrink<Float16>(table.shrink[2]);
  fill_expand<float>(table.expand[0]);
  fill_expand<BFloat16>(table.expand[1]);
  fill_expand<Float16>(table.expand[2]);
  table.pack = lora_pack::pack;
  table.convert = convert;
  return table;
}

}  // namespace

constexpr lora::cpu::Kernels kTable = make_table();

}  // namespace HWY_NAMESPACE
}  // namespace mortar
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace mortar::lora::cpu {
namespace {

struct Level {
  std::int64_t target;
  const Kernels* table;
};

constexpr Level kLevels[] = {
#if (HWY_TARGETS & HWY_AVX3) && HWY_STATIC_TARGET != HWY_AVX3
    {HWY_AVX3, &mortar::N_AVX3::kTable},
#endif
#if (HWY_TARGETS & HWY_AVX2) && HWY_STATIC_TARGET != HWY_AVX2
    {HWY_AVX2, &mortar::N_AVX2::kTable},
#endif
#if (HWY_TARGETS & HWY_NEON) && HWY_STATIC_TARGET != HWY_NEON
    {HWY_NEON, &mortar::N_NEON::kTable},
#endif
    {HWY_STATIC_TARGET, &HWY_STATIC_DISPATCH(kTable)},
};

}  // namespace

std::vector<const Kernels*> highway_kernels() {
  std::vector<const Kernels*> tables;
  for (const Level& level : kLevels) {
    if (level.target == HWY_STATIC_TARGET || (hwy::SupportedTargets() & level.target) != 0) {
      tables.push_back(level.table);
    }
  }
  return tables;
}

}  // namespace mortar::lora::cpu
#endif  // HWY_ONCE
