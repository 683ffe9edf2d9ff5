// Thread pool. Each thread takes the next free item of a job, so that a thread on a busy core
// delays the job by one item at most.
#pragma once

typedef void (*Work)(void* job, int item);

// Number of computing threads, including the caller; the pool never shrinks.
void start_pool(int num_threads);
int pool_size();

// Calls work(job, i) for 0 ≤ i < num_items, on all threads; returns when all are done.
void share(Work work, void* job, int num_items);

template <class Job>
inline void share(Job& job, int num_items) {
  share([](void* self, int item) { (*static_cast<Job*>(self))(item); }, &job, num_items);
}
