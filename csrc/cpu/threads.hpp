// The kernel threads: they split outputs, never a sum, and sleep on condition variables between calls.
#pragma once

#include <cstdint>
#include <functional>

namespace leafsum {

using Body = std::function<void(int64_t task)>;  // Must not throw.

void set_num_threads(int num_threads);
int num_threads();

// Jobs get a thread for every so much work; 0: as many as they have tasks. 75 us at first.
void set_min_ns_per_thread(double least_ns);
double min_ns_per_thread();

// CPU time of all threads within parallel_for, since the process began: what kernels compute, and no wait.
int64_t kernel_cpu_ns();

// Runs every task once, in any order, and returns when all are done. Threads start at the first call that needs them.
// task_ns: about what one task takes on one thread; a small job gets few threads or the caller alone. A second caller
// at the same moment runs its tasks alone: it never waits for the first.
void parallel_for(int64_t count, double task_ns, const Body& body);

// Runs body once on every thread, the caller included.
void on_every_thread(const std::function<void()>& body);

// Memory of the calling thread, at a border of 64 bytes, at least size floats, old values in it; the next call may move
// it.
float* thread_scratch(int64_t size);

// parallel_for over 0 .. size-1 in pieces: body(begin, end). item_ns: about what one of the size takes.
void parallel_pieces(int64_t size, int64_t piece, double item_ns,
                     const std::function<void(int64_t begin, int64_t end)>& body);

// parallel_for over rows, a few of them a task: body(row). row_ns: about what a row takes.
template <typename Row>
void parallel_rows(int64_t num_rows, double row_ns, const Row& body) {
  constexpr int64_t ROWS_PER_PIECE = 4;
  parallel_pieces(num_rows, ROWS_PER_PIECE, row_ns, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) body(row);
  });
}

}  // namespace leafsum
