// SPDX-License-Identifier: Apache-2.0
#include "adapter_store/diagnostics.h"

#include <system_error>

namespace mortar::adapter_store {

std::ostream& operator<<(std::ostream& out, const Quoted& quoted) {
  constexpr std::size_t kMaxBytes = 160;
  std::string_view text = quoted.text;
  if (text.size() > kMaxBytes) {
    std::size_t end = kMaxBytes;
    while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) --end;
    text = text.substr(0, end);
  }
  out << '\'';
  for (char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    out << (byte < 0x20 || byte == 0x7F ? '?' : c);
  }
  return out << (text.size() < quoted.text.size() ? "...'" : "'");
}

void FileCheck::fail_io(const char* action, int error_number) const {
  fail(ErrorKind::kRuntime, concat("AdapterStore.open: ", path_, ": cannot ", action, ": ",
                                   std::generic_category().message(error_number)));
}

}  // namespace mortar::adapter_store
