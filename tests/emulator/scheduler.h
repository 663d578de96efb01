// SPDX-License-Identifier: Apache-2.0
// What the loop over a grid's blocks and the fibers that it runs share.
#pragma once

#include "machine.h"

extern "C" void emu_switch(void** save, void* load);

namespace emulator {

struct Machine {
  Fiber* current = nullptr;  ///< that runs now; nullptr in the scheduler
  void* scheduler_sp = nullptr;
  const LaunchRequest* request = nullptr;
  std::string failure;       ///< of this launch, empty so far if none
  std::vector<Warp*> ready;  ///< warps with lanes that can run
  u64 idle_polls = 0;        ///< looks at memory since a fiber was last woken
};
extern Machine machine;

/// Reads the seed and catches wild accesses; once.
void set_up();
void enlist(Warp& w);
/// A lane that can run.
Fiber* pick(Warp& w);
/// Lets the fiber begin its kernel on the stack of that number.
void prepare(Fiber& f, std::size_t stack);

}  // namespace emulator
