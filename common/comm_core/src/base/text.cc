#include "base/text.h"

#include <cstdio>

namespace comm_core {

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  size_t begin = 0;
  for (size_t end; (end = text.find(separator, begin)) != std::string::npos; begin = end + 1) {
    parts.push_back(text.substr(begin, end - begin));
  }
  parts.push_back(text.substr(begin));
  return parts;
}

std::string content_of_file(const std::string& path) {
  std::string content;
  FILE* const file = fopen(path.c_str(), "rbe");
  if (file == nullptr) return content;
  char block[4096];
  for (size_t got; (got = fread(block, 1, sizeof block, file)) > 0;) content.append(block, got);
  fclose(file);
  return content;
}

}  // namespace comm_core
