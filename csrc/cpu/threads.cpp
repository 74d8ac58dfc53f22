#include "threads.hpp"

#include <pthread.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "poison.hpp"

namespace leafsum {
namespace {

// What a thread must be given to be woken. A hand-off takes 7 us on an idle machine and 30 us on a busy one: there two
// threads took 108 us for 95 us of work, and 153 for 204.
std::atomic<double> least_ns_per_thread{75e3};

std::atomic<int64_t> counted_cpu_ns{0};

int64_t clock_ns(clockid_t clock) {
  timespec now;
  clock_gettime(clock, &now);
  return int64_t{1000000000} * now.tv_sec + now.tv_nsec;
}

// Adds the CPU time that its thread uses from here to the end of the block to what kernels have used.
//
// To read a thread's CPU clock is a system call: 800 ns on a virtual machine, which twice a job would be a tenth of a
// small model's decode step, whose 200 jobs take 2 us each. A small job is timed by the wall instead, in 30 ns. A
// thread that loses its core meanwhile would count that too, so such a job counts at most ten times what is small:
// weights that no cache holds take six times what is expected of them.
class CountedCpu {
 public:
  explicit CountedCpu(double expected_ns)
      : clock_(expected_ns < SMALL_NS ? CLOCK_MONOTONIC : CLOCK_THREAD_CPUTIME_ID), begin_ns_(clock_ns(clock_)) {}
  ~CountedCpu() {
    const int64_t used_ns = clock_ns(clock_) - begin_ns_;
    counted_cpu_ns += clock_ == CLOCK_MONOTONIC ? std::min(used_ns, 10 * SMALL_NS) : used_ns;
  }
  CountedCpu(const CountedCpu&) = delete;
  CountedCpu& operator=(const CountedCpu&) = delete;

 private:
  static constexpr int64_t SMALL_NS = 50000;
  const clockid_t clock_;
  const int64_t begin_ns_;
};

// One job at a time. A job has as many tickets as it wants helpers; a worker sleeps until there is one that it has not
// had, works, and reports. The caller works too, takes back the tickets of workers that have not come by then, and
// sleeps until the others have reported, so that the job outlives its use.
class ThreadPool {
 public:
  void resize(int num_threads) {
    std::lock_guard<std::mutex> one_job(job_mutex_);
    stop();
    num_threads_ = num_threads;
  }

  int num_threads() const { return num_threads_; }

  void run(int64_t count, double task_ns, const Body& body) {
    const double job_ns = count * task_ns;
    const int num_helpers = worth(count, task_ns) - 1;
    if (num_helpers >= 1) {
      std::unique_lock<std::mutex> one_job(job_mutex_, std::try_to_lock);
      if (one_job.owns_lock()) return run_with(num_helpers, count, job_ns, body);
    }
    const CountedCpu counted(job_ns);
    for (int64_t task = 0; task < count; ++task) body(task);
  }

  void run_on_every_thread(const std::function<void()>& body) {
    std::lock_guard<std::mutex> one_job(job_mutex_);
    start();
    share(body, static_cast<int>(workers_.size()), false);
  }

 private:
  // The threads that a job keeps busy.
  int worth(int64_t count, double task_ns) const {
    const double least_ns = least_ns_per_thread;
    const double most = least_ns > 0 ? std::min<double>(count, count * task_ns / least_ns) : count;
    return static_cast<int>(std::min<double>(most, num_threads_));
  }

  void run_with(int num_helpers, int64_t count, double job_ns, const Body& body) {
    start();
    next_task_ = 0;
    const std::function<void()> work = [&] {
      const CountedCpu counted(job_ns);
      for (int64_t task = next_task_++; task < count; task = next_task_++) body(task);
    };
    share(work, std::min(num_helpers, static_cast<int>(workers_.size())), true);
  }

  void share(const std::function<void()>& work, int num_helpers, bool may_miss) {
    {
      std::lock_guard<std::mutex> lock(state_mutex_);
      work_ = &work;
      num_tickets_ = num_busy_ = num_helpers;
      ++job_number_;
    }
    wake(num_helpers);
    work();
    std::unique_lock<std::mutex> lock(state_mutex_);
    if (may_miss) {
      num_busy_ -= num_tickets_;
      num_tickets_ = 0;
    }
    all_reported_.wait(lock, [&] { return num_busy_ == 0; });
  }

