// What the program is told on its standard input, a line each:
//
//   line up|down PORT BITS_PER_S QUEUE_BYTES     0 bits per second: infinitely fast
//   line trunk NUMBER BITS_PER_S QUEUE_BYTES
//   path FROM TO DELAY_NS JITTER_NS LOSS TRUNK   loss from 0 to 1, trunk -1: none
//   patience NS                                  how long a packet may wait to be looked at
//   sync                                         answered by `ok`
//   stats                                        answered by one line of JSON
#pragma once

#include <string>

#include "fabric.h"

namespace link_switch {

enum class Command { change, sync, stats };

// Does what the line says, to the fabric or to `patience`, or tells what is asked for. Throws
// std::invalid_argument for a line that is not as above.
Command obey(Fabric& fabric, Nanoseconds& patience, const std::string& line);

}  // namespace link_switch
