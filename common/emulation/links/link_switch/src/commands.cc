#include "commands.h"

#include <limits>
#include <sstream>
#include <stdexcept>

namespace link_switch {

Command obey(Fabric& fabric, Nanoseconds& patience, const std::string& line) {
  std::istringstream words(line);
  std::string verb;
  words >> verb;
  const auto ended = [&] {
    std::string more;
    return !words.fail() && !(words >> more);
  };
  if (verb == "sync" && ended()) return Command::sync;
  if (verb == "stats" && ended()) return Command::stats;
  const auto wrong = [&] { return std::invalid_argument("not a command: " + line); };
  if (verb == "patience") {
    Nanoseconds given = -1;
    words >> given;
    if (!ended() || given < 0) throw wrong();
    patience = given;
    return Command::change;
  }
  const uint32_t ports = fabric.ports();
  if (verb == "line") {
    std::string kind;
    uint32_t number = 0;
    double bits_per_s = 0;
    uint64_t queue_bytes = 0;
    words >> kind >> number >> bits_per_s >> queue_bytes;
    if (!ended() || bits_per_s < 0) throw wrong();
    if (kind == "trunk" && number < Fabric::kMaxTrunks) {
      fabric.trunk(number).set(bits_per_s, queue_bytes);
    } else if ((kind == "up" || kind == "down") && number < ports) {
      (kind == "up" ? fabric.up(number) : fabric.down(number)).set(bits_per_s, queue_bytes);
    } else {
      throw wrong();
    }
    return Command::change;
  }
  uint32_t from = 0, to = 0;
  int64_t trunk = -1;
  Path path;
  words >> from >> to >> path.delay >> path.jitter >> path.loss >> trunk;
  const bool sane = path.delay >= 0 && path.jitter >= 0 && path.jitter <= path.delay &&
                    path.loss >= 0 && path.loss < 1 && trunk < int64_t{Fabric::kMaxTrunks};
  if (verb != "path" || !ended() || from >= ports || to >= ports || !sane) throw wrong();
  if (trunk >= 0) {
    path.trunk = static_cast<uint32_t>(trunk);
    fabric.trunk(*path.trunk);
  }
  path.latest = fabric.path(from, to).latest;
  fabric.path(from, to) = path;
  return Command::change;
}

}  // namespace link_switch
