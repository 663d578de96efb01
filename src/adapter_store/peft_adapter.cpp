// SPDX-License-Identifier: Apache-2.0
#include "adapter_store/peft_adapter.h"

#include <sys/stat.h>

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "adapter_store/file.h"
#include "adapter_store/safetensors.h"

namespace mortar::adapter_store {
namespace {

constexpr std::string_view kPrefix = "base_model.model.";

/// What is known of a tensor from the end of its name.
struct TensorKind {
  const char* part;    ///< found in the name
  const char* reason;  ///< why Mortar cannot serve it; null: used only in training
};
constexpr TensorKind kOtherTensors[] = {
    {".lora_velora_embed", nullptr},
    {".lora_monteclora_sampler", nullptr},
    {".lora_embedding_", "it is a LoRA on an embedding layer"},
    {".lora_magnitude_vector", "it is the magnitude of a DoRA adapter"},
    {".lora_diag", "it is the diagonal of a KaSA adapter"},
    {".lora_A.bias", "it is a bias of the adapter (lora_bias)"},
    {".lora_B.bias", "it is a bias of the adapter (lora_bias)"},
    {".token_adapter.", "it replaces rows of the embedding (trainable_token_indices)"},
    {".modules_to_save.", "it replaces a whole module of the base model (modules_to_save)"},
    {".base_layer.", "it is a weight of the base model, saved with a LoRA on an embedding layer"},
    {"",
     "it is no lora_A or lora_B weight of PEFT (base_model.model.<module>.lora_A.weight); a "
     "weight of the base model is written with save_embedding_layers"},
};

/// A name taken apart: base_model.model.<module>.lora_<factor>[.<adapter>].weight.
struct FactorName {
  std::string_view module;
  char factor = 0;  ///< 'A', 'B'; 0: another name
  std::string_view adapter;
};

/// Cuts `.suffix` off the end of `name`, if it is there.
bool cut(std::string_view& name, std::string_view suffix) {
  if (!name.ends_with(suffix)) return false;
  name.remove_suffix(suffix.size());
  return true;
}

FactorName parse_name(std::string_view name) {
  FactorName out;
  if (!name.starts_with(kPrefix) || !cut(name, ".weight")) return out;
  name.remove_prefix(kPrefix.size());
  for (int with_adapter = 0; with_adapter < 2; ++with_adapter) {
    std::string_view rest = name;
    if (with_adapter) {
      const std::size_t dot = rest.rfind('.');
      if (dot == std::string_view::npos || dot + 1 == rest.size()) break;
      out.adapter = rest.substr(dot + 1);
      rest = rest.substr(0, dot);
    }
    const bool is_a = cut(rest, ".lora_A");
    if ((is_a || cut(rest, ".lora_B")) && !rest.empty()) {
      out.module = rest;
      out.factor = is_a ? 'A' : 'B';
      return out;
    }
  }
  return {};
}

/// True if a tensor that is no factor may be passed over; throws with the reason otherwise.
bool is_for_training_only(const std::string& name, const FileCheck& check) {
  const auto* kind =
      std::find_if(std::begin(kOtherTensors), std::end(kOtherTensors),
                   [&](const TensorKind& k) { return name.find(k.part) != std::string::npos; });
  check.require(kind->reason == nullptr, "tensor ", Quoted{name},
                " cannot be served: ", kind->reason == nullptr ? "" : kind->reason);
  return true;
}

using Factors = std::pair<const SafetensorsEntry*, const SafetensorsEntry*>;  // A and B

/// The tensors of each module, either of them possibly missing.
std::map<std::string_view, Factors> pair_factors(const std::vector<SafetensorsEntry>& entries,
                                                 const FileCheck& check) {
  std::map<std::string_view, Factors> pairs;
  std::optional<std::string_view> adapter;
  for (const SafetensorsEntry& e : entries) {
    const auto is_control = [](unsigned char c) { return c < 0x20 || c == 0x7F; };
    check.require(std::none_of(e.name.begin(), e.name.end(), is_control), "tensor ", Quoted{e.name},
                  " must have a name without control characters, got some");
    const FactorName name = parse_name(e.name);
    if (name.factor == 0 && is_for_training_only(e.name, check)) continue;
    check.require(name.module.find("base_layer") == std::string_view::npos, "tensor ",
                  Quoted{e.name}, " cannot be served: it wraps another adapter's layer ",
                  "(target_parameters)");
    if (!adapter) adapter = name.adapter;
    check.require(name.adapter == *adapter, "tensor ", Quoted{e.name},
                  " must belong to the same adapter as the others, ", Quoted{*adapter}, ", got ",
                  Quoted{name.adapter});
    Factors& factors = pairs[name.module];
    (name.factor == 'A' ? factors.first : factors.second) = &e;
  }
  check.require(!pairs.empty(), "must hold lora_A and lora_B weights, got none");
  return pairs;
}

Tensor to_view(const SafetensorsEntry& e, std::span<std::byte> file, const FileCheck& check) {
  const bool served =
      e.dtype == DType::kFloat32 || e.dtype == DType::kFloat16 || e.dtype == DType::kBFloat16;
  check.require_type(served, "tensor ", Quoted{e.name}, " must have dtype F32, F16 or BF16, got ",
                     e.dtype_name);
  check.require(e.shape.size() == 2, "tensor ", Quoted{e.name},
                " must have 2 dimensions (Mortar serves linear layers), got ", e.shape.size());
  check.require(e.shape[0] > 0 && e.shape[1] > 0, "tensor ", Quoted{e.name},
                " must not be empty, got shape (", e.shape[0], ", ", e.shape[1], ")");
  check.require(e.offset % dtype_size(*e.dtype) == 0, "tensor ", Quoted{e.name},
                " must start at a multiple of its element size in the file, got byte ", e.offset,
                "; load and save it with the safetensors package to realign it");
  return Tensor(file.data() + e.offset, *e.dtype, {e.shape[0], e.shape[1]});
}

void check_folder(const std::string& folder) {
  struct stat info {};
  const bool found = folder.find('\0') == std::string::npos && ::stat(folder.c_str(), &info) == 0;
  check(found && S_ISDIR(info.st_mode), "AdapterStore.open: folder must be an existing directory, ",
        "got ", Quoted{folder}, found ? ", which is a file" : "");
}

}  // namespace

std::vector<AdapterModule> peft_modules(std::span<std::byte> file, const PeftConfig& config,
                                        const FileCheck& check) {
  const std::vector<SafetensorsEntry> entries = parse_safetensors(file, check);
  std::vector<AdapterModule> modules;
  PatternBudget budget = config.budget;
  for (const auto& [name, factors] : pair_factors(entries, check)) {
    const auto [a, b] = factors;
    check.require(a != nullptr && b != nullptr, "module ", Quoted{name},
                  " must have both lora_A and lora_B, got no lora_", a == nullptr ? 'A' : 'B');
    AdapterModule module;
    module.name = name;
    module.a = to_view(*a, file, check);
    module.b = to_view(*b, file, check);
    module.rank = config.rank_of(name, budget, check);
    module.scale = config.scale_of(name, module.rank, budget, check);
    check.require(module.a.size(0) == module.rank, "tensor ", Quoted{a->name},
                  " must have shape (rank, K) with the rank of the config, ", module.rank, ", got ",
                  shape_string(module.a));
    check.require(module.b.size(1) == module.rank, "tensor ", Quoted{b->name},
                  " must have shape (N, rank) with the rank of the config, ", module.rank, ", got ",
                  shape_string(module.b));
    check.require_type(a->dtype == b->dtype, "tensor ", Quoted{b->name},
                       " must have the dtype of its lora_A, ", a->dtype_name, ", got ",
                       b->dtype_name);
    modules.push_back(std::move(module));
  }
  return modules;
}

Adapter read_peft_adapter(const std::string& name, const std::string& folder,
                          AdapterMemory memory) {
  check_folder(folder);
  const FileCheck config_check(folder + "/adapter_config.json");
  const PeftConfig config =
      parse_peft_config(read_file(config_check, kMaxConfigBytes), config_check);
  const FileCheck model_check(folder + "/adapter_model.safetensors");
  const auto file = std::make_shared<FileBytes>(model_check, memory);
  file->load(std::min(kLengthBytes, file->bytes().size()), model_check);
  file->load(safetensors_header_end(file->bytes()), model_check);

  Adapter adapter;
  adapter.name = name;
  adapter.path = folder;
  adapter.base_model = config.base_model;
  adapter.fan_in_fan_out = config.fan_in_fan_out;
  adapter.modules = peft_modules(file->bytes(), config, model_check);
  file->load(file->bytes().size(), model_check);
  adapter.memory = file;
  return adapter;
}

}  // namespace mortar::adapter_store
