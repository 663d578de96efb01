// SPDX-License-Identifier: Apache-2.0
// PEFT's rank_pattern and alpha_pattern: values for the modules whose name a key matches.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "adapter_store/diagnostics.h"

namespace mortar::adapter_store {

/// What all patterns of one adapter together may cost, so that no pair of files holds the reader
/// up or fills its memory. A step takes 10 to 20 ns, whatever the machine is busy with besides.
struct PatternBudget {
  static constexpr std::int64_t kSteps = 32'000'000;
  static constexpr std::size_t kBytes = 4 << 20;
  std::int64_t steps = kSteps;  ///< of matching names
  std::size_t bytes = kBytes;   ///< of compiled regular expressions

  /// Throws if there are not `n` steps left.
  void spend(std::int64_t n, const FileCheck& check);
};

/// Keys in the order of the file. As in PEFT (`get_pattern_key`), a key is a Python regular
/// expression that must match the end of a module's name: all of it, or what follows one of its
/// dots.
///
/// Keys made of letters, digits, '_', '-' and '.' ('.' being any character) are looked up by hash:
/// adapters that list thousands of modules by name need no regular expression. Others go to PCRE2,
/// whose syntax covers Python's.
class NamePatterns {
 public:
  NamePatterns();
  ~NamePatterns();
  NamePatterns(NamePatterns&&) noexcept;
  NamePatterns& operator=(NamePatterns&&) noexcept;

  /// Throws if `key` is no regular expression or the budget has no room for it.
  void add(const std::string& key, PatternBudget& budget, const FileCheck& check);

  /// The number of the first key that matches. A key that equals the name counts last, even where,
  /// read as a regular expression, it does not match itself. Throws if the budget is spent.
  std::optional<std::size_t> find(std::string_view module, PatternBudget& budget,
                                  const FileCheck& check) const;

 private:
  /// Plain keys of one length by the places of their dots: a name that has dots put in these places
  /// is found among them by its hash.
  using Keys = std::unordered_map<std::string, std::size_t>;
  using Shapes = std::map<std::vector<std::size_t>, Keys>;
  struct Regex;

  std::size_t find_plain(std::string_view module, PatternBudget& budget,
                         const FileCheck& check) const;

  Keys numbers_;                                                         ///< of all keys
  std::unordered_map<std::size_t, Shapes> plain_;                        ///< by length
  std::vector<std::pair<std::size_t, std::unique_ptr<Regex>>> regexes_;  ///< by number
};

/// Patterns in the order of the file: the first that matches wins.
template <class T>
class PatternMap {
 public:
  void add(const std::string& key, T value, PatternBudget& budget, const FileCheck& check) {
    patterns_.add(key, budget, check);
    values_.push_back(std::move(value));
  }

  /// The value for a module, `otherwise` if no key matches it.
  const T& get(std::string_view module, const T& otherwise, PatternBudget& budget,
               const FileCheck& check) const {
    const auto number = patterns_.find(module, budget, check);
    return number ? values_[*number] : otherwise;
  }

 private:
  NamePatterns patterns_;
  std::vector<T> values_;
};

}  // namespace mortar::adapter_store
