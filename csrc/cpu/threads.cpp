#include "threads.hpp"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "poison.hpp"

namespace leafsum {
namespace {

// One job at a time. A worker sleeps until job_number moves, works, and reports; the caller works too and
// sleeps until all workers have reported, so that body outlives its use.
class ThreadPool {
 public:
  void resize(int num_threads) {
    std::lock_guard<std::mutex> one_job(job_mutex_);
    stop();
    num_threads_ = num_threads;
  }

  int num_threads() const { return num_threads_; }

  void run(int64_t count, const Body& body) {
    std::unique_lock<std::mutex> one_job(job_mutex_, std::try_to_lock);
    if (!one_job.owns_lock() || num_threads_ == 1 || count == 1) {
      for (int64_t task = 0; task < count; ++task) body(task);
      return;
    }
    next_task_ = 0;
    share([&] {
      for (int64_t task = next_task_++; task < count; task = next_task_++) body(task);
    });
  }

  void run_on_every_thread(const std::function<void()>& body) {
    std::lock_guard<std::mutex> one_job(job_mutex_);
    share(body);
  }

 private:
  void share(const std::function<void()>& work) {
    start();
    {
      std::lock_guard<std::mutex> lock(state_mutex_);
      work_ = &work;
      num_busy_ = static_cast<int>(workers_.size());
      ++job_number_;
    }
    job_changed_.notify_all();
    work();
    std::unique_lock<std::mutex> lock(state_mutex_);
    all_reported_.wait(lock, [&] { return num_busy_ == 0; });
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
        job_changed_.wait(lock, [&] { return stopping_ || job_number_ != seen; });
        if (stopping_) return;
        seen = job_number_;
        work = work_;
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
  int num_busy_ = 0;
  bool stopping_ = false;
};

// Never destroyed: at exit the sleeping workers end with the process, and no destructor waits for them.
ThreadPool* current_pool = nullptr;

// A forked copy of the process has none of the workers, and locks in any state: it begins anew.
void renew_pool_after_fork() {
  const int num_threads = current_pool->num_threads();
  current_pool = new ThreadPool;
  current_pool->resize(num_threads);
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

void parallel_for(int64_t count, const Body& body) {
  if (count > 0) pool().run(count, body);
}

void on_every_thread(const std::function<void()>& body) { pool().run_on_every_thread(body); }

float* thread_scratch(int64_t size) {
  thread_local std::vector<float> memory;
  if (static_cast<int64_t>(memory.size()) < size) memory.resize(size);
  fill_if_poisoned(memory.data(), static_cast<size_t>(size) * sizeof(float));
  return memory.data();
}

void parallel_pieces(int64_t size, int64_t piece, const std::function<void(int64_t, int64_t)>& body) {
  parallel_for((size + piece - 1) / piece,
               [&](int64_t task) { body(task * piece, std::min(size, (task + 1) * piece)); });
}

}  // namespace leafsum
