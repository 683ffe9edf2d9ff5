#include "pool.h"

#include <immintrin.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

constexpr int SPINS = 2000;    // pauses before a thread sleeps: about 50 µs
constexpr int ITEM_BITS = 32;  // of a ticket: number of items above, next item below
constexpr uint64_t ITEM_MASK = (1ull << ITEM_BITS) - 1;

struct alignas(64) Pool {
  int num_threads = 1;
  Work work;
  void* job;
  // The number of items and the next item are one word, so that a late thread never takes an item
  // beyond the last.
  alignas(64) uint64_t ticket = 0;
  alignas(64) uint32_t num_done = 0;
  alignas(64) uint32_t generation = 0;  // futex of the sleeping threads
  uint32_t num_sleeping = 0;
} pool;

bool is_left(uint64_t ticket) { return (ticket & ITEM_MASK) < ticket >> ITEM_BITS; }

// Takes items until the job has no more.
void work_on() {
  while (is_left(__atomic_load_n(&pool.ticket, __ATOMIC_ACQUIRE))) {
    uint64_t taken = __atomic_fetch_add(&pool.ticket, 1, __ATOMIC_ACQ_REL);
    if (!is_left(taken)) return;
    pool.work(pool.job, (int)(taken & ITEM_MASK));
    __atomic_fetch_add(&pool.num_done, 1, __ATOMIC_RELEASE);
  }
}

void sleep_until_changed(uint32_t generation) {
  __atomic_fetch_add(&pool.num_sleeping, 1, __ATOMIC_SEQ_CST);
  syscall(SYS_futex, &pool.generation, FUTEX_WAIT_PRIVATE, generation, nullptr, nullptr, 0);
  __atomic_fetch_sub(&pool.num_sleeping, 1, __ATOMIC_SEQ_CST);
}

void* help(void*) {
  for (;;) {
    uint32_t generation = __atomic_load_n(&pool.generation, __ATOMIC_SEQ_CST);
    work_on();
    for (int i = 0; i < SPINS; i++) {
      if (__atomic_load_n(&pool.generation, __ATOMIC_ACQUIRE) != generation) break;
      _mm_pause();
    }
    if (__atomic_load_n(&pool.generation, __ATOMIC_ACQUIRE) == generation)
      sleep_until_changed(generation);
  }
  return nullptr;
}

}  // namespace

void start_pool(int num_threads) {
  for (int i = pool.num_threads; i < num_threads; i++) {
    pthread_t thread;
    if (pthread_create(&thread, nullptr, help, nullptr)) break;
    pthread_detach(thread);
    pool.num_threads = i + 1;
  }
}

int pool_size() { return pool.num_threads; }

void share(Work work, void* job, int num_items) {
  if (pool.num_threads == 1 || num_items <= 1) {
    for (int i = 0; i < num_items; i++) work(job, i);
    return;
  }
  pool.work = work;
  pool.job = job;
  pool.num_done = 0;
  __atomic_store_n(&pool.ticket, (uint64_t)num_items << ITEM_BITS, __ATOMIC_RELEASE);
  __atomic_fetch_add(&pool.generation, 1, __ATOMIC_SEQ_CST);
  if (__atomic_load_n(&pool.num_sleeping, __ATOMIC_SEQ_CST)) {
    syscall(SYS_futex, &pool.generation, FUTEX_WAKE_PRIVATE, pool.num_threads, nullptr, nullptr, 0);
  }
  work_on();
  for (int spins = 0; __atomic_load_n(&pool.num_done, __ATOMIC_ACQUIRE) != (uint32_t)num_items;) {
    if (++spins < SPINS)
      _mm_pause();
    else
      sched_yield();
  }
}
