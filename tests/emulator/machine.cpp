// SPDX-License-Identifier: Apache-2.0
#include "machine.h"

#include <ucontext.h>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>

#include "memory.h"
#include "scheduler.h"

namespace emulator {

Machine machine;

namespace {

constexpr std::size_t kStackBytes = 128 * 1024;
constexpr u32 kCanary = 0xc0dec0de;

u64 random_state = 1;
std::size_t stacks_allowed = 0;

char* stack_of(std::size_t index) {
  return reinterpret_cast<char*>(kStackBase + index * kStackBytes);
}

}  // namespace

void enlist(Warp& w) {
  if (w.listed) return;
  w.listed = true;
  machine.ready.push_back(&w);
}

Fiber* pick(Warp& w) {
  const u32 turned = w.turn == 0 ? w.runnable : w.runnable >> w.turn | w.runnable << (32 - w.turn);
  return &w.fibers[(__builtin_ctz(turned) + w.turn) & 31];
}

namespace {

/// Leaves the running fiber for another of its warp, or for the scheduler.
void leave(Fiber* f, bool to_scheduler) {
  Warp& w = *f->warp;
  if (w.runnable != 0 && !to_scheduler) {
    Fiber* next = pick(w);
    if (next == f) return;
    machine.current = next;
    emu_switch(&f->sp, next->sp);
  } else {
    emu_switch(&f->sp, machine.scheduler_sp);
  }
}

void run_complete_groups(Warp& w) {
  for (std::size_t i = 0; i < w.groups.size();) {
    const Group g = w.groups[i];
    if ((g.mask & w.alive & ~g.arrived) != 0) {
      ++i;
      continue;
    }
    w.groups.erase(w.groups.begin() + i);
    g.run(w, g.arrived);
    for (u32 rest = g.arrived; rest != 0; rest &= rest - 1) wake(&w.fibers[__builtin_ctz(rest)]);
  }
}

void fiber_main() {
  Fiber* f = machine.current;
  machine.request->entry(f);
  Warp& w = *f->warp;
  w.alive &= ~(1u << f->lane);
  w.runnable &= ~(1u << f->lane);
  --w.cta->alive;
  --w.cta->cluster->alive;
  f->waits = nullptr;
  if (!w.groups.empty()) run_complete_groups(w);
  barriers_after_exit(f);
  leave(f, false);
  __builtin_trap();
}

}  // namespace

void prepare(Fiber& f, std::size_t stack) {
  char* base = stack_of(stack);
  if (stack >= stacks_allowed) {
    allow(reinterpret_cast<u64>(base), kStackBytes);
    stacks_allowed = stack + 1;
  }
  *reinterpret_cast<u32*>(base) = kCanary;
  // Neighbours' frames fall into different sets of the caches.
  auto* top = reinterpret_cast<u64*>(base + kStackBytes - 256 - stack % 29 * 192);
  top = reinterpret_cast<u64*>(reinterpret_cast<u64>(top) & ~15ull);
  *--top = 0;
  *--top = reinterpret_cast<u64>(&fiber_main);
  for (int i = 0; i < 6; ++i) *--top = 0;
  f.sp = top;
}

namespace {

extern "C" void emu_wild_access() {
  fail(machine.current, ~0u, "an access to an address that no memory has");
}

void on_segv(int, siginfo_t* info, void* context) {
  auto* registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  if (machine.current == nullptr) {
    std::signal(SIGSEGV, SIG_DFL);
    return;
  }
  std::fprintf(stderr, "emulator: segmentation fault at %p\n", info->si_addr);
  registers[REG_RSP] = (registers[REG_RSP] - 256) & ~15ll;
  registers[REG_RSP] -= 8;
  registers[REG_RIP] = reinterpret_cast<greg_t>(&emu_wild_access);
}

}  // namespace

void set_up() {
  static bool done = false;
  if (done) return;
  done = true;
  const char* seed = std::getenv("MORTAR_EMULATOR_SEED");
  random_state = 0x9e3779b97f4a7c15ull * (seed ? std::strtoull(seed, nullptr, 0) + 1 : 1);
  set_poison(random_bits() & 1 ? 0xff : 0x7f);
  static char stack[64 * 1024];
  stack_t alternative{};
  alternative.ss_sp = stack;
  alternative.ss_size = sizeof stack;
  sigaltstack(&alternative, nullptr);
  struct sigaction action {};
  action.sa_sigaction = on_segv;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  sigaction(SIGSEGV, &action, nullptr);
}

u32 random_bits() {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return static_cast<u32>(random_state >> 24);
}

void fail(Fiber* f, u32 at, const std::string& what) {
  const auto& id = f->warp->cta->id;
  char where[160];
  std::snprintf(where, sizeof where, " [block (%u,%u,%u), thread (%u,%u,%u)] ", id[0], id[1], id[2],
                f->special[kTidX], f->special[kTidY], f->special[kTidZ]);
  machine.failure = machine.request->name + where + what + " at " + machine.request->describe(at);
  std::fprintf(stderr, "emulator: %s\n", machine.failure.c_str());
  emu_switch(&f->sp, machine.scheduler_sp);
  __builtin_unreachable();
}

void block(Fiber* f, const char* what, u32 at) {
  f->waits = what;
  f->at = at;
  f->warp->runnable &= ~(1u << f->lane);
  leave(f, (random_bits() & 63) == 0);
}

void wake(Fiber* f) {
  f->waits = nullptr;
  f->warp->runnable |= 1u << f->lane;
  enlist(*f->warp);
  machine.idle_polls = 0;
}

void yield(Fiber* f) {
  if (++machine.idle_polls > 100'000'000) fail(f, ~0u, "waits for ever in a loop");
  leave(f, true);
}

void collective(Fiber* f, void (*run)(Warp&, u32), u32 mask, u32 at, const char* what) {
  Warp& w = *f->warp;
  const u32 bit = 1u << f->lane;
  if ((mask & bit) == 0) fail(f, at, "a lane that its mask does not name");
  Group* g = nullptr;
  for (Group& other : w.groups) {
    if (other.run == run && other.mask == mask) g = &other;
  }
  if (g == nullptr) g = &w.groups.emplace_back(Group{run, mask, 0});
  g->arrived |= bit;
  f->at = at;
  if ((mask & w.alive & ~g->arrived) != 0) {
    block(f, what, at);
    return;
  }
  const u32 lanes = g->arrived;
  *g = w.groups.back();
  w.groups.pop_back();
  run(w, lanes);
  w.runnable |= lanes;
  w.turn = random_bits() & 31;
  enlist(w);
  for (u32 rest = lanes; rest != 0; rest &= rest - 1) w.fibers[__builtin_ctz(rest)].waits = nullptr;
}

void* shared_at(Fiber* f, u32 shared, u32 bytes, u32 at) {
  const u64 a = f->smem + shared;
  if (!allowed(a, bytes)) emu_fault(f, a, bytes, at);
  return reinterpret_cast<void*>(a);
}

}  // namespace emulator

using namespace emulator;

void emu_fault(Thread* t, u64 address, u32 bytes, u32 at) {
  char text[160];
  const char* space = address >= kGlobalBase && address < kGlobalBase + kGlobalSize ? "global"
                      : address >= kSharedBase && address < kStackBase              ? "shared"
                      : address >= kStackBase && address < kStackBase + kStackSize  ? "local"
                                                                                    : "no";
  const bool there = allowed(address, bytes);
  const u64 shown = address >= kSharedBase && address < kStackBase
                        ? (address - kSharedBase) % kSharedSlot
                        : address;
  std::snprintf(text, sizeof text, "%s access of %u bytes at 0x%llx of %s memory",
                there ? "a misaligned" : "an out-of-bounds", bytes, shown, space);
  fail(fiber(t), at, text);
}

void emu_trap(Thread* t, u32 at) { fail(fiber(t), at, "trap"); }

void emu_poll(Thread* t, u32) { yield(fiber(t)); }
