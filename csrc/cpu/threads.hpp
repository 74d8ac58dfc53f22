// The kernel threads: they split outputs, never a sum, and sleep on condition variables between calls.
#pragma once

#include <cstdint>
#include <functional>

namespace leafsum {

// Task 0 .. count-1, thread 0 .. num_threads()-1 (0 is the caller). body must not throw.
using Body = std::function<void(int64_t task, int thread)>;

void set_num_threads(int num_threads);
int num_threads();

// Runs every task once, in any order, and returns when all are done. Threads start at the first call that needs them.
// A second caller at the same moment runs its tasks alone: it never waits for the first.
void parallel_for(int64_t count, const Body& body);

// Runs body(thread, thread) once on every thread, the caller included.
void on_every_thread(const Body& body);

// parallel_for over 0 .. size-1 in pieces: body(begin, end).
void parallel_pieces(int64_t size, int64_t piece, const std::function<void(int64_t begin, int64_t end)>& body);

}  // namespace leafsum
