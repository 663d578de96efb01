// SPDX-License-Identifier: Apache-2.0
#include "machine.h"

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <ucontext.h>

#include "memory.h"

extern "C" void emu_switch(void** save, void* load);

namespace emulator {
namespace {

constexpr std::size_t kStackBytes = 128 * 1024;
constexpr unsigned kReservedSmem = 1024;  // what the system keeps below a CTA's own
constexpr u32 kCanary = 0xc0dec0de;

Fiber* current = nullptr;
void* scheduler_sp = nullptr;
const LaunchRequest* request = nullptr;
std::string failure;
std::vector<Warp*> ready;
u64 random_state = 1;
std::size_t stacks_allowed = 0;
u64 idle_polls = 0;

char* stack_of(std::size_t index) {
  return reinterpret_cast<char*>(kStackBase + index * kStackBytes);
}

void enlist(Warp& w) {
  if (w.listed) return;
  w.listed = true;
  ready.push_back(&w);
}

Fiber* pick(Warp& w) {
  const u32 turned = w.turn == 0 ? w.runnable : w.runnable >> w.turn | w.runnable << (32 - w.turn);
  return &w.fibers[(__builtin_ctz(turned) + w.turn) & 31];
}

/// Leaves the running fiber for another of its warp, or for the scheduler.
void leave(Fiber* f, bool to_scheduler) {
  Warp& w = *f->warp;
  if (w.runnable != 0 && !to_scheduler) {
    Fiber* next = pick(w);
    if (next == f) return;
    current = next;
    emu_switch(&f->sp, next->sp);
  } else {
    emu_switch(&f->sp, scheduler_sp);
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
  Fiber* f = current;
  request->entry(f);
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

extern "C" void emu_wild_access() {
  fail(current, ~0u, "an access to an address that no memory has");
}

void on_segv(int, siginfo_t* info, void* context) {
  auto* registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  if (current == nullptr) {
    std::signal(SIGSEGV, SIG_DFL);
    return;
  }
  std::fprintf(stderr, "emulator: segmentation fault at %p\n", info->si_addr);
  registers[REG_RSP] = (registers[REG_RSP] - 256) & ~15ll;
  registers[REG_RSP] -= 8;
  registers[REG_RIP] = reinterpret_cast<greg_t>(&emu_wild_access);
}

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

void load_cta(Cta& cta, Cluster& cluster, unsigned rank, std::size_t slot,
              const std::array<unsigned, 3>& id, std::size_t first_stack) {
  const LaunchRequest& r = *request;
  const unsigned threads = r.block[0] * r.block[1] * r.block[2];
  const unsigned bytes = kReservedSmem + r.static_smem + r.dynamic_smem;
  cta.cluster = &cluster;
  cta.rank = rank;
  cta.id = id;
  const u64 base = kSharedBase + slot * kSharedSlot;
  cta.window = base + (u64{rank} << kSharedWindowBits);
  std::memset(reinterpret_cast<void*>(cta.window), poison(), bytes);
  cta.barriers = {};
  cta.alive = threads;
  const unsigned warps = (threads + 31) / 32;
  if (cta.warps.size() != warps) {
    cta.fibers.clear();
    cta.warps.assign(warps, {});
    for (Warp& w : cta.warps) {
      w.fibers = cta.fibers.emplace_back(new Fiber[32]).get();
    }
  }
  for (unsigned i = 0; i < threads; ++i) {
    Warp& w = cta.warps[i / 32];
    Fiber& f = w.fibers[i % 32];
    w.cta = &cta;
    f.warp = &w;
    f.lane = i % 32;
    f.index = i;
    f.waits = nullptr;
    f.cluster_waits = false;
    f.copies.clear();
    f.group_ends.clear();
    u32* s = f.special;
    s[kTidX] = i % r.block[0];
    s[kTidY] = i / r.block[0] % r.block[1];
    s[kTidZ] = i / r.block[0] / r.block[1];
    for (int d = 0; d < 3; ++d) {
      s[kNtidX + d] = r.block[d];
      s[kCtaidX + d] = id[d];
      s[kNctaidX + d] = r.grid[d];
      s[kClusteridX + d] = id[d] / r.cluster[d];
      s[kNclusteridX + d] = r.grid[d] / r.cluster[d];
      s[kClusterCtaidX + d] = id[d] % r.cluster[d];
      s[kClusterNctaidX + d] = r.cluster[d];
    }
    s[kClusterCtarank] = rank;
    s[kClusterNctarank] = r.cluster[0] * r.cluster[1] * r.cluster[2];
    s[kLaneid] = i % 32;
    s[kWarpid] = i / 32;
    s[kNwarpid] = warps;
    s[kSmid] = random_bits() % 132;
    s[kNsmid] = 132;
    s[kDynamicSmem] = r.dynamic_smem;
    s[kTotalSmem] = bytes;
    f.smem_base = rank << kSharedWindowBits;
    f.smem = base;
    f.params = r.params;
    f.symbols = r.symbols;
    prepare(f, first_stack + i);
  }
  for (unsigned i = 0; i < warps; ++i) {
    Warp& w = cta.warps[i];
    const unsigned lanes = std::min(32u, threads - i * 32);
    w.alive = w.runnable = lanes == 32 ? ~0u : (1u << lanes) - 1;
    w.turn = random_bits() & 31;
    w.groups.clear();
    w.products.clear();
    w.product_groups.clear();
    w.listed = false;
    enlist(w);
  }
}

void report_waits(const std::vector<Cluster>& clusters) {
  int lines = 0;
  for (const Cluster& cluster : clusters) {
    for (const Cta& cta : cluster.ctas) {
      for (const Warp& w : cta.warps) {
        for (u32 rest = w.alive; rest != 0 && lines < 24;) {
          const Fiber& f = w.fibers[__builtin_ctz(rest)];
          u32 same = 0;
          for (u32 r = rest; r != 0; r &= r - 1) {
            const Fiber& other = w.fibers[__builtin_ctz(r)];
            if (other.waits == f.waits && other.at == f.at) same |= 1u << other.lane;
          }
          std::fprintf(stderr, "  block (%u,%u,%u) warp %u lanes %08x wait for %s: %s\n", cta.id[0],
                       cta.id[1], cta.id[2], f.index / 32, same, f.waits ? f.waits : "nothing",
                       request->describe(f.at).c_str());
          rest &= ~same;
          ++lines;
        }
      }
    }
  }
}

}  // namespace

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
  failure = request->name + where + what + " at " + request->describe(at);
  std::fprintf(stderr, "emulator: %s\n", failure.c_str());
  emu_switch(&f->sp, scheduler_sp);
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
  idle_polls = 0;
}

void yield(Fiber* f) {
  if (++idle_polls > 100'000'000) fail(f, ~0u, "waits for ever in a loop");
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

std::string run_grid(const LaunchRequest& r) {
  set_up();
  request = &r;
  failure.clear();
  ready.clear();
  idle_polls = 0;
  const unsigned in_cluster = r.cluster[0] * r.cluster[1] * r.cluster[2];
  const unsigned threads = r.block[0] * r.block[1] * r.block[2];
  const std::size_t clusters = std::size_t{r.grid[0]} * r.grid[1] * r.grid[2] / in_cluster;
  std::vector<u32> order(clusters);
  std::iota(order.begin(), order.end(), 0u);
  for (std::size_t i = clusters; i > 1; --i) std::swap(order[i - 1], order[random_bits() % i]);
  std::size_t resident = 1 + random_bits() % 2;
  if (r.cooperative) resident = clusters;
  resident = std::min({resident, clusters, std::size_t{kSharedSlots}});

  static std::vector<Cluster> slots;
  if (slots.size() < resident) {
    slots.clear();  // Cta and Warp point at each other, so they never move
    slots.resize(resident);
  }
  const unsigned bytes = kReservedSmem + r.static_smem + r.dynamic_smem;
  std::size_t next = 0, running = 0;
  const auto load = [&](std::size_t slot) {
    Cluster& cluster = slots[slot];
    const u32 number = order[next++];
    if (cluster.ctas.size() != in_cluster) {
      cluster.ctas.clear();
      cluster.ctas.resize(in_cluster);
    }
    cluster.alive = in_cluster * threads;
    cluster.finished = false;
    cluster.arrived = cluster.phase = 0;
    cluster.waiting.clear();
    cluster.at_mbarriers.clear();
    cluster.events.clear();
    const std::array<unsigned, 3> per{r.grid[0] / r.cluster[0], r.grid[1] / r.cluster[1],
                                      r.grid[2] / r.cluster[2]};
    const std::array<unsigned, 3> first{number % per[0] * r.cluster[0],
                                        number / per[0] % per[1] * r.cluster[1],
                                        number / per[0] / per[1] * r.cluster[2]};
    for (unsigned rank = 0; rank < in_cluster; ++rank) {
      const std::array<unsigned, 3> id{first[0] + rank % r.cluster[0],
                                       first[1] + rank / r.cluster[0] % r.cluster[1],
                                       first[2] + rank / r.cluster[0] / r.cluster[1]};
      load_cta(cluster.ctas[rank], cluster, rank, slot, id, (slot * in_cluster + rank) * threads);
    }
    ++running;
  };
  for (std::size_t slot = 0; slot < resident; ++slot) {
    for (unsigned rank = 0; rank < in_cluster; ++rank) {
      const u64 window = kSharedBase + slot * kSharedSlot + (u64{rank} << kSharedWindowBits);
      allow(window + kReservedSmem, bytes - kReservedSmem);
    }
    load(slot);
  }
  const auto fire = [&](Cluster& cluster) {
    const std::size_t i = random_bits() % cluster.events.size();
    Event event = std::move(cluster.events[i]);
    cluster.events.erase(cluster.events.begin() + i);
    event.run();
  };
  std::vector<Cluster*> with_events;
  while (running > 0 && failure.empty()) {
    if (!ready.empty()) {
      const std::size_t i = random_bits() % ready.size();
      Warp* w = ready[i];
      if (w->runnable == 0) {
        w->listed = false;
        ready[i] = ready.back();
        ready.pop_back();
      } else {
        current = pick(*w);
        emu_switch(&scheduler_sp, current->sp);
        current = nullptr;
        if (!failure.empty()) break;
        if (w->runnable == 0 && ready[i] == w) {
          w->listed = false;
          ready[i] = ready.back();
          ready.pop_back();
        } else {
          w->turn = random_bits() & 31;
        }
      }
    }
    bool progress = !ready.empty();
    for (std::size_t slot = 0; slot < resident; ++slot) {
      Cluster& cluster = slots[slot];
      if (!cluster.events.empty() && (!progress || (random_bits() & 7) == 0)) {
        fire(cluster);
        progress = true;
      }
      if (cluster.alive == 0 && !cluster.finished) {
        if (!cluster.events.empty()) {
          failure = r.name + ": a block ended while copies to its shared memory were in flight";
          std::fprintf(stderr, "emulator: %s\n", failure.c_str());
          break;
        }
        --running;
        cluster.finished = true;
        if (next < clusters) load(slot);
        progress = true;
      }
    }
    if (!progress && running > 0 && failure.empty()) {
      failure = r.name + ": every thread waits";
      std::fprintf(stderr, "emulator: %s\n", failure.c_str());
      report_waits(slots);
    }
  }
  current = nullptr;
  for (std::size_t slot = 0; slot < resident; ++slot) {
    for (unsigned rank = 0; rank < in_cluster; ++rank) {
      const u64 window = kSharedBase + slot * kSharedSlot + (u64{rank} << kSharedWindowBits);
      forbid(window, bytes);
    }
  }
  return failure;
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
  const u64 shown = address >= kSharedBase && address < kStackBase ? (address - kSharedBase) % kSharedSlot : address;
  std::snprintf(text, sizeof text, "%s access of %u bytes at 0x%llx of %s memory",
                there ? "a misaligned" : "an out-of-bounds", bytes, shown, space);
  fail(fiber(t), at, text);
}

void emu_trap(Thread* t, u32 at) { fail(fiber(t), at, "trap"); }

void emu_poll(Thread* t, u32) { yield(fiber(t)); }
