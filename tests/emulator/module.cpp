// SPDX-License-Identifier: Apache-2.0
#include "module.h"

#include <dlfcn.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>

#include "memory.h"

#ifndef EMULATOR_FOLDER
#error "EMULATOR_FOLDER: where translate.py lies"
#endif

namespace emulator {
namespace {

std::mutex mutex;
std::map<const void*, std::unique_ptr<Kernel>>& kernels() {
  static auto* map = new std::map<const void*, std::unique_ptr<Kernel>>;
  return *map;
}
std::map<std::string, u64>& variables() {
  static auto* map = new std::map<std::string, u64>;
  return *map;
}

std::string cache_folder() {
  const char* given = std::getenv("MORTAR_EMULATOR_CACHE");
  const char* home = std::getenv("HOME");
  const std::filesystem::path folder =
      given ? given : std::filesystem::path(home ? home : ".") / ".cache/mortar_emulator";
  std::filesystem::create_directories(folder);
  return folder.string();
}

/// As its header says.
std::size_t fatbin_bytes(const void* fatbin) {
  struct Header {
    unsigned magic;
    unsigned short version, header_bytes;
    unsigned long long bytes;
  };
  const auto* header = static_cast<const Header*>(fatbin);
  return header->header_bytes + header->bytes;
}

/// Writes the fat binary into a new file.
std::string fatbin_file(const void* fatbin) {
  std::string name = std::filesystem::temp_directory_path() / "emulator_XXXXXX";
  const int file = mkstemp(name.data());
  const std::size_t total = fatbin_bytes(fatbin);
  if (file < 0 || write(file, fatbin, total) != static_cast<ssize_t>(total)) std::abort();
  close(file);
  return name;
}

u64 variable(const void* fatbin, const std::string& name, std::size_t bytes,
             const std::string& hex) {
  std::ostringstream key;
  key << fatbin << name;
  u64& at = variables()[key.str()];
  if (at != 0) return at;
  auto* p = static_cast<unsigned char*>(device_malloc(bytes));
  std::memset(p, 0, bytes);
  for (std::size_t i = 0; hex != "-" && 2 * i + 1 < hex.size(); ++i) {
    p[i] = static_cast<unsigned char>(std::stoul(hex.substr(2 * i, 2), nullptr, 16));
  }
  return at = reinterpret_cast<u64>(p);
}

u64 hash(u64 h, const void* data, std::size_t bytes) {
  const auto* p = static_cast<const unsigned char*>(data);
  for (; bytes >= 8; bytes -= 8, p += 8) {
    u64 word;
    std::memcpy(&word, p, 8);
    h = (h ^ word) * 0x9e3779b97f4a7c15ull;
    h ^= h >> 29;
  }
  for (; bytes > 0; --bytes) h = (h ^ *p++) * 0x100000001b3ull;
  return h;
}

/// Of the translator's own text.
u64 translator() {
  static const u64 known = [] {
    u64 h = 1;
    std::set<std::filesystem::path> sources;
    for (const auto& entry : std::filesystem::directory_iterator(EMULATOR_FOLDER)) {
      const auto& path = entry.path();
      if (path.extension() == ".py" || path.filename() == "kernel.h" ||
          path.filename() == "convert.h") {
        sources.insert(path);
      }
    }
    for (const auto& path : sources) {
      std::ifstream file(path);
      std::ostringstream text;
      text << file.rdbuf();
      h = hash(h, text.str().data(), text.str().size());
    }
    return h;
  }();
  return known;
}

std::string run_translator(const Kernel& kernel);

/// The path of the kernel's description; asks the translator only if the cache has none.
std::string translate(const Kernel& kernel) {
  u64 h = hash(translator(), kernel.fatbin, fatbin_bytes(kernel.fatbin));
  h = hash(h, kernel.name.data(), kernel.name.size());
  const char* dropped = std::getenv("MORTAR_EMULATOR_DROP");
  if (dropped != nullptr) h = hash(h, dropped, std::strlen(dropped));
  char name[32];
  std::snprintf(name, sizeof name, "/%016llx.is", h);
  const std::string link = cache_folder() + name;
  std::string path;
  if (std::ifstream file(link); std::getline(file, path) && access(path.c_str(), R_OK) == 0) {
    return path;
  }
  path = run_translator(kernel);
  if (!path.empty()) {
    const std::string made = link + std::to_string(getpid());
    std::ofstream(made) << path << "\n";
    std::rename(made.c_str(), link.c_str());
  }
  return path;
}

std::string run_translator(const Kernel& kernel) {
  const std::string fatbin = fatbin_file(kernel.fatbin);
  const std::string command = "python3 " EMULATOR_FOLDER "/translate.py " + fatbin + " " +
                              cache_folder() + " '" + kernel.name + "'";
  FILE* pipe = popen(command.c_str(), "r");
  std::string path;
  char line[4096];
  while (pipe != nullptr && std::fgets(line, sizeof line, pipe) != nullptr) path = line;
  const bool done = pipe != nullptr && pclose(pipe) == 0;
  unlink(fatbin.c_str());
  if (!done || path.empty()) return {};
  path.pop_back();
  return path;
}

bool load(Kernel& kernel) {
  const std::string path = translate(kernel);
  if (path.empty()) return false;
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line) && line != "instructions") {
    std::istringstream words(line);
    std::string what;
    words >> what;
    if (what == "library") {
      std::string library;
      words >> library;
      void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
      if (handle == nullptr) {
        std::fprintf(stderr, "emulator: %s\n", dlerror());
        return false;
      }
      kernel.entry = reinterpret_cast<void (*)(Thread*)>(dlsym(handle, "kernel"));
    } else if (what == "static_smem") {
      words >> kernel.static_smem;
    } else if (what == "param_bytes") {
      words >> kernel.param_bytes;
    } else if (what == "max_threads") {
      words >> kernel.max_threads;
    } else if (what == "param") {
      unsigned offset = 0, size = 0;
      words >> offset >> size;
      kernel.params.emplace_back(offset, size);
    } else if (what == "symbol") {
      std::string name, hex;
      std::size_t align = 0, size = 0;
      words >> name >> align >> size >> hex;
      kernel.symbols.push_back(variable(kernel.fatbin, name, size, hex));
    }
  }
  while (std::getline(file, line)) kernel.instructions.push_back(line);
  kernel.loaded = kernel.entry != nullptr;
  return kernel.loaded;
}

}  // namespace

void register_kernel(const void* fatbin, const void* host_function, const char* name) {
  const std::lock_guard lock(mutex);
  auto kernel = std::make_unique<Kernel>();
  kernel->fatbin = fatbin;
  kernel->name = name;
  kernels()[host_function] = std::move(kernel);
}

Kernel* find_kernel(const void* host_function) {
  const std::lock_guard lock(mutex);
  const auto found = kernels().find(host_function);
  if (found == kernels().end()) return nullptr;
  Kernel& kernel = *found->second;
  return kernel.loaded || load(kernel) ? &kernel : nullptr;
}

}  // namespace emulator
