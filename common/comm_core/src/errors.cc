#include "errors.h"

#include <cerrno>
#include <cstring>

namespace comm_core {

void throw_errno(const std::string& what) { throw SystemError(what + ": " + strerror(errno)); }

}  // namespace comm_core
