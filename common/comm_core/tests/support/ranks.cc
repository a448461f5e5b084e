#include "ranks.h"

#include <stdexcept>
#include <thread>

namespace comm_core::testing {

void run_ranks(const World& world, const std::function<void(Rank&)>& body) {
  auto store = world.store != nullptr ? world.store : std::make_shared<MemoryStore>();
  std::vector<std::string> failures(size_t(world.size));
  std::vector<std::thread> threads;
  for (int r = 0; r < world.size; ++r) {
    threads.emplace_back([&, r] {
      std::vector<std::shared_ptr<Group>> channels;
      try {
        Options options = world.options;
        options.allow_loopback = true;
        if (world.transport == "tcp") options.transport = TransportChoice::tcp;
        if (world.hosts > 1)
          options.host_id = "host" + std::to_string(r * world.hosts / world.size);
        if (world.change) world.change(r, options);
        Rank rank{r, world.size, std::make_shared<Engine>(options), {}, nullptr};
        rank.forget = [&] {
          channels.clear();
          rank.channels.clear();
          rank.engine.reset();
        };
        for (int c = 0; c < world.channels; ++c) {
          NotesUnder notes(*store, std::to_string(c) + "/");
          rank.channels.push_back(Group::create(rank.engine, notes, r, world.size,
                                                "channel" + std::to_string(c), "",
                                                world.timeout_s));
        }
        channels = rank.channels;
        body(rank);
      } catch (const std::exception& error) {
        failures[size_t(r)] = error.what();
        for (auto& channel : channels) channel->abort("the test failed");
      }
      for (auto& channel : channels) channel->close();
    });
  }
  for (auto& thread : threads) thread.join();
  std::string all;
  for (int r = 0; r < world.size; ++r) {
    if (!failures[size_t(r)].empty())
      all += "\n  rank " + std::to_string(r) + ": " + failures[size_t(r)];
  }
  if (!all.empty()) throw std::runtime_error(all);
}

}  // namespace comm_core::testing
