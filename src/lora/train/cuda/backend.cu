// SPDX-License-Identifier: Apache-2.0
// LoRA training on CUDA: not there yet; every op says so.
#include "core/check.h"
#include "lora/train/problem.h"

namespace mortar::lora::train::cuda {
namespace {

[[noreturn]] void refuse() {
  fail(ErrorKind::kRuntime, "lora_train: tensors must be on cpu, as there are no CUDA kernels yet");
}

void run(const Problem&, Stream) { refuse(); }
std::int64_t workspace(const Problem&) { refuse(); }
void read_offsets(const std::int32_t*, std::int64_t, std::int32_t*, Stream) { refuse(); }

}  // namespace

const Backend kBackend = {run, run, workspace, workspace, read_offsets};

}  // namespace mortar::lora::train::cuda
