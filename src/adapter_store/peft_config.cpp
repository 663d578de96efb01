// SPDX-License-Identifier: Apache-2.0
#include "adapter_store/peft_config.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <unordered_set>
#include <utility>
#include <vector>

#include "mortar/lora.h"

namespace mortar::adapter_store {
namespace {

using nlohmann::json;

/// A field that must be empty or off, because with it an adapter is more than scale * (x A^T) B^T.
struct Unserved {
  const char* field;
  const char* reason;
};
constexpr Unserved kUnserved[] = {
    {"use_dora", "DoRA rescales the whole output of a module by a trained magnitude"},
    {"modules_to_save", "the adapter replaces whole modules of the base model"},
    {"lora_bias", "the adapter adds a bias of its own"},
    {"target_parameters", "the adapter changes bare parameters instead of modules"},
    {"trainable_token_indices", "the adapter replaces rows of the embedding"},
    {"layer_replication", "the adapter needs a base model with repeated layers"},
    {"alora_invocation_tokens", "aLoRA acts only on the tokens after its invocation"},
    {"arrow_config", "Arrow routes every token among several adapters"},
    {"kasa_config", "KaSA puts a diagonal between A and B and changes the base weights"},
    {"use_qalora", "QALoRA pools the input in groups before A"},
    {"use_bdlora", "BD-LoRA stores A or B as blocks of a block-diagonal matrix"},
    {"megatron_config", "Megatron shards A and B over several devices"},
};

/// Initialisations that subtract B A from the base weights, or quantise them.
constexpr const char* kChangesBase[] = {"pissa", "olora", "corda", "lora_ga", "loftq"};
constexpr const char* kKeepsBase[] = {"gaussian", "eva", "orthogonal", "mica"};

/// A parsed config, and the keys of its inner objects in the order of the file (the JSON library
/// sorts them, but in rank_pattern and alpha_pattern the first match wins).
struct Document {
  json root;
  std::map<std::string, std::vector<std::string>> inner_keys;
};

Document parse_document(std::string_view text, const FileCheck& check) {
  constexpr int kMaxDepth = 32;
  // The JSON library takes a zero byte for the end of the text.
  check.require(text.find('\0') == std::string_view::npos,
                "must be valid JSON in UTF-8, got a zero byte in it");
  Document document;
  std::vector<std::unordered_set<std::string>> seen;  // keys of the objects that are open
  std::string outer;
  const auto on_event = [&](int depth, json::parse_event_t event, json& value) {
    check.require(depth <= kMaxDepth, "must nest its values at most ", kMaxDepth,
                  " deep, got more");
    if (event == json::parse_event_t::object_start) seen.emplace_back();
    if (event == json::parse_event_t::object_end) seen.pop_back();
    if (event == json::parse_event_t::key) {
      const auto& key = value.get_ref<const std::string&>();
      check.require(seen.back().insert(key).second, "must name every field once, got ", Quoted{key},
                    " twice");
      if (depth == 1) outer = key;
      if (depth == 2) document.inner_keys[outer].push_back(key);
    }
    return true;
  };
  try {
    document.root = json::parse(text, on_event);
  } catch (const json::parse_error& e) {
    check.refuse("must be valid JSON in UTF-8, got an error at byte ", e.byte);
  } catch (const json::exception&) {
    check.refuse("must be valid JSON in UTF-8, got a number that is too large");
  }
  check.require(document.root.is_object(), "must be a JSON object, got ",
                document.root.type_name());
  return document;
}

/// "true", "3", "'text'" or the kind of a longer value.
std::string brief(const json& value) {
  if (value.is_string()) return concat(Quoted{value.get_ref<const std::string&>()});
  if (value.is_structured()) return value.is_array() ? "a list" : "an object";
  return value.dump();
}

/// Python's idea of truth: what PEFT asks of most fields.
bool is_truthy(const json& value) {
  if (value.is_null()) return false;
  if (value.is_boolean()) return value.get<bool>();
  if (value.is_number()) return value.get<double>() != 0;
  if (value.is_string()) return !value.get_ref<const std::string&>().empty();
  return !value.empty();
}

class ConfigReader {
 public:
  ConfigReader(std::string_view text, const FileCheck& check)
      : check_(check), document_(parse_document(text, check)) {}

  PeftConfig read() const {
    refuse_unserved();
    PeftConfig config;
    config.base_model = text("base_model_name_or_path");
    config.use_rslora = flag("use_rslora");
    config.fan_in_fan_out = flag("fan_in_fan_out");
    config.rank = rank(required("r"), "r");
    config.alpha = alpha(required("lora_alpha"), "lora_alpha");
    config.rank_pattern = patterns<int>("rank_pattern", &ConfigReader::rank, config.budget);
    config.alpha_pattern = patterns<double>("alpha_pattern", &ConfigReader::alpha, config.budget);
    return config;
  }

