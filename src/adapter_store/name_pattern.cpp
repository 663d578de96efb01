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

constexpr std::size_t kMaxPatternBytes = 4096;
constexpr unsigned kMaxHeapKiB = 64 * 1024;

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

/// Does a plain key match the end of `module`?
bool ends_with_plain(std::string_view module, std::string_view key) {
  std::size_t end = module.size();
  for (std::size_t i = key.size(); i-- > 0;) {
    if (end == 0) return false;
    --end;
    if (key[i] == '.') {  // any one character, which in UTF-8 may be several bytes
      while (end > 0 && (static_cast<unsigned char>(module[end]) & 0xC0) == 0x80) --end;
    } else if (module[end] != key[i]) {
      return false;
    }
  }
  return end == 0 || module[end - 1] == '.';
}

}  // namespace

struct NamePattern::Regex {
  Code code;
  MatchContext context;
};

NamePattern::NamePattern(std::string key, const FileCheck& check) : key_(std::move(key)) {
  if (is_plain(key_)) return;
  check.require(key_.size() <= kMaxPatternBytes, "pattern ", Quoted{key_}, " must have at most ",
                kMaxPatternBytes, " bytes, got ", key_.size());
  // PEFT's own expression, groups included: a key may refer back to them.
  const std::string whole = "(.*\\.)?(" + key_ + ")$";
  const CompileContext options(allocated(pcre2_compile_context_create(nullptr)));
  pcre2_set_newline(options.get(), PCRE2_NEWLINE_LF);
  int error = 0;
  PCRE2_SIZE where = 0;
  auto regex = std::make_shared<Regex>();
  regex->code.reset(pcre2_compile(text(whole), whole.size(),
                                  PCRE2_ANCHORED | PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C,
                                  &error, &where, options.get()));
  if (regex->code == nullptr) {
    PCRE2_UCHAR message[128] = {};
    pcre2_get_error_message(error, message, sizeof(message));
    check.refuse("pattern ", Quoted{key_}, " must be a regular expression, got one with an error: ",
                 reinterpret_cast<const char*>(message));
  }
  regex->context.reset(allocated(pcre2_match_context_create(nullptr)));
  pcre2_set_match_limit(regex->context.get(), kMaxMatchSteps);
  pcre2_set_heap_limit(regex->context.get(), kMaxHeapKiB);
  regex_ = std::move(regex);
}

bool NamePattern::matches(std::string_view module, const FileCheck& check) const {
  if (regex_ == nullptr) return ends_with_plain(module, key_);
  const MatchData data(
      allocated(pcre2_match_data_create_from_pattern(regex_->code.get(), nullptr)));
  const int result = pcre2_match(regex_->code.get(), text(module), module.size(), 0, 0, data.get(),
                                 regex_->context.get());
  check.require(result >= 0 || result == PCRE2_ERROR_NOMATCH, "pattern ", Quoted{key_},
                " must match a module name within ", kMaxMatchSteps,
                " steps, got one that needs more for ", Quoted{module});
  return result >= 0;
}

}  // namespace mortar::adapter_store
