// What the program is told on its standard input, a line each:
//
//   line up|down PORT BITS_PER_S QUEUE_BYTES     0 bits per second: infinitely fast
//   line trunk NUMBER BITS_PER_S QUEUE_BYTES
//   path FROM TO DELAY_NS JITTER_NS LOSS TRUNK   loss from 0 to 1, trunk -1: none
//   sync                                         answered by `ok`
//   stats                                        answered by one line of JSON
#pragma once

#include <string>

#include "fabric.h"

namespace link_switch {

enum class Command { change, sync, stats };

// Does what the line says, or tells what is asked for. Throws std::invalid_argument for a line that
// is not as above.
Command obey(Fabric& fabric, const std::string& line);

}  // namespace link_switch