  // One by one could wake a worker twice and another not at all: no harm, but not where all must come.
  void wake(int num_helpers) {
    if (num_helpers == static_cast<int>(workers_.size())) return job_changed_.notify_all();
    for (int helper = 0; helper < num_helpers; ++helper) job_changed_.notify_one();
  }

  void start() {
    while (static_cast<int>(workers_.size()) + 1 < num_threads_) {
      workers_.emplace_back([this, seen = job_number_] { serve(seen); });
    }
  }

  void serve(uint64_t seen) {
    for (;;) {
      const std::function<void()>* work;
      {
        std::unique_lock<std::mutex> lock(state_mutex_);
        job_changed_.wait(lock, [&] { return stopping_ || (num_tickets_ > 0 && job_number_ != seen); });
        if (stopping_) return;
        seen = job_number_;
        work = work_;
        --num_tickets_;
      }
      (*work)();
      std::lock_guard<std::mutex> lock(state_mutex_);
      if (--num_busy_ == 0) all_reported_.notify_one();
    }
  }

  void stop() {
    {
      std::lock_guard<std::mutex> lock(state_mutex_);
      stopping_ = true;
    }
    job_changed_.notify_all();
    for (std::thread& worker : workers_) worker.join();
    workers_.clear();
    stopping_ = false;
  }

  std::mutex job_mutex_;  // Held for a whole job; state_mutex_ only for a moment.
  std::mutex state_mutex_;
  std::condition_variable job_changed_, all_reported_;
  std::vector<std::thread> workers_;
  std::atomic<int> num_threads_{1};
  std::atomic<int64_t> next_task_{0};
  const std::function<void()>* work_ = nullptr;
  uint64_t job_number_ = 0;
  int num_tickets_ = 0, num_busy_ = 0;
  bool stopping_ = false;
};

// Never destroyed: at exit the sleeping workers end with the process, and no destructor waits for them.
ThreadPool* current_pool = nullptr;

// A forked copy of the process has none of the workers, and locks in any state: it begins anew.
void renew_pool_after_fork() {
  const int num_threads = current_pool->num_threads();
  current_pool = new ThreadPool;
  current_pool->resize(num_threads);
  counted_cpu_ns = 0;  // as the process's own clock
}

ThreadPool& pool() {
  static const int registered = [] {
    current_pool = new ThreadPool;
    return pthread_atfork(nullptr, nullptr, renew_pool_after_fork);
  }();
  static_cast<void>(registered);
  return *current_pool;
}

}  // namespace

void set_num_threads(int num_threads) { pool().resize(num_threads); }
int num_threads() { return pool().num_threads(); }

void set_min_ns_per_thread(double least_ns) { least_ns_per_thread = least_ns; }
double min_ns_per_thread() { return least_ns_per_thread; }

int64_t kernel_cpu_ns() { return counted_cpu_ns; }

void parallel_for(int64_t count, double task_ns, const Body& body) {
  if (count > 0) pool().run(count, task_ns, body);
}

void on_every_thread(const std::function<void()>& body) { pool().run_on_every_thread(body); }

float* thread_scratch(int64_t size) {
  constexpr int64_t FLOATS_PER_LINE = 16;
  thread_local std::vector<float> memory;
  if (static_cast<int64_t>(memory.size()) < size + FLOATS_PER_LINE) memory.resize(size + FLOATS_PER_LINE);
  const uintptr_t address = reinterpret_cast<uintptr_t>(memory.data());
  float* scratch = memory.data() + (64 - address % 64) % 64 / sizeof(float);
  fill_if_poisoned(scratch, static_cast<size_t>(size) * sizeof(float));
  return scratch;
}

void parallel_pieces(int64_t size, int64_t piece, double item_ns, const std::function<void(int64_t, int64_t)>& body) {
  parallel_for((size + piece - 1) / piece, item_ns * std::min(size, piece),
               [&](int64_t task) { body(task * piece, std::min(size, (task + 1) * piece)); });
}

}  // namespace leafsum