 private:
  /// The value of a field; null if it is missing.
  const json& field(const char* name) const {
    static const json null;
    const auto found = document_.root.find(name);
    return found == document_.root.end() ? null : *found;
  }
  const json& required(const char* name) const {
    check_.require(document_.root.contains(name), "must have a field ", name, ", got none");
    return field(name);
  }
  std::string text(const char* name) const {
    const json& value = field(name);
    check_.require(value.is_null() || value.is_string(), name, " must be text, got ", brief(value));
    return value.is_null() ? std::string() : value.get<std::string>();
  }
  bool flag(const char* name) const {
    const json& value = field(name);
    check_.require(value.is_null() || value.is_boolean(), name, " must be true or false, got ",
                   brief(value));
    return value.is_boolean() && value.get<bool>();
  }

  int rank(const json& value, const std::string& name) const {
    const bool fits = value.is_number_unsigned() && value.get<std::uint64_t>() >= 1 &&
                      value.get<std::uint64_t>() <= kLoraMaxRank;
    check_.require(fits, name, " must be a whole number from 1 to ", kLoraMaxRank, ", got ",
                   brief(value));
    return value.get<int>();
  }
  double alpha(const json& value, const std::string& name) const {
    check_.require(value.is_number() && value.get<double>() > 0, name,
                   " must be a number above 0, got ", brief(value));
    return value.get<double>();
  }

  template <class T>
  PatternMap<T> patterns(const char* name,
                         T (ConfigReader::*convert)(const json&, const std::string&) const,
                         PatternBudget& budget) const {
    PatternMap<T> map;
    const json& value = field(name);
    check_.require(value.is_null() || value.is_object(), name, " must be an object, got ",
                   brief(value));
    if (value.is_null() || value.empty()) return map;
    for (const std::string& key : document_.inner_keys.at(name)) {
      map.add(key, (this->*convert)(value.at(key), concat(name, '[', Quoted{key}, ']')), budget,
              check_);
    }
    return map;
  }

  void refuse_unserved() const {
    const json& type = required("peft_type");
    check_.require(type.is_string() && type.get_ref<const std::string&>() == "LORA",
                   "peft_type must be 'LORA', got ", brief(type));
    for (const auto& [name, reason] : kUnserved) {
      const json& value = field(name);
      check_.require(!is_truthy(value), name, " must be empty or off, got ", brief(value), ": ",
                     reason, ", which Mortar cannot serve");
    }
    const json& bias = field("bias");
    check_.require(bias.is_null() || bias == "none", "bias must be 'none', got ", brief(bias),
                   ": the adapter changes biases of the base model, which Mortar cannot serve");
    check_initialisation();
  }

  void check_initialisation() const {
    const json& value = field("init_lora_weights");
    if (value.is_null() || value.is_boolean()) return;
    std::string name = value.is_string() ? value.get<std::string>() : std::string();
    std::transform(name.begin(), name.end(), name.begin(),
                   [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
    for (const char* changes : kChangesBase) {
      check_.require(
          name.rfind(changes, 0) != 0, "init_lora_weights must leave the base model as ",
          "it is, got ", brief(value), ", which changes its weights (PEFT converts such ",
          "an adapter in save_pretrained with path_initial_model_for_weight_conversion)");
    }
    const bool known =
        std::find(std::begin(kKeepsBase), std::end(kKeepsBase), name) != std::end(kKeepsBase);
    check_.require(known, "init_lora_weights must be true, false, 'gaussian', 'eva', 'orthogonal' ",
                   "or 'mica', got ", brief(value));
  }

  const FileCheck& check_;
  Document document_;
};

}  // namespace

int PeftConfig::rank_of(std::string_view module, PatternBudget& left,
                        const FileCheck& check) const {
  return rank_pattern.get(module, rank, left, check);
}

float PeftConfig::scale_of(std::string_view module, int own_rank, PatternBudget& left,
                           const FileCheck& check) const {
  const double own_alpha = alpha_pattern.get(module, alpha, left, check);
  const double scale = own_alpha / (use_rslora ? std::sqrt(double(own_rank)) : own_rank);
  const auto rounded = static_cast<float>(scale);
  check.require(std::isfinite(rounded) && rounded > 0, "lora_alpha must give a scale that float32 ",
                "holds, got ", own_alpha, " for ", Quoted{module});
  return rounded;
}

PeftConfig parse_peft_config(std::string_view text, const FileCheck& check) {
  return ConfigReader(text, check).read();
}

}  // namespace mortar::adapter_store
