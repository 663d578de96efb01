// SPDX-License-Identifier: Apache-2.0
// What this machine's processor can do beyond the instruction sets between which Highway chooses.
#pragma once

namespace mortar {

/// Dot products of pairs of bfloat16 (vdpbf16ps), with the AVX-512 subsets that go with them.
bool has_avx512_bf16();

/// Tiles of bfloat16 (tdpbf16ps), and has_avx512_bf16(). Linux hands out the tiles' 8 KB of state
/// on request only, to the whole process: a call makes that request.
bool has_amx_bf16();

/// The best instruction set that kernels of this build use on this machine: "AMX-BF16",
/// "AVX512-BF16", "AVX-512", "AVX2", "NEON" or another of Highway's names.
const char* cpu_target();

}  // namespace mortar
