// SPDX-License-Identifier: Apache-2.0
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/cpu_target.cpp"
#include "core/cpu_target.h"

#include "hwy/foreach_target.h"
// After foreach_target.h, as Highway wants it.
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace mortar {
namespace HWY_NAMESPACE {

const char* highway_target() { return hwy::TargetName(HWY_TARGET); }

}  // namespace HWY_NAMESPACE
}  // namespace mortar
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

#include <string_view>

#if defined(__x86_64__) && defined(__linux__) && (defined(__GNUC__) || defined(__clang__))

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace mortar {

bool has_avx512_bf16() {
  return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

bool has_amx_bf16() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!has_avx512_bf16() || __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return false;
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
  if ((edx & kAmxBf16) == 0 || (edx & kAmxTile) == 0) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

}  // namespace mortar

#else

namespace mortar {

bool has_avx512_bf16() { return false; }
bool has_amx_bf16() { return false; }

}  // namespace mortar

#endif

namespace mortar {

HWY_EXPORT(highway_target);

const char* cpu_target() {
  if (has_amx_bf16()) return "AMX-BF16";
  if (has_avx512_bf16()) return "AVX512-BF16";
  const char* name = HWY_DYNAMIC_DISPATCH(highway_target)();
  return std::string_view(name).starts_with("AVX3") ? "AVX-512" : name;  // Highway's name for it
}

}  // namespace mortar

#endif  // HWY_ONCE
