// SPDX-License-Identifier: Apache-2.0
#include "adapter_store/name_pattern.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <algorithm>
#include <cctype>
#include <new>

namespace mortar::adapter_store {
namespace {

template <auto Free>
struct Deleter {
  template <class T>
  void operator()(T* object) const {
    Free(object);
  }
};
using Code = std::unique_ptr<pcre2_code, Deleter<pcre2_code_free>>;
using CompileContext = std::unique_ptr<pcre2_compile_context, Deleter<pcre2_compile_context_free>>;
using MatchContext = std::unique_ptr<pcre2_match_context, Deleter<pcre2_match_context_free>>;
using MatchData = std::unique_ptr<pcre2_match_data, Deleter<pcre2_match_data_free>>;

constexpr std::size_t kMaxRegexBytes = 4096;
constexpr std::size_t kMaxMatchedName = 1024;  ///< one step may look at a whole name
constexpr unsigned kMaxHeapKiB = 64 * 1024;
/// Nearly all matches take fewer steps. PCRE2 does not tell how many it took, so a match is charged
/// its limit, and one that needs more is begun again with four times the limit.
constexpr std::int64_t kFirstLimit = 128;
constexpr std::int64_t kLookupSteps = 4;  ///< of a plain key, by time
constexpr std::size_t kNone = ~std::size_t{0};

template <class T>
T allocated(T object) {
  if (object == nullptr) throw std::bad_alloc();
  return object;
}

PCRE2_SPTR text(std::string_view s) { return reinterpret_cast<PCRE2_SPTR>(s.data()); }

bool is_plain(std::string_view key) {
  return std::all_of(key.begin(), key.end(), [](unsigned char c) {
    return c < 0x80 && (std::isalnum(c) || c == '_' || c == '-' || c == '.');
  });
}

/// One byte a character: those beyond ASCII, which only a '.' of a plain key matches, become 0xFF.
std::string one_byte_characters(std::string_view module) {
  std::string out;
  out.reserve(module.size());
  for (const char c : module) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x80) out.push_back(c);
    if (byte >= 0xC0) out.push_back('\xFF');
  }
  return out;
}

std::vector<std::size_t> dots_of(std::string_view key) {
  std::vector<std::size_t> dots;
  for (std::size_t i = 0; i < key.size(); ++i) {
    if (key[i] == '.') dots.push_back(i);
  }
  return dots;
}

/// Steps that looking at a whole name once is worth.
std::int64_t steps_of(std::string_view name) {
  return 1 + static_cast<std::int64_t>(name.size()) / 32;
}

}  // namespace

struct NamePatterns::Regex {
  std::string key;
  Code code;

  Regex(std::string k, PatternBudget& budget, const FileCheck& check);
  bool matches(std::string_view module, PatternBudget& budget, const FileCheck& check) const;
};

void PatternBudget::spend(std::int64_t n, const FileCheck& check) {
  check.require(n <= steps, "rank_pattern and alpha_pattern must match all modules within ", kSteps,
                " steps, got patterns that need more");
  steps -= n;
}

NamePatterns::Regex::Regex(std::string k, PatternBudget& budget, const FileCheck& check)
    : key(std::move(k)) {
  check.require(key.size() <= kMaxRegexBytes, "pattern ", Quoted{key}, " must have at most ",
                kMaxRegexBytes, " bytes, got ", key.size());
  // PEFT's own expression, groups included: a key may refer back to them.
  const std::string whole = "(.*\\.)?(" + key + ")$";
  const CompileContext options(allocated(pcre2_compile_context_create(nullptr)));
  pcre2_set_newline(options.get(), PCRE2_NEWLINE_LF);
  int error = 0;
  PCRE2_SIZE where = 0;
  code.reset(pcre2_compile(text(whole), whole.size(),
                           PCRE2_ANCHORED | PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C, &error,
                           &where, options.get()));
  if (code == nullptr) {
    PCRE2_UCHAR message[128] = {};
    pcre2_get_error_message(error, message, sizeof(message));
    check.refuse("pattern ", Quoted{key}, " must be a regular expression, got one with an error: ",
                 reinterpret_cast<const char*>(message));
  }
  std::size_t bytes = 0;
  pcre2_pattern_info(code.get(), PCRE2_INFO_SIZE, &bytes);
  check.require(bytes <= budget.bytes, "rank_pattern and alpha_pattern must take at most ",
                PatternBudget::kBytes, " bytes as compiled regular expressions, got more with ",
                Quoted{key});
  budget.bytes -= bytes;
}

