#include "base/errors.h"

#include <cerrno>
#include <cstring>

namespace comm_core {

std::exception_ptr CommError::with(const std::string& prefix) const {
  return std::make_exception_ptr(SystemError(prefix + what()));
}

void throw_errno(const std::string& what) { throw SystemError(what + ": " + strerror(errno)); }

std::exception_ptr with_context(const std::exception_ptr& error, const std::string& prefix) {
  try {
    std::rethrow_exception(error);
  } catch (const CommError& e) {
    return e.with(prefix);
  } catch (const std::exception& e) {
    return CommError(e.what()).with(prefix);
  }
}

std::string message_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return e.what();
  }
}

}  // namespace comm_core
