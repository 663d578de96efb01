// SPDX-License-Identifier: Apache-2.0
// Barriers of a block and of a cluster.
#include "races.h"

namespace emulator {
namespace {

constexpr u64 kClusterBarrier = 0;  // its place, which no address is

void release(NamedBarrier& b) {
  std::vector<Fiber*> waiting;
  waiting.swap(b.waiting);
  order(b.all);
  b.all.clear();
  b.arrived = b.expected = 0;
  for (Fiber* f : waiting) wake(f);
}

/// Releases those of `b` if all have arrived; a barrier without a count is one of all threads.
bool complete(Cta& cta, NamedBarrier& b) {
  if (b.arrived == 0) return false;
  const unsigned expected = b.expected == 0 ? cta.alive : b.expected;
  if (b.arrived < expected) return false;
  release(b);
  return true;
}

void arrive(Fiber* f, u32 id, u32 threads, bool wait, u32 at, const char* what) {
  Cta& cta = *f->warp->cta;
  if (id >= cta.barriers.size()) fail(f, at, "no such barrier");
  NamedBarrier& b = cta.barriers[id];
  if (threads % 32 != 0) fail(f, at, "a barrier of a number of threads that is not whole warps");
  if (b.arrived != 0 && b.expected != threads) {
    fail(f, at, "a barrier whose threads disagree on their number");
  }
  b.expected = threads;
  ++b.arrived;
  b.all.push_back(f);
  f->barrier = id;
  if (complete(cta, b)) return;
  if (!wait) return;
  b.waiting.push_back(f);
  block(f, what, at);
}

void release_cluster(Cluster& cluster) {
  cluster.arrived = 0;
  ++cluster.phase;
  std::vector<Fiber*> waiting;
  waiting.swap(cluster.waiting);
  for (Fiber* f : waiting) wake(f);
}

}  // namespace

void barriers_after_exit(Fiber* f) {
  Cta& cta = *f->warp->cta;
  for (NamedBarrier& b : cta.barriers) {
    if (b.arrived != 0 && b.expected == 0) complete(cta, b);
  }
  Cluster& cluster = *cta.cluster;
  if (cluster.arrived != 0 && cluster.arrived >= cluster.alive) release_cluster(cluster);
}

}  // namespace emulator

using namespace emulator;

void emu_bar(Thread* t, u32 id, u32 threads, u32 wait, u32 at) {
  arrive(fiber(t), id, threads, wait != 0, at, "a barrier of the block");
}

u32 emu_bar_red(Thread* t, u32 op, u32 id, u32 threads, u32 predicate, u32 at) {
  Fiber* f = fiber(t);
  Cta& cta = *f->warp->cta;
  // Two passes of the barrier: one counts, the other keeps the next one's counts apart.
  NamedBarrier& b = cta.barriers[id & 15];
  if (b.arrived == 0) b.ones = 0;
  b.ones += predicate != 0;
  arrive(f, id, threads, true, at, "a barrier of the block");
  const u32 total = threads == 0 ? cta.alive : threads;
  const u32 ones = b.ones;
  const u32 result = op == 0 ? ones : op == 1 ? ones == total : ones != 0;
  arrive(f, id, threads, true, at, "a barrier of the block");
  return result;
}

void emu_cluster_arrive(Thread* t, u32 at) {
  Fiber* f = fiber(t);
  Cluster& cluster = *f->warp->cta->cluster;
  if (f->cluster_waits) fail(f, at, "arrives twice at the cluster's barrier without a wait");
  f->cluster_waits = true;
  f->cluster_phase = cluster.phase;
  send_order(f, kClusterBarrier);
  if (++cluster.arrived >= cluster.alive) release_cluster(cluster);
}

void emu_cluster_wait(Thread* t, u32 at) {
  Fiber* f = fiber(t);
  Cluster& cluster = *f->warp->cta->cluster;
  if (!f->cluster_waits) fail(f, at, "waits at the cluster's barrier without having arrived");
  f->cluster_waits = false;
  if (cluster.phase == f->cluster_phase) {
    cluster.waiting.push_back(f);
    block(f, "the cluster's barrier", at);
  }
  receive_order(f, kClusterBarrier);
}
