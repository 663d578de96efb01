// SPDX-License-Identifier: Apache-2.0
// PEFT's rank_pattern and alpha_pattern: values for the modules whose name a key matches.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "adapter_store/diagnostics.h"

namespace mortar::adapter_store {

/// One key. As in PEFT (`get_pattern_key`), a key is a Python regular expression that must match
/// the end of a module's name: all of it, or what follows one of its dots. Keys made of letters,
/// digits, '_', '-' and '.' ('.' being any character) are compared directly: adapters that list
/// thousands of modules by name need no regular expression. Others go to PCRE2, whose syntax
/// covers Python's; a match may take kMaxMatchSteps, so no pattern hangs the reader.
class NamePattern {
 public:
  /// Throws if `key` is no regular expression.
  NamePattern(std::string key, const FileCheck& check);

  /// Throws if the match takes too many steps.
  bool matches(std::string_view module, const FileCheck& check) const;
  const std::string& key() const { return key_; }

 private:
  struct Regex;
  std::string key_;
  std::shared_ptr<const Regex> regex_;  ///< null: compared directly
};

inline constexpr unsigned kMaxMatchSteps = 1'000'000;

/// Patterns in the order of the file: the first that matches wins.
template <class T>
class PatternMap {
 public:
  void add(NamePattern pattern, T value) {
    items_.emplace_back(std::move(pattern), std::move(value));
  }

  /// The value for a module, `otherwise` if no key matches it. A key that equals the name counts
  /// even where, read as a regular expression, it does not match itself.
  const T& get(std::string_view module, const T& otherwise, const FileCheck& check) const {
    const T* equal = nullptr;
    for (const auto& [pattern, value] : items_) {
      if (pattern.matches(module, check)) return value;
      if (equal == nullptr && pattern.key() == module) equal = &value;
    }
    if (equal != nullptr) return *equal;
    return otherwise;
  }

 private:
  std::vector<std::pair<NamePattern, T>> items_;
};

}  // namespace mortar::adapter_store
