// Texts: files, parts of a text, and numbers in it.
//
// The core uses no C++ streams. In a process with two copies of the C++ library, streams write
// nothing or crash. Some compilers cause this: they link their own copy into every extension.
#pragma once

#include <charconv>
#include <string>
#include <vector>

namespace comm_core {

// Returns the parts of `text` between separators; empty parts are kept.
std::vector<std::string> split(const std::string& text, char separator);

// Returns the content of a file. If it cannot be read, the result is empty and errno says why.
std::string content_of_file(const std::string& path);

// Reads whole numbers that are separated by one space. Returns whether `text` consists of exactly
// these numbers, and each fits into its variable.
template <typename... Number>
bool read_numbers(const std::string& text, Number&... into) {
  const char *next = text.data(), *const end = next + text.size();
  bool first = true;
  const auto read = [&](auto& number) {
    if (!first && (next == end || *next++ != ' ')) return false;
    first = false;
    const std::from_chars_result result = std::from_chars(next, end, number);
    next = result.ptr;
    return result.ec == std::errc();
  };
  return (read(into) && ...) && next == end;
}

}  // namespace comm_core
