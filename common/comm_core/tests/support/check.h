// Runs named tests in order, and checks what they compute.
#pragma once

#include <cstdio>
#include <exception>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/clock.h"

namespace comm_core::testing {

// Throws if `condition` is false.
inline void expect(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error(what);
}

template <typename E>
bool is(const std::exception_ptr& error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const E&) {
    return true;
  } catch (...) {
  }
  return false;
}

inline void expect_text(const std::string& text, const std::string& part) {
  expect(text.find(part) != std::string::npos, "'" + part + "' is not in: " + text);
}

struct Test {
  const char* name;
  std::function<void()> body;
};

// Runs all, or those whose names contain the first argument.
inline int run_tests(int argc, char** argv, const std::vector<Test>& tests) {
  int failures = 0;
  for (const Test& test : tests) {
    if (argc > 1 && std::string(test.name).find(argv[1]) == std::string::npos) continue;
    printf("%s: ", test.name);
    fflush(stdout);
    const double began = now_s();
    std::string error;
    try {
      test.body();
    } catch (const std::exception& e) {
      error = e.what();
    }
    printf("%s (%.2f s)%s\n", error.empty() ? "right" : "FAILED", now_s() - began, error.c_str());
    failures += !error.empty();
  }
  printf("%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}

}  // namespace comm_core::testing
