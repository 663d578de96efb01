// SPDX-License-Identifier: Apache-2.0
// What a kernel that translate.py has turned into C++ sees of the emulator. Kept free of standard
// headers: every kernel is compiled with it on demand.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using s8 = signed char;
using s16 = short;
using s32 = int;
using s64 = long long;
using f32 = float;
using f64 = double;

/// Bytes 0 .. 15 of each 16-byte granule of the address space that kernels may touch: the first
/// `kShadow[address >> 4]` ones.
inline constexpr u64 kShadow = 0x2000'0000'0000;

enum Special : u32 {
  kTidX,
  kTidY,
  kTidZ,
  kNtidX,
  kNtidY,
  kNtidZ,
  kCtaidX,
  kCtaidY,
  kCtaidZ,
  kNctaidX,
  kNctaidY,
  kNctaidZ,
  kClusteridX,
  kClusteridY,
  kClusteridZ,
  kNclusteridX,
  kNclusteridY,
  kNclusteridZ,
  kClusterCtaidX,
  kClusterCtaidY,
  kClusterCtaidZ,
  kClusterNctaidX,
  kClusterNctaidY,
  kClusterNctaidZ,
  kClusterCtarank,
  kClusterNctarank,
  kLaneid,
  kWarpid,
  kNwarpid,
  kSmid,
  kNsmid,
  kDynamicSmem,
  kTotalSmem,
  kSpecials
};

/// A thread as its kernel sees it.
struct Thread {
  u32 special[kSpecials];
  u32 smem_base;       ///< shared address of the CTA's window: its rank in the cluster << 24
  u64 smem;            ///< address of shared address 0
  u64 params;          ///< address of the kernel's parameters
  const u64* symbols;  ///< addresses of the module's variables
  u32 looks_for_races;
  u32 in[24];     ///< operands and
  u32 out[8];     ///< results of an instruction of a whole warp
  f32 wide[128];  ///< sums of a wgmma
};

// `at` is the number of the instruction in its kernel, for messages.
extern "C" {
[[noreturn]] void emu_fault(Thread*, u64 address, u32 bytes, u32 at);
[[noreturn]] void emu_trap(Thread*, u32 at);
/// An access that is there: a read (0), a write (1) or one that orders threads (2).
void emu_access(Thread*, u64 address, u32 bytes, u32 kind, u32 at);
void emu_poll(Thread*, u32 at);
u32 emu_shfl(Thread*, u32 mode, u32 a, u32 b, u32 c, u32 mask, u32 at);
u32 emu_vote(Thread*, u32 mode, u32 predicate, u32 mask, u32 at);
u32 emu_match(Thread*, u32 all, u64 value, u32 mask, u32 at);
u32 emu_redux(Thread*, u32 op, u32 value, u32 mask, u32 at);
u32 emu_activemask(Thread*);
u32 emu_envreg(u32 number);
u64 emu_clock();
u32 emu_elect(Thread*, u32 mask, u32 at);
void emu_bar_warp(Thread*, u32 mask, u32 at);
void emu_bar(Thread*, u32 id, u32 threads, u32 wait, u32 at);
u32 emu_bar_red(Thread*, u32 op, u32 id, u32 threads, u32 predicate, u32 at);
void emu_cluster_arrive(Thread*, u32 at);
void emu_cluster_wait(Thread*, u32 at);
void emu_ldmatrix(Thread*, u32 count, u32 transposed, u32 address, u32 at);
void emu_stmatrix(Thread*, u32 count, u32 transposed, u32 address, u32 at);
void emu_mma(Thread*, u32 kind, u32 at);
void emu_cp_async(Thread*, u32 to, u64 from, u32 bytes, u32 from_bytes, u32 at);
void emu_cp_async_commit(Thread*, u32 at);
void emu_cp_async_wait(Thread*, u32 groups, u32 all, u32 at);
void emu_cp_async_mbarrier(Thread*, u32 barrier, u32 noinc, u32 at);
void emu_mbarrier_init(Thread*, u32 barrier, u32 count, u32 at);
u64 emu_mbarrier_arrive(Thread*, u32 barrier, u32 count, u32 expect, u32 at);
void emu_mbarrier_expect(Thread*, u32 barrier, u32 bytes, u32 at);
void emu_mbarrier_wait(Thread*, u32 barrier, u32 parity, u32 at);
u32 emu_mbarrier_test(Thread*, u32 barrier, u32 parity, u32 at);
void emu_tensor_store(Thread*, u32 rank, u64 map, u32 from, u32 at);
void emu_tensor_copy(Thread*, u32 rank, u32 to, u64 map, u32 barrier, u32 ctas, u32 at);
void emu_bulk_send(Thread*, u32 to, u32 from, u32 bytes, u32 barrier, u32 at);
void emu_bulk_copy(Thread*, u32 to, u64 from, u32 bytes, u32 barrier, u32 ctas, u32 at);
void emu_st_async(Thread*, u32 to, u32 words, u32 barrier, u32 at);
void emu_wgmma(Thread*, u32 n, u32 kind, u64 a, u64 b, u32 add, u32 flags, u32 at);
void emu_wgmma_registers(Thread*, u32 n, u32 kind, const u32* a, u64 b, u32 add, u32 flags, u32 at);
void emu_wgmma_commit(Thread*, u32 at);
void emu_wgmma_wait(Thread*, u32 groups, u32 at);
f32 emu_ex2(f32);
f32 emu_lg2(f32);
f32 emu_sin(f32);
f32 emu_cos(f32);
f32 emu_tanh(f32);
}

#define EMU_INLINE static inline __attribute__((always_inline))
#define EMU_COLD(x) __builtin_expect(!!(x), 0)
#define BITS(type, x) __builtin_bit_cast(type, x)

/// Whether `bytes` (a power of two up to 16) at `a` are not there for a kernel, or misaligned.
#define EMU_BAD(a, bytes) \
  (*(const u8*)(kShadow + ((a) >> 4)) < ((a)&15) + (bytes) || ((a) & ((bytes)-1)) != 0)
/// Checks an access, of a kind of emu_access, and gives its address.
#define AT(type, bytes, address, kind, at)                                     \
  ({                                                                           \
    const u64 a_ = (address);                                                  \
    if (EMU_COLD(EMU_BAD(a_, bytes))) emu_fault(t, a_, bytes, at);             \
    if (EMU_COLD(t->looks_for_races != 0)) emu_access(t, a_, bytes, kind, at); \
    (type*)a_;                                                                 \
  })
