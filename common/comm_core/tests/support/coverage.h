// Coverage of the sources that are compiled with -fsanitize-coverage=trace-pc.
#pragma once

#include <cstddef>

namespace comm_core::testing {

// Returns the number of pairs of consecutive basic blocks that have run so far.
size_t edges_run();

}  // namespace comm_core::testing
