// SPDX-License-Identifier: Apache-2.0
// Functions that the device approximates, to the nearest float.
#include <cmath>

#include "kernel.h"

f32 emu_ex2(f32 x) { return static_cast<f32>(std::exp2(static_cast<double>(x))); }
f32 emu_lg2(f32 x) { return static_cast<f32>(std::log2(static_cast<double>(x))); }
f32 emu_sin(f32 x) { return static_cast<f32>(std::sin(static_cast<double>(x))); }
f32 emu_cos(f32 x) { return static_cast<f32>(std::cos(static_cast<double>(x))); }
f32 emu_tanh(f32 x) { return static_cast<f32>(std::tanh(static_cast<double>(x))); }
