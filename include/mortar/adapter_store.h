// SPDX-License-Identifier: Apache-2.0
// Reads LoRA adapters as PEFT saves them: adapter_config.json + adapter_model.safetensors.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "mortar/tensor.h"

namespace mortar {

/// A and B of one target module of one adapter; views into the mapped file.
struct AdapterModule {
  std::string name;  ///< as in the base model: "model.layers.0.self_attn.q_proj"
  int rank = 0;
  float scale = 0;   ///< alpha / rank, or alpha / sqrt(rank) with rslora
  Tensor a;          ///< [rank, K] on the CPU, read-only
  Tensor b;          ///< [N, rank], or its transpose as a strided view with fan_in_fan_out
};

/// One adapter folder, mapped into memory and fully checked.
struct Adapter {
  std::string name;
  std::string path;
  std::string base_model;
  bool fan_in_fan_out = false;
  std::vector<AdapterModule> modules;  ///< sorted by name
  std::shared_ptr<const void> mapping;  ///< keeps the views alive
};

/// Registered adapters by name and id. Opening reads and checks headers only; the bytes of the
/// weights stay in the file until they are used.
class AdapterStore {
 public:
  AdapterStore();
  ~AdapterStore();
  AdapterStore(AdapterStore&&) noexcept;
  AdapterStore& operator=(AdapterStore&&) noexcept;

  /// Opens a PEFT adapter folder under a new name and returns its id (0, 1, 2, ...).
  /// Throws Error and leaves the store as it was if the folder is missing, malformed, or holds an
  /// adapter that Mortar cannot serve (DoRA, modules_to_save, bias, another PEFT type).
  std::int64_t open(const std::string& name, const std::string& folder);
  /// Forgets an adapter; its id is not used again.
  void close(const std::string& name);

  std::int64_t size() const;
  std::vector<std::string> names() const;         ///< in the order of their ids
  std::int64_t id(const std::string& name) const;  ///< throws if unknown
  const Adapter& get(const std::string& name) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace mortar
