// SPDX-License-Identifier: Apache-2.0
#include "memory.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "kernel.h"

namespace emulator {
namespace {

unsigned char poison_byte = 0xff;
std::mutex mutex;
std::map<std::uint64_t, std::size_t> live;
std::multimap<std::size_t, std::uint64_t> spare;  // freed ranges by their rounded size
std::uint64_t next_free = kGlobalBase;
std::size_t in_use = 0;

void map_at(std::uint64_t base, std::uint64_t size) {
  void* p = mmap(reinterpret_cast<void*>(base), size, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
  if (p != reinterpret_cast<void*>(base)) {
    std::perror("emulator: cannot map its address space");
    std::abort();
  }
}

std::size_t rounded(std::size_t bytes) { return (bytes + 255) / 256 * 256 + 256; }

}  // namespace

void map_memory() {
  map_at(kGlobalBase, kGlobalSize);
  map_at(kSharedBase, kSharedSlots * kSharedSlot);
  map_at(kStackBase, kStackSize);
  map_at(kShadow, 1ull << 43);  // of every address below 2^47
}

void allow(std::uint64_t begin, std::uint64_t bytes) {
  auto* shadow = reinterpret_cast<unsigned char*>(kShadow + (begin >> 4));
  std::memset(shadow, 16, bytes / 16);
  if (bytes % 16 != 0) shadow[bytes / 16] = bytes % 16;
}

void forbid(std::uint64_t begin, std::uint64_t bytes) {
  std::memset(reinterpret_cast<void*>(kShadow + (begin >> 4)), 0, (bytes + 15) / 16);
}

bool allowed(std::uint64_t a, std::uint64_t bytes) {
  if (a >> 47 || (a + bytes) >> 47) return false;
  for (std::uint64_t at = a; at < a + bytes; at = (at | 15) + 1) {
    const std::uint64_t end = at / 16 == (a + bytes) / 16 ? (a + bytes) % 16 : 16;
    if (*reinterpret_cast<unsigned char*>(kShadow + (at >> 4)) < end) return false;
  }
  return true;
}

void* device_malloc(std::size_t bytes) {
  const std::lock_guard lock(mutex);
  const std::size_t room = rounded(bytes);
  std::uint64_t at = next_free;
  if (const auto found = spare.find(room); found != spare.end()) {
    at = found->second;
    spare.erase(found);
  } else {
    if (room > kGlobalBase + kGlobalSize - next_free) return nullptr;
    next_free += room;
  }
  live[at] = bytes;
  in_use += bytes;
  std::memset(reinterpret_cast<void*>(at), poison_byte, bytes);
  allow(at, bytes);
  return reinterpret_cast<void*>(at);
}

bool device_free(void* p) {
  if (p == nullptr) return true;
  const std::lock_guard lock(mutex);
  const auto at = reinterpret_cast<std::uint64_t>(p);
  const auto found = live.find(at);
  if (found == live.end()) return false;
  const std::size_t bytes = found->second, room = rounded(bytes);
  live.erase(found);
  in_use -= bytes;
  forbid(at, bytes);
  std::memset(p, poison_byte, bytes < 4096 ? bytes : 4096);
  if (bytes >= 1 << 20) {
    const std::uint64_t page = (at + 4095) / 4096 * 4096;
    madvise(reinterpret_cast<void*>(page), (at + bytes) / 4096 * 4096 - page, MADV_DONTNEED);
  }
  spare.emplace(room, at);
  return true;
}

bool is_device(const void* p) {
  const auto a = reinterpret_cast<std::uint64_t>(p);
  return a >= kGlobalBase && a < kGlobalBase + kGlobalSize;
}

std::size_t device_bytes_in_use() { return in_use; }

void set_poison(unsigned char byte) { poison_byte = byte; }
unsigned char poison() { return poison_byte; }

}  // namespace emulator
