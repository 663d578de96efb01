// SPDX-License-Identifier: Apache-2.0
// The AMX level: tdpbf16ps on tiles that the process asks the kernel for.
//
// tdpbf16ps sums pair after pair into float32 like vdpbf16ps, rounds to nearest even and flushes
// subnormals; y is rounded by vcvtneps2bf16, which flushes them too.
#include "lora/cpu/simd.h"

#if defined(__x86_64__) && defined(__linux__) && (defined(__GNUC__) || defined(__clang__))

#include <immintrin.h>

#include <algorithm>
#include <cstring>

#include "core/cpu_target.h"
#include "core/float16.h"

// Everything between these lines, and nothing else, may use the instructions.
#if defined(__clang__)
#pragma clang attribute push(                                                                   \
    __attribute__((target("amx-tile,amx-bf16,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("amx-tile,amx-bf16,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")
// GCC 12 takes the deliberately undefined operands in its own intrinsics for a mistake.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include "lora/cpu/amx-inl.h"

namespace mortar::lora::cpu {
namespace {

/// The memory operand of ldtilecfg (Intel SDM volume 1, chapter 18): palette 1, then bytes per row
/// and rows of each of the eight tiles.
struct alignas(64) TileConfig {
  std::uint8_t palette = 1, start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64);

struct AmxTiles {
  static void configure(std::int64_t units) {
    TileConfig config;
    for (int i = 0; i < 8; ++i) {
      config.row_bytes[i] = static_cast<std::uint16_t>(i == 6 ? 4 * units : kTileBytes);
      config.rows[i] = static_cast<std::uint8_t>(i == 7 ? units : kTileRows);
    }
    __asm__ volatile("ldtilecfg %0" : : "m"(config));
  }
  static void release() { __asm__ volatile("tilerelease"); }
  template <int kTile>
  static void zero() {
    __asm__ volatile("tilezero %%tmm%c0" : : "i"(kTile));
  }
  template <int kTile>
  static void load(const void* p, std::int64_t stride) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2"
                     :
                     : "r"(p), "r"(stride), "i"(kTile)
                     : "memory");
  }
  template <int kTile>
  static void store(void* p, std::int64_t stride) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)"
                     :
                     : "r"(p), "r"(stride), "i"(kTile)
                     : "memory");
  }
  template <int kC, int kA, int kB>
  static void dot() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
  }

  /// Y: BFloat16 or float.
  template <class Y>
  static void update(const float* sums, std::int64_t columns, float scale, const Y* base, Y* y) {
    const __m512 factor = _mm512_set1_ps(scale);
    for (std::int64_t n = 0; n < columns; n += 16) {
      const __mmask16 mask = columns_mask(columns - n);
      const __m512 sum = _mm512_load_ps(sums + n);
      put(y + n, mask,
          base != nullptr ? _mm512_fmadd_ps(sum, factor, get(base + n, mask))
                          : _mm512_mul_ps(sum, factor));
    }
  }

 private:
  static __m512 get(const float* from, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, from); }
  static __m512 get(const BFloat16* from, __mmask16 mask) {
    const __m512i bits = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
  }
  static void put(float* to, __mmask16 mask, __m512 v) { _mm512_mask_storeu_ps(to, mask, v); }
  static void put(BFloat16* to, __mmask16 mask, __m512 v) {
    _mm256_mask_storeu_epi16(to, mask, (__m256i)_mm512_cvtneps_pbh(v));
  }
  static __mmask16 columns_mask(std::int64_t left) {
    return static_cast<__mmask16>(left >= 16 ? 0xffffu : (1u << left) - 1);
  }
};

}  // namespace
}  // namespace mortar::lora::cpu

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace mortar::lora::cpu {

std::unique_ptr<Kernels> amx_kernels(const Kernels& base) {
  if (base.expand_pairs[1] == nullptr || !has_amx_bf16()) return nullptr;
  AmxShrink<AmxTiles>::pack = base.pack;
  auto table = std::make_unique<Kernels>(base);
  table->level = "AMX";
  table->shrink[1][1] = AmxShrink<AmxTiles>::run;
  table->expand_pairs[0] = AmxExpand<AmxTiles, float>::run;
  table->expand_pairs[1] = AmxExpand<AmxTiles, BFloat16>::run;
  return table;
}

}  // namespace mortar::lora::cpu

#else

namespace mortar::lora::cpu {

std::unique_ptr<Kernels> amx_kernels(const Kernels&) { return nullptr; }

}  // namespace mortar::lora::cpu

#endif
