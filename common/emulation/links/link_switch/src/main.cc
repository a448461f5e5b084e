// The switch of an emulated cluster: link_switch DEVICE=ADDRESS... [--seed N]
//
// Each device is this end of a host's cable, and ADDRESS the last two bytes of its hardware address
// in decimal; hosts are numbered in this order. Commands come on standard input (commands.h), whose
// end is the end of this program. Prints a line `ready PRIORITY PID` when it works, with its number
// in /proc, which may be an outer one.
#include <fcntl.h>
#include <malloc.h>
#include <poll.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <deque>
#include <exception>
#include <string>
#include <system_error>
#include <unordered_map>
#include <vector>

#include "commands.h"
#include "fabric.h"
#include "port.h"

namespace link_switch {
namespace {

constexpr int64_t kSecond = 1'000'000'000;
// A thread runs some time after its timer, on an idle machine longest: the core slept; and to hand
// a packet on takes time, too. So the timer is set, and packets are handed on, so much earlier that
// half of all are early. Looking at the clock until the very moment was tried: packets came no more
// precisely, and it took more CPU time.
constexpr Nanoseconds kMostEarly = 100'000, kEarlyStep = 100;
// Of the shortest way, an acknowledgement may be late by one part in so many.
constexpr Nanoseconds kLenience = 10;
constexpr Nanoseconds kAhead = 150'000;
// Commands are looked for so often at least.
constexpr Nanoseconds kDeaf = 1'000'000;
// What may wait to be read, of all ports together and of each; 70 KB of memory a packet.
constexpr size_t kMostPackets = 2048, kLeastPackets = 30;

int64_t read_clock(clockid_t clock) {
  timespec now;
  clock_gettime(clock, &now);
  return now.tv_sec * kSecond + now.tv_nsec;
}

void check(bool good, const char* what) {
  if (!good) throw std::system_error(errno, std::generic_category(), what);
}

// The kernel's ear: a packet late by the time that others compute is a packet on a slower network.
const char* take_priority() {
  prctl(PR_SET_TIMERSLACK, 1);
  const sched_param first{10};
  if (sched_setscheduler(0, SCHED_RR, &first) == 0) return "real-time";
  return setpriority(PRIO_PROCESS, 0, -20) == 0 ? "raised" : "ordinary";
}

// By whole microseconds, how much later than due packets had been handed on; some are early.
class Lateness {
 public:
  void add(Nanoseconds late) {
    const auto us = static_cast<size_t>(std::max<Nanoseconds>(0, late + kMostEarly) / 1000);
    ++counts_[std::min(us, counts_.size() - 1)];
    ++total_;
    max_ = std::max(max_, late);
  }
  double quantile_us(double share) const {
    uint64_t seen = 0;
    for (size_t us = 0; us < counts_.size(); ++us) {
      seen += counts_[us];
      if (static_cast<double>(seen) >= share * static_cast<double>(total_)) {
        return static_cast<double>(us) + 0.5 - kMostEarly / 1000;
      }
    }
    return 0;
  }
  double max_us() const { return static_cast<double>(max_) / 1000; }

 private:
  std::array<uint64_t, 65536> counts_{};
  uint64_t total_ = 0;
  Nanoseconds max_ = 0;
};

class Switch {
 public:
  Switch(const std::vector<std::pair<std::string, uint16_t>>& devices, uint64_t seed)
      : fabric_(static_cast<uint32_t>(devices.size()), seed,
                [this](Transit transit) { deliver(transit); }),
        epoll_(epoll_create1(EPOLL_CLOEXEC)) {
    check(epoll_ >= 0, "epoll");
    check(fcntl(STDIN_FILENO, F_SETFL, O_NONBLOCK) == 0, "standard input");
    const size_t share = std::max(kLeastPackets, kMostPackets / devices.size());
    for (const auto& [device, address] : devices) {
      port_of_[address] = static_cast<uint32_t>(ports_.size());
      ports_.emplace_back(device, share);
      // By the edge: a ring with a packet that is on its way always seems to have something.
      epoll_event event{};
      event.events = EPOLLIN | EPOLLET;
      event.data.u64 = ports_.size() - 1;
      check(epoll_ctl(epoll_, EPOLL_CTL_ADD, ports_.back().fd(), &event) == 0, "epoll");
    }
  }

  // Until the input ends.
  void run() {
    while (!ended_) {
      wait(next_task());
      const int64_t offset = read_clock(CLOCK_REALTIME) - read_clock(CLOCK_MONOTONIC);
      for (uint32_t port = 0; port < ports_.size(); ++port) take(port, offset);
      const Nanoseconds then = read_clock(CLOCK_MONOTONIC) + early_;
      fabric_.advance(then, then + horizon());
    }
  }

 private:
  // How far ahead the lines are worked out: what comes from now on is on a second line so much
  // later at least. A little further, so that a frame can be seen to its end when it comes: two
  // that come from two hosts within that time may be taken for having come in the other order.
  Nanoseconds horizon() const { return patience_ > 0 ? patience_ + kAhead : 0; }

  std::optional<Nanoseconds> next_task() const {
    const auto due = fabric_.next_due(patience_ / kLenience), event = fabric_.next_event();
    if (!due && !event) return std::nullopt;
    return std::min(due.value_or(INT64_MAX), event ? *event - horizon() : INT64_MAX) - early_;
  }

