// SPDX-License-Identifier: Apache-2.0
// Errors about the files of an adapter: "AdapterStore.open: <path>: <one sentence>".
#pragma once

#include <ostream>
#include <string>
#include <string_view>
#include <utility>

#include "core/check.h"

namespace mortar::adapter_store {

/// Text taken from a file, as a message shows it: quoted, control characters as '?', cut at 160
/// bytes (names in a file can be megabytes long) between two characters of UTF-8.
struct Quoted {
  std::string_view text;
};
std::ostream& operator<<(std::ostream& out, const Quoted& quoted);

/// Throws errors about one file. The arguments are formatted only when a check fails.
class FileCheck {
 public:
  explicit FileCheck(std::string path) : path_(std::move(path)) {}

  const std::string& path() const { return path_; }

  /// The content, or the path itself, is wrong.
  template <class... Args>
  void require(bool condition, const Args&... args) const {
    check(condition, "AdapterStore.open: ", path_, ": ", args...);
  }
  template <class... Args>
  [[noreturn]] void refuse(const Args&... args) const {
    fail(ErrorKind::kValue, concat("AdapterStore.open: ", path_, ": ", args...));
  }
  /// A dtype is wrong.
  template <class... Args>
  void require_type(bool condition, const Args&... args) const {
    check_type(condition, "AdapterStore.open: ", path_, ": ", args...);
  }
  /// The machine failed: `action` set `error_number` (errno).
  [[noreturn]] void fail_io(const char* action, int error_number) const;

 private:
  std::string path_;
};

}  // namespace mortar::adapter_store
