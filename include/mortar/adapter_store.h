// SPDX-License-Identifier: Apache-2.0
// Reads LoRA adapters as PEFT saves them: adapter_config.json + adapter_model.safetensors.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "mortar/tensor.h"

namespace mortar {

/// Where the weights of an adapter lie.
enum class AdapterMemory {
  /// In memory of this process, read when the adapter is opened. What happens to the file later
  /// does not matter.
  kCopied,
  /// In the file, mapped into memory: opened in no time, read when they are touched, shared by all
  /// processes that map the file. A file that is cut short while it is mapped ends the process
  /// (SIGBUS) when the lost part is touched, and one that is written to changes the weights:
  /// choose this only for files that are replaced by renaming and never changed.
  kMapped,
};

/// A and B of one target module of one adapter: y += scale * (x A^T) B^T. Views into the adapter's
/// memory, dense and aligned to their elements.
struct AdapterModule {
  std::string name;  ///< as in the base model: "model.layers.0.self_attn.q_proj"
  int rank = 0;      ///< 1 .. kLoraMaxRank
  float scale = 0;   ///< alpha / rank, or alpha / sqrt(rank) with rslora; finite and above 0
  Tensor a;          ///< [rank, K] on the CPU: float32, float16 or bfloat16
  Tensor b;          ///< [N, rank], the dtype of a
};

/// One adapter folder, fully checked. Writing through a view changes neither the file nor another
/// process.
struct Adapter {
  std::string name;
  std::string path;
  std::string base_model;  ///< base_model_name_or_path of the config, empty if not given
  /// The base model stores its weights as [K, N] (GPT-2's Conv1D). It says nothing about a and b:
  /// PEFT transposes B A only to merge it into such a weight.
  bool fan_in_fan_out = false;
  std::vector<AdapterModule> modules;  ///< sorted by name, at least one
  std::shared_ptr<const void> memory;  ///< keeps the views alive

  /// The module of that name, null if this adapter leaves it alone.
  const AdapterModule* find(std::string_view module) const {
    const auto found = std::lower_bound(
        modules.begin(), modules.end(), module,
        [](const AdapterModule& m, std::string_view wanted) { return m.name < wanted; });
    return found != modules.end() && found->name == module ? &*found : nullptr;
  }
};

/// Registered adapters by name and id. Safe to use from several threads.
class AdapterStore {
 public:
  AdapterStore();
  ~AdapterStore();
  AdapterStore(AdapterStore&&) noexcept;
  AdapterStore& operator=(AdapterStore&&) noexcept;

  /// Opens a PEFT adapter folder under a new name and returns its id (0, 1, 2, ...). A file is
  /// refused by its header, before weights are read.
  ///
  /// Throws Error and leaves the store as it was: a value error if the name is taken, the folder
  /// or a file is missing, malformed, or holds an adapter that Mortar cannot serve (DoRA,
  /// modules_to_save, a bias, another PEFT type, ...: the message has the reason); a type error
  /// for a dtype; a runtime error if the machine cannot read a file or has no memory for it.
  std::int64_t open(const std::string& name, const std::string& folder,
                    AdapterMemory memory = AdapterMemory::kCopied);
  /// Forgets an adapter; its id is not used again. Whoever holds it from get() keeps it alive.
  void close(const std::string& name);

  std::int64_t size() const;
  bool contains(const std::string& name) const;
  std::vector<std::string> names() const;                             ///< in the order of their ids
  std::int64_t id(const std::string& name) const;                     ///< throws if unknown
  std::shared_ptr<const Adapter> get(const std::string& name) const;  ///< throws if unknown

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace mortar
