// SPDX-License-Identifier: Apache-2.0
// One PEFT adapter: the tensors of its safetensors file matched with its config.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "adapter_store/diagnostics.h"
#include "adapter_store/peft_config.h"
#include "mortar/adapter_store.h"

namespace mortar::adapter_store {

/// The modules in a whole safetensors file, sorted by name; views into `file`, whose first byte
/// lies on an 8-byte boundary.
///
/// Tensors are named base_model.model.<module>.lora_A.weight and .lora_B.weight; an adapter's name
/// before ".weight" is accepted if it is the same everywhere. Throws, naming the tensor, unless
/// every module has both factors, of shapes [rank, K] and [N, rank] with the config's rank, of one
/// dtype (float32, float16, bfloat16), aligned to its elements. Tensors that PEFT uses only while
/// training are passed over; any other tensor is refused with the reason.
std::vector<AdapterModule> peft_modules(std::span<std::byte> file, const PeftConfig& config,
                                        const FileCheck& check);

/// Opens a folder with adapter_config.json and adapter_model.safetensors.
Adapter read_peft_adapter(const std::string& name, const std::string& folder, AdapterMemory memory);

}  // namespace mortar::adapter_store