bool NamePatterns::Regex::matches(std::string_view module, PatternBudget& budget,
                                  const FileCheck& check) const {
  check.require(module.size() <= kMaxMatchedName, "module ", Quoted{module},
                " must have a name of at most ", kMaxMatchedName,
                " bytes to be matched with pattern ", Quoted{key}, ", got ", module.size());
  const MatchContext context(allocated(pcre2_match_context_create(nullptr)));
  const MatchData data(allocated(pcre2_match_data_create(1, nullptr)));
  pcre2_set_heap_limit(context.get(), kMaxHeapKiB);
  for (std::int64_t limit = kFirstLimit;; limit *= 4) {
    budget.spend(limit * steps_of(module), check);
    pcre2_set_match_limit(context.get(), static_cast<std::uint32_t>(limit));
    const int result =
        pcre2_match(code.get(), text(module), module.size(), 0, 0, data.get(), context.get());
    if (result == PCRE2_ERROR_MATCHLIMIT) continue;
    check.require(result >= 0 || result == PCRE2_ERROR_NOMATCH, "pattern ", Quoted{key},
                  " must match a module name in ", kMaxHeapKiB, " KiB, got one that fails for ",
                  Quoted{module});
    return result >= 0;
  }
}

NamePatterns::NamePatterns() = default;
NamePatterns::~NamePatterns() = default;
NamePatterns::NamePatterns(NamePatterns&&) noexcept = default;
NamePatterns& NamePatterns::operator=(NamePatterns&&) noexcept = default;

void NamePatterns::add(const std::string& key, PatternBudget& budget, const FileCheck& check) {
  const std::size_t number = numbers_.size();
  numbers_.emplace(key, number);
  if (is_plain(key)) {
    plain_[key.size()][dots_of(key)].emplace(key, number);
  } else {
    regexes_.emplace_back(number, std::make_unique<Regex>(key, budget, check));
  }
}

std::size_t NamePatterns::find_plain(std::string_view module, PatternBudget& budget,
                                     const FileCheck& check) const {
  std::size_t first = kNone;
  if (plain_.empty()) return first;
  const std::string name = one_byte_characters(module);
  budget.spend(steps_of(name), check);
  std::string end;
  for (std::size_t begin = 0; begin <= name.size(); ++begin) {
    if (begin > 0 && name[begin - 1] != '.') continue;
    const auto shapes = plain_.find(name.size() - begin);
    if (shapes == plain_.end()) continue;
    for (const auto& [dots, keys] : shapes->second) {
      budget.spend(kLookupSteps * steps_of(name), check);
      end.assign(name, begin);
      for (const std::size_t dot : dots) end[dot] = '.';
      const auto found = keys.find(end);
      if (found != keys.end()) first = std::min(first, found->second);
    }
  }
  return first;
}

std::optional<std::size_t> NamePatterns::find(std::string_view module, PatternBudget& budget,
                                              const FileCheck& check) const {
  if (numbers_.empty()) return std::nullopt;
  const std::size_t plain = find_plain(module, budget, check);
  for (const auto& [number, regex] : regexes_) {
    if (number > plain) break;
    if (regex->matches(module, budget, check)) return number;
  }
  if (plain != kNone) return plain;
  const auto equal = numbers_.find(std::string(module));
  return equal == numbers_.end() ? std::nullopt : std::optional(equal->second);
}

}  // namespace mortar::adapter_store
