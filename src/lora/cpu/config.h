// SPDX-License-Identifier: Apache-2.0
// Sizes of the pieces into which the CPU backend cuts its work. None of them changes a bit of a
// result. Measured on two Zen 5 cores (48 KB, 1 MB and 32 MB of cache).
#pragma once

#include <cstdint>

namespace mortar::lora::cpu {

/// Ranks of an item when there are too few tokens to keep all threads busy.
inline constexpr std::int64_t kSplitRanks = 8;

/// Bytes of packed B of an item: what a rank of 512 in float32 needs for one tile of 64 columns.
/// Half as many columns (and 256 tokens) cost expand 4 %, for h is converted and B packed more
/// often.
inline constexpr std::int64_t kPackBytes = 128 * 1024;
inline constexpr std::int64_t kMaxColumns = 1024;
/// Tokens of an item; packing B costs as much as about 5 of them.
inline constexpr std::int64_t kExpandTokens = 512;
/// Tokens whose h is converted at a time (96 KB at rank 512): whole tiles of 6 and of 16.
inline constexpr std::int64_t kExpandStep = 48;

/// Bytes of h that lora_apply keeps in its workspace; larger batches go by in chunks.
inline constexpr std::int64_t kHiddenBytes = 2 << 20;

/// Multiply-adds (each adapter's weights counted for kWeightTokens tokens more, as they must be
/// fetched) that are worth a thread: about 8 us of one core. A parallel region with its barrier
/// costs two threads 0.7 us on idle cores, but a whole time slice where another process has one.
inline constexpr std::int64_t kWorkPerThread = 1 << 20;
inline constexpr std::int64_t kWeightTokens = 8;

}  // namespace mortar::lora::cpu