  // For packets, commands, or the time that is given.
  void wait(std::optional<Nanoseconds> next) {
    const Nanoseconds now = read_clock(CLOCK_MONOTONIC);
    const Nanoseconds left = next ? std::max<Nanoseconds>(0, *next - now) : 0;
    if (next && left == 0 && now - heard_at_ <= kDeaf) return;
    // Where something is due soon, what comes before that can be looked at then: one waking for
    // both.
    const bool soon = next && left <= patience_;
    const timespec at_most{left / kSecond, left % kSecond};
    std::array<pollfd, 2> heard{{{STDIN_FILENO, POLLIN, 0}, {epoll_, POLLIN, 0}}};
    const int count = ppoll(heard.data(), soon ? 1 : 2, next ? &at_most : nullptr, nullptr);
    check(count >= 0 || errno == EINTR, "poll");
    heard_at_ = read_clock(CLOCK_MONOTONIC);
    if (count <= 0) return;
    if (heard[0].revents != 0) listen();
    if (heard[1].revents != 0) forget_errors();
  }

  // `take` looks at all ports anyhow; here their events are taken off the list.
  void forget_errors() {
    std::array<epoll_event, 64> events;
    const int count = epoll_wait(epoll_, events.data(), events.size(), 0);
    check(count >= 0 || errno == EINTR, "epoll");
    for (int i = 0; i < count; ++i) {
      if ((events[i].events & EPOLLERR) != 0) ports_[events[i].data.u64].forget_error();
    }
  }

  void take(uint32_t from, int64_t offset) {
    while (auto received = ports_[from].receive()) {
      const auto address = received->packet.destination();
      const auto to = address ? port_of_.find(*address) : port_of_.end();
      if (to == port_of_.end() || to->second == from) {
        ++astray_;
        continue;
      }
      const int64_t now = read_clock(CLOCK_MONOTONIC);
      const int64_t sent = received->sent_at - offset;
      // A step of the wall clock must not send a packet to another time.
      const bool sane = sent <= now && sent > now - kSecond;
      fabric_.arrive(std::move(received->packet), from, to->second, sane ? sent : now);
    }
  }

  void deliver(const Transit& transit) {
    if (!ports_[transit.to].send(transit.packet)) ++unsendable_;
    const Nanoseconds late = read_clock(CLOCK_MONOTONIC) - transit.last;
    lateness_.add(late);
    early_ = std::clamp<Nanoseconds>(early_ + (late > 0 ? kEarlyStep : -kEarlyStep), 0, kMostEarly);
  }

  void listen() {
    char buffer[65536];
    const ssize_t count = read(STDIN_FILENO, buffer, sizeof buffer);
    if (count < 0) {
      check(errno == EAGAIN || errno == EINTR, "standard input");
      return;
    }
    ended_ = count == 0;
    input_.append(buffer, static_cast<size_t>(count));
    size_t begin = 0;
    for (size_t end; (end = input_.find('\n', begin)) != std::string::npos; begin = end + 1) {
      answer(obey(fabric_, patience_, input_.substr(begin, end - begin)));
    }
    input_.erase(0, begin);
  }

  void answer(Command command) {
    if (command == Command::sync) std::puts("ok");
    if (command == Command::stats) tell();
    if (command != Command::change) std::fflush(stdout);
  }

  void tell() {
    for (Port& port : ports_) missed_ += port.missed();
    rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    const auto seconds = [](timeval time) {
      return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
    };
    const Counts& counts = fabric_.counts();
    std::printf(
        "{\"packets\": %lu, \"frames\": %lu, \"bytes\": %lu, \"lost\": %lu, \"overflows\": %lu, "
        "\"missed\": %lu, \"unsendable\": %lu, \"astray\": %lu, \"late_us\": {\"median\": %.1f, "
        "\"p99\": %.1f, \"max\": %.1f}, \"cpu_s\": %.6f}\n",
        counts.packets, counts.frames, counts.bytes, counts.lost, counts.overflows, missed_,
        unsendable_, astray_, lateness_.quantile_us(0.5), lateness_.quantile_us(0.99),
        lateness_.max_us(), seconds(usage.ru_utime) + seconds(usage.ru_stime));
    lateness_ = Lateness();  // of the time until the next question
  }

  std::deque<Port> ports_;
  Fabric fabric_;  // its packets lie in the rings of the ports
  std::unordered_map<uint16_t, uint32_t> port_of_;
  int epoll_;  // of all ports
  Nanoseconds patience_ = 0;
  Nanoseconds early_ = 0;
  Nanoseconds heard_at_ = 0;
  std::string input_;
  bool ended_ = false;
  Lateness lateness_;
  uint64_t missed_ = 0, unsendable_ = 0, astray_ = 0;
};

int run(int count, char** words) {
  std::vector<std::pair<std::string, uint16_t>> devices;
  uint64_t seed = 0;
  for (int i = 1; i < count; ++i) {
    const std::string word = words[i];
    const size_t equals = word.find('=');
    if (word == "--seed" && i + 1 < count) {
      seed = std::stoull(words[++i]);
    } else if (equals != std::string::npos) {
      devices.emplace_back(word.substr(0, equals),
                           static_cast<uint16_t>(std::stoul(word.substr(equals + 1))));
    } else {
      std::fprintf(stderr, "usage: link_switch DEVICE=ADDRESS... [--seed N]\n");
      return 2;
    }
  }
  // Memory stays here: to get it anew for each packet costs more than all else.
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  try {
    Switch the_switch(devices, seed);
    char self[32] = "";
    check(readlink("/proc/self", self, sizeof self - 1) > 0, "/proc");
    std::printf("ready %s %s\n", take_priority(), self);
    std::fflush(stdout);
    the_switch.run();
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: the switch has failed: %s\n", error.what());
    return 1;
  }
}

}  // namespace
}  // namespace link_switch

int main(int count, char** words) { return link_switch::run(count, words); }
