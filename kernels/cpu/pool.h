// Threads that share the items of a job: each takes the next one that is left, so that a thread
// whose core is busy with something else holds up no more than what it has in hand.
#pragma once

typedef void (*Work)(void* job, int item);

// Threads that compute, the caller's included; never fewer than were asked for before.
void start_pool(int num_threads);
int pool_size();

// Calls work(job, i) for 0 ≤ i < num_items, on all threads; returns when all are done.
void share(Work work, void* job, int num_items);

template <class Job>
inline void share(Job& job, int num_items) {
  share([](void* self, int item) { (*static_cast<Job*>(self))(item); }, &job, num_items);
}
