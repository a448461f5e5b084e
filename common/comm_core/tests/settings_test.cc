// Tests the users' settings and addresses: valid values, refused values, and settings that must be
// the same on all ranks.
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <fstream>

#include "base/errors.h"
#include "base/text.h"
#include "engine/options.h"
#include "run_tests.h"
#include "transport/address.h"

using namespace comm_core;
using namespace comm_core::testing;

namespace {

// Sets environment variables during its lifetime.
class Environment {
 public:
  Environment(std::initializer_list<std::pair<const char*, std::string>> variables) {
    for (const auto& [name, value] : variables) {
      setenv(name, value.c_str(), 1);
      names_.push_back(name);
    }
  }
  ~Environment() {
    for (const char* name : names_) unsetenv(name);
  }

 private:
  std::vector<const char*> names_;
};

template <typename E, typename F>
void expect_error(const F& work, const std::string& text) {
  try {
    work();
  } catch (const E& error) {
    return expect_text(error.what(), text);
  }
  throw std::runtime_error("missing error: " + text);
}

void every_setting_is_read() {
  const Options none = Options::from_environment();
  expect(none.transport == TransportChoice::automatic && none.tcp_small == 32768 &&
             none.secret.empty() && !none.allow_loopback,
         "wrong defaults");
  const Environment all{{"COMM_CORE_TRANSPORT", "tcp"},        {"COMM_CORE_IFNAME", "eth7"},
                        {"COMM_CORE_HOST_ID", "here"},         {"COMM_CORE_ALLOW_LOOPBACK", "1"},
                        {"COMM_CORE_TCP_CONGESTION", "reno"},  {"COMM_CORE_TCP_SEND_BUFFER", "1"},
                        {"COMM_CORE_TCP_RECEIVE_BUFFER", "2"}, {"COMM_CORE_TCP_SMALL", "3"},
                        {"COMM_CORE_TCP_CHUNK", "4096"},       {"COMM_CORE_TCP_EAGER", "5"},
                        {"COMM_CORE_SHM_SLOT", "8192"},        {"COMM_CORE_SHM_FLAT", "7"},
                        {"COMM_CORE_SHM_DIRECT", "8"},         {"COMM_CORE_SHM_STREAM", "9"},
                        {"COMM_CORE_TCP_DIRECT", "10"},        {"COMM_CORE_TIME_SCALE", "2.5"}};
  const Options o = Options::from_environment();
  expect(o.transport == TransportChoice::tcp && o.interface == "eth7" && o.host_id == "here" &&
             o.allow_loopback && o.sockets.congestion == "reno" && o.sockets.send_buffer == 1 &&
             o.sockets.receive_buffer == 2,
         "wrong values of the text settings");
  expect(o.tcp_small == 3 && o.tcp_chunk == 4096 && o.tcp_eager == 5 && o.shm_slot == 8192 &&
             o.shm_flat == 7 && o.shm_direct == 8 && o.shm_stream == 9 && o.tcp_direct == 10,
         "wrong values of the size settings");
  expect(o.time_scale == 2.5 && none.time_scale == 1, "wrong time scale");
  expect(host_identity(o) == "here" && host_identity(none) != "here", "wrong identities");
  const Environment shm{{"COMM_CORE_TRANSPORT", "shm"}};
  expect(Options::from_environment().transport == TransportChoice::shm, "the transport is not shm");
}

void what_is_none_is_refused() {
  const std::pair<const char*, const char*> wrong[] = {
      {"COMM_CORE_TRANSPORT", "pigeon"},  {"COMM_CORE_TCP_CHUNK", "4095"},
      {"COMM_CORE_TCP_SMALL", "-1"},      {"COMM_CORE_SHM_FLAT", "12k"},
      {"COMM_CORE_SHM_SLOT", "100"},      {"COMM_CORE_TCP_EAGER", "2000000000"},
      {"COMM_CORE_TIME_SCALE", "0"},      {"COMM_CORE_TIME_SCALE", "inf"},
      {"COMM_CORE_TIME_SCALE", "2x"},     {"COMM_CORE_SECRET_FILE", "/none"},
      {"COMM_CORE_ALLOW_LOOPBACK", "yes"}};
  for (const auto& [name, value] : wrong) {
    const Environment one{{name, value}};
    expect_error<InvalidRequestError>([] { Options::from_environment(); },
                                      std::string(name) + "=" + value);
  }
}

void a_misspelled_variable_is_refused() {
  const Environment all{{"COMM_CORE_TCP_CHUNK", "4096"}, {"COMM_CORE_TCP_CHUNKS", "8192"}};
  expect_error<InvalidRequestError>([] { Options::from_environment(); },
                                    "unknown variable COMM_CORE_TCP_CHUNKS; the core reads "
                                    "COMM_CORE_TRANSPORT, COMM_CORE_IFNAME, ");
}

void variables_of_others_are_left_alone() {
  const Environment others{{"COMM_CORE_PORT_80_TCP", "tcp://10.0.0.1:80"},
                           {"COMM_CORE_SERVICE_HOST", "10.0.0.1"},
                           {"COMM_CORE_TCP_CHUNKS", ""},
                           {"COMM_CORE", "yes"},
                           {"COMM_CORE_ALLOW_LOOPBACK", "0"}};
  expect(!Options::from_environment().allow_loopback, "0 allows loopback");
}

void what_ranks_must_share_is_told_apart() {
  const std::string usual = Options::from_environment().agreed();
  const std::pair<const char*, const char*> deciding[] = {{"COMM_CORE_TRANSPORT", "tcp"},
                                                          {"COMM_CORE_TCP_SMALL", "1"},
                                                          {"COMM_CORE_TCP_EAGER", "1"},
                                                          {"COMM_CORE_SHM_FLAT", "1"},
                                                          {"COMM_CORE_SHM_DIRECT", "1"}};
  for (const auto& [name, value] : deciding) {
    const Environment one{{name, value}};
    const std::string agreed = Options::from_environment().agreed();
    expect(agreed != usual, std::string(name) + " is not compared");
    expect_text(agreed, std::string(name) + "=" + value);
  }
  const Environment free{{"COMM_CORE_IFNAME", "eth7"}, {"COMM_CORE_TCP_CHUNK", "5000"}};
  expect(Options::from_environment().agreed() == usual, "a setting that may differ is compared");
}

void a_secret_is_compared_and_not_told() {
  char path[] = "/tmp/comm_core-secret-XXXXXX";
  close(mkstemp(path));
  const Environment file{{"COMM_CORE_SECRET_FILE", path}};
  expect_error<InvalidRequestError>([] { Options::from_environment(); }, "less than 16 bytes");
  std::string last;
  for (const char* secret : {"0123456789abcdef", "0123456789abcdeg"}) {
    std::ofstream(path) << secret;
    const Options options = Options::from_environment();
    expect(options.secret == secret, "wrong secret");
    const std::string agreed = options.agreed();
    expect(agreed != last && agreed.find(secret) == std::string::npos, "shown, or not compared");
    last = agreed;
  }
  unlink(path);
}

void addresses() {
  const Address v4 = Address::parse("10.1.2.3", 42), v6 = Address::parse("fe80::1", 43);
  expect(v4.host() == "10.1.2.3" && v4.port() == 42 && v4.text() == "10.1.2.3:42", v4.text());
  expect(v6.host() == "fe80::1" && v6.port() == 43 && v6.text() == "[fe80::1]:43", v6.text());
  expect(!v4.is_loopback() && !v6.is_loopback(), "taken for a loopback address");
  expect(Address::parse("127.0.0.9", 0).is_loopback() && Address::parse("::1", 0).is_loopback(),
         "not taken for a loopback address");
  expect_error<InvalidRequestError>([] { Address::parse("localhost", 1); }, "not a numeric");

  expect(address_of_interface("lo") == "127.0.0.1", "lo has " + address_of_interface("lo"));
  expect_error<InvalidRequestError>([] { address_of_interface("nope0"); }, "there are: ");
  expect(!interfaces().empty(), "no interfaces");
  expect(address_towards("127.0.0.1") == "127.0.0.1", address_towards("127.0.0.1"));
  expect_error<InvalidRequestError>([] { address_towards("no such host."); }, "cannot resolve");
}

void texts() {
  const std::vector<std::string> parts = split("a  b", ' ');
  expect(parts.size() == 3 && parts[0] == "a" && parts[1].empty() && parts[2] == "b", "split");
  expect(split("", ' ').size() == 1, "parts of nothing");

  size_t size = 0;
  int number = 0;
  expect(read_numbers("4096 -7", size, number) && size == 4096 && number == -7, "numbers");
  for (const char* wrong :
       {"", "1", "1 ", "1 2 ", "1 2 3", "1  2", " 1 2", "-1 2", "1 x", "1 99999999999"}) {
    expect(!read_numbers(wrong, size, number), "takes '" + std::string(wrong) + "'");
  }

  errno = 0;
  expect(content_of_file("/nowhere").empty() && errno == ENOENT, "a file that is not there");
  expect(content_of_file("/proc/self/comm") == "settings_test\n", "content");
}

void what_is_thrown_keeps_its_kind() {
  const auto prefixed = with_context(std::make_exception_ptr(TimeoutError("late")), "it: ");
  expect(is<TimeoutError>(prefixed) && message_of(prefixed) == "it: late", message_of(prefixed));
  const auto foreign = with_context(std::make_exception_ptr(std::bad_alloc()), "it: ");
  expect(is<SystemError>(foreign), "not a SystemError");
  expect_text(message_of(foreign), "it: ");
}

}  // namespace

int main(int argc, char** argv) {
  return run_tests(argc, argv,
                   {{"every setting is read", every_setting_is_read},
                    {"refused", what_is_none_is_refused},
                    {"misspelled", a_misspelled_variable_is_refused},
                    {"others", variables_of_others_are_left_alone},
                    {"shared", what_ranks_must_share_is_told_apart},
                    {"secret", a_secret_is_compared_and_not_told},
                    {"addresses", addresses},
                    {"texts", texts},
                    {"errors", what_is_thrown_keeps_its_kind}});
}
