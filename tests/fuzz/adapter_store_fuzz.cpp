// SPDX-License-Identifier: Apache-2.0
// The reader under random changes of valid inputs: the same inputs in every run, and no more
// needed than a compiler with sanitizers.
//
//   adapter_store_fuzz [SEED]             changes and reads inputs for MORTAR_FUZZ_SECONDS (60)
//   adapter_store_fuzz --seeds FOLDER     writes the inputs that all others come from
//   adapter_store_fuzz --replay FILE...   reads these inputs again
#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <random>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "adapter_reader.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace mortar::fuzz {
namespace {

std::string current;  ///< the input being read

void write_file(const std::string& path, const std::string& content) {
  std::ofstream(path, std::ios::binary) << content;
}

/// Called when a sanitizer or a broken promise ends the program.
void keep_current() {
  write_file("adapter_store_fuzz.failed", current);
  std::fprintf(stderr, "fuzz: the input is in adapter_store_fuzz.failed (--replay reads it)\n");
}

bool read_current() {
  return read_adapter(reinterpret_cast<const std::uint8_t*>(current.data()), current.size());
}

/// Inserted into inputs: what JSON, the two formats and regular expressions give a meaning to.
constexpr const char* kTokens = R"(
  { } [ ] , : " \u0000 \ud800 \n \\1 null true -1 0 0.5 1e999 é
  18446744073709551615 9223372036854775807 1152921504606846976 4294967296
  F32 BF16 F4 U8 dtype shape data_offsets __metadata__ base_model.model. .lora_A .lora_B
  .default .weight .base_layer r lora_alpha rank_pattern alpha_pattern use_dora
  ( )* .* [^ {9,99} (?= (?R) (*COMMIT) )";

class Mutator {
 public:
  explicit Mutator(std::uint64_t seed) : random_(seed), seeds_(seeds()) {
    std::istringstream tokens(kTokens);
    tokens_.assign(std::istream_iterator<std::string>(tokens), {});
  }

  /// A seed with one to eight changes, its header length repaired in two of three cases.
  std::string next() {
    const std::string& seed = seeds_[below(seeds_.size())];
    Input input = split(reinterpret_cast<const std::uint8_t*>(seed.data()), seed.size());
    for (std::size_t n = 1 + below(1 + below(8)); n > 0; --n) {
      change(below(3) == 0 ? input.config : input.model);
    }
    if (below(3) != 0) repair_header_length(input);
    return join(input);
  }

 private:
  std::size_t below(std::size_t n) { return n == 0 ? 0 : random_() % n; }

  void change(std::string& text) {
    const std::size_t at = below(text.size() + 1);
    const std::size_t length = below(std::min<std::size_t>(text.size() - at, 24) + 1);
    switch (below(8)) {
      case 0:
        if (at < text.size()) text[at] = static_cast<char>(text[at] ^ (1 << below(8)));
        break;
      case 1:
        if (at < text.size()) text[at] = static_cast<char>(below(256));
        break;
      case 2:
        text.erase(at, length);
        break;
      case 3:
        text.insert(at, text.substr(below(text.size() + 1), length));
        break;
      case 4:
        text.insert(at, tokens_[below(tokens_.size())]);
        break;
      case 5:
        replace_number(text, at);
        break;
      case 6:
        text.resize(at);
        break;
      default:
        text.replace(at, length, tokens_[below(tokens_.size())]);
        break;
    }
  }

  /// Changes the next number: by a little, or into one at an edge.
  void replace_number(std::string& text, std::size_t at) {
    constexpr std::string_view kDigits = "0123456789";
    const std::size_t first = text.find_first_of(kDigits, at);
    if (first == std::string::npos) return;
    const std::size_t length =
        std::min(text.find_first_not_of(kDigits, first), text.size()) - first;
    const std::uint64_t old = std::strtoull(text.substr(first, length).c_str(), nullptr, 10);
    const std::uint64_t edges[] = {0,   1,   old + 1,    old - 1,    old * 2,    old / 2, 511,
                                   512, 513, 1ull << 32, 1ull << 61, 1ull << 63, ~0ull};
    text.replace(first, length, std::to_string(edges[below(std::size(edges))]));
  }

  std::mt19937_64 random_;
  std::vector<std::string> seeds_, tokens_;
};

int run(double seconds, std::uint64_t seed) {
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  const auto elapsed = [&] { return std::chrono::duration<double>(Clock::now() - start).count(); };
  Mutator mutator(seed);
  for (const std::string& s : seeds()) {
    current = s;
    read_current();
  }
  std::size_t read = 0, accepted = 0;
  double next_report = 10;
  while (elapsed() < seconds) {
    for (int i = 0; i < 64; ++i, ++read) {
      current = mutator.next();
      accepted += read_current();
    }
    if (elapsed() >= next_report) {
      std::printf("fuzz: mutator: %.0f s, %zu inputs, %zu accepted\n", elapsed(), read, accepted);
      std::fflush(stdout);
      next_report += 10;
    }
  }
  std::printf(
      "fuzz: mutator: seed %llu: %zu inputs in %.0f s, %zu accepted, %zu refused, "
      "no fault found\n",
      static_cast<unsigned long long>(seed), read, elapsed(), accepted, read - accepted);
  return accepted > 0 ? 0 : 1;  // a mutator whose every input is refused tests little
}

}  // namespace
}  // namespace mortar::fuzz

int main(int argc, char** argv) {
  using namespace mortar::fuzz;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_set_death_callback(keep_current);
#endif
  std::signal(SIGABRT, [](int) {
    keep_current();
    std::_Exit(1);
  });
  const std::vector<std::string> args(argv + 1, argv + argc);
  if (args.size() == 2 && args[0] == "--seeds") {
    int number = 0;
    for (const std::string& s : seeds()) write_file(args[1] + "/" + std::to_string(number++), s);
    return 0;
  }
  if (args.size() >= 2 && args[0] == "--replay") {
    for (std::size_t i = 1; i < args.size(); ++i) {
      std::ifstream file(args[i], std::ios::binary);
      current.assign(std::istreambuf_iterator<char>(file), {});
      std::printf("fuzz: %s: %s\n", args[i].c_str(), read_current() ? "accepted" : "refused");
    }
    return 0;
  }
  const char* wanted = std::getenv("MORTAR_FUZZ_SECONDS");
  const double seconds = std::atof(wanted != nullptr ? wanted : "60");
  const std::uint64_t seed = args.empty() ? 1 : std::strtoull(args[0].c_str(), nullptr, 10);
  if (args.size() > 1 || seed == 0 || seconds <= 0) {
    std::fprintf(stderr, "usage: %s [SEED] | --seeds FOLDER | --replay FILE...\n", argv[0]);
    return 2;
  }
  return run(seconds, seed);
}
