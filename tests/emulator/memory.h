// SPDX-License-Identifier: Apache-2.0
// The address space of the emulated device. Device memory is host memory at fixed addresses; a
// shadow byte for every 16 bytes says how many of them a kernel may touch.
#pragma once

#include <cstddef>
#include <cstdint>

namespace emulator {

inline constexpr std::uint64_t kGlobalBase = 0x1000'0000'0000, kGlobalSize = 1ull << 41;
inline constexpr std::uint64_t kSharedBase = 0x1400'0000'0000, kSharedSlot = 1ull << 32;
inline constexpr int kSharedSlots = 1024, kSharedWindowBits = 24;
inline constexpr std::uint64_t kStackBase = 0x1900'0000'0000, kStackSize = 1ull << 38;

/// Maps all of it; once.
void map_memory();
/// Lets kernels touch [begin, begin + bytes), begin a multiple of 16, or nothing of it.
void allow(std::uint64_t begin, std::uint64_t bytes);
void forbid(std::uint64_t begin, std::uint64_t bytes);
/// Whether [a, a + bytes) may be touched.
bool allowed(std::uint64_t a, std::uint64_t bytes);

/// Poisoned memory at a multiple of 256; nullptr where there is none.
void* device_malloc(std::size_t bytes);
/// False if p was not allocated.
bool device_free(void* p);
/// Whether p lies in device memory.
bool is_device(const void* p);
std::size_t device_bytes_in_use();

/// What fresh memory holds.
void set_poison(unsigned char byte);
unsigned char poison();

}  // namespace emulator
