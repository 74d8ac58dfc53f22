// Where the processes of one host wait for one another: a barrier of words in memory that they share.
//
//   words [1 + R, 16], a cache line a row, zero at first
//   row 0      [0] ranks that have arrived at this generation
//              [1] state, the word that is waited on: 2 * generations passed, modulo 2^32, + 1 where broken off
//   row 1 + r  [0] generations that rank r has arrived at; the rest is the caller's
//
// Every rank arrives at every generation, in order. The last to come moves the state and wakes all others: one wake.
// Between release and acquire on these words, whatever a rank wrote before it arrived is seen by all that have met.
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cmath>
#include <cstring>
#include <ctime>
#include <system_error>

#include "areas.hpp"
#include "arrays.hpp"

namespace leafsum {
namespace {

constexpr int64_t WORDS_PER_ROW = 16;
constexpr uint32_t BROKEN = 1;
constexpr uint32_t ONE_GENERATION = 2;

enum Seen { WAITING = 0, MET = 1, BROKEN_OFF = 2 };

struct Words {
  uint32_t* data;
  int64_t num_ranks;

  explicit Words(py::array& array)
      : data(reinterpret_cast<uint32_t*>(write<int32_t>("words", array, {{"1+R"}, {"W", WORDS_PER_ROW}}))),
        num_ranks(array.shape(0) - 1) {
    if (num_ranks < 1) fail_value("words", "rows of at least one rank", std::to_string(num_ranks));
  }
  uint32_t* num_arrived() const { return data; }
  uint32_t* state() const { return data + 1; }
  uint32_t* arrivals_of(int64_t rank) const { return data + (1 + rank) * WORDS_PER_ROW; }
};

// FUTEX_WAIT and FUTEX_WAKE without FUTEX_PRIVATE_FLAG: the waiters are processes, each with a mapping of its own.
void wake_all(uint32_t* word) { syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

// Sleeps while *word is `expected`, until a moment of CLOCK_MONOTONIC. 0, or the errno of the wait.
int sleep_on(uint32_t* word, uint32_t expected, const timespec& until) {
  const long failed = syscall(SYS_futex, word, FUTEX_WAIT_BITSET, expected, &until, nullptr, FUTEX_BITSET_MATCH_ANY);
  return failed ? errno : 0;
}

timespec moment(double seconds) {
  const double whole = std::floor(seconds);
  return {static_cast<time_t>(whole), static_cast<long>((seconds - whole) * 1e9)};
}

void arrive(const Words& words, int64_t rank) {
  if (rank < 0 || rank >= words.num_ranks) {
    fail_value("rank", "0 to " + std::to_string(words.num_ranks - 1), std::to_string(rank));
  }
  if (__atomic_add_fetch(words.num_arrived(), 1, __ATOMIC_ACQ_REL) == static_cast<uint32_t>(words.num_ranks)) {
    // Nobody arrives again before the state has moved, so the order of these two is enough.
    __atomic_store_n(words.num_arrived(), 0, __ATOMIC_RELAXED);
    __atomic_add_fetch(words.state(), ONE_GENERATION, __ATOMIC_ACQ_REL);
    wake_all(words.state());
  }
  // After the count: a rank that dies in between is taken for one that never came, not for one to wait for.
  __atomic_add_fetch(words.arrivals_of(rank), 1, __ATOMIC_RELEASE);
}

// A signal ends the wait early, so that Python's handlers run.
Seen wait(const Words& words, uint32_t generation, const timespec& until) {
  for (;;) {
    const uint32_t state = __atomic_load_n(words.state(), __ATOMIC_ACQUIRE);
    if (state / ONE_GENERATION != generation) return MET;
    if (state & BROKEN) return BROKEN_OFF;
    const int error = sleep_on(words.state(), state, until);
    if (error == ETIMEDOUT || error == EINTR) return WAITING;
    if (error && error != EAGAIN) throw std::system_error(error, std::generic_category(), "futex wait");
  }
}

int wait_until(const Words& words, uint32_t generation, double until_s) {
  const timespec until = moment(std::max(0.0, until_s));
  Seen seen = WAITING;
  without_gil([&] { seen = wait(words, generation, until); });
  return seen;
}

void break_off(const Words& words) {
  __atomic_or_fetch(words.state(), BROKEN, __ATOMIC_ACQ_REL);
  wake_all(words.state());
}

// Between addresses: the tensors on one side need no views, and the areas on the other are no tensors.
void copy_pieces(uintptr_t source, int64_t source_stride, uintptr_t target, int64_t target_stride, int64_t size,
                 int64_t num_pieces) {
  without_gil([=] {
    for (int64_t piece = 0; piece < num_pieces; ++piece) {
      std::memcpy(reinterpret_cast<char*>(target) + piece * target_stride,
                  reinterpret_cast<const char*>(source) + piece * source_stride, size);
    }
  });
}

}  // namespace

void register_meeting(py::module_& module) {
  module.attr("MEETING_WAITING") = static_cast<int>(WAITING);
  module.attr("MEETING_MET") = static_cast<int>(MET);
  module.attr("MEETING_BROKEN_OFF") = static_cast<int>(BROKEN_OFF);
  module.def(
      "meeting_arrive", [](py::array words, int64_t rank) { arrive(Words(words), rank); }, py::arg("words"),
      py::arg("rank"));
  module.def(
      "meeting_wait",
      [](py::array words, uint32_t generation, double until_s) {
        return wait_until(Words(words), generation, until_s);
      },
      py::arg("words"), py::arg("generation"), py::arg("until_s"));
  module.def(
      "meeting_pass",
      [](py::array words_array, int64_t rank, uint32_t generation, double until_s) {
        const Words words(words_array);
        arrive(words, rank);
        return wait_until(words, generation, until_s);
      },
      py::arg("words"), py::arg("rank"), py::arg("generation"), py::arg("until_s"));
  module.def("meeting_break_off", [](py::array words) { break_off(Words(words)); }, py::arg("words"));
  module.def("copy_pieces", &copy_pieces, py::arg("source"), py::arg("source_stride"), py::arg("target"),
             py::arg("target_stride"), py::arg("size"), py::arg("num_pieces"));
}

}  // namespace leafsum
