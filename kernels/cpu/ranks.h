// Collectives of a model's ranks. The ranks of one host exchange data in shared memory; the first
// rank of each host exchanges data with other hosts.
#pragma once

#include <errno.h>
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "heads.h"

constexpr int MAX_RANKS = 64;
constexpr size_t ROOM = 1 << 18;  // floats of a rank per exchange
constexpr int RANK_SPINS = 2000;  // pauses before a rank sleeps

// The number of exchanges at which a rank has arrived, in a cache line of its own.
struct alignas(64) Arrival {
  uint32_t num;
  uint32_t num_sleeping;  // ranks that sleep until this one arrives
};

// A connection between the first ranks of two hosts, and its bytes of the current exchange.
struct Wire {
  int socket;
  int first_rank;  // of the other host
  size_t num_sent, num_received;
};

// Shared memory: the arrivals, then two parts of each rank. A rank writes into one part while
// others may still read the other part: once all ranks have arrived at the next exchange, all have
// read this one.
struct Collectives {
  Arrival* arrivals = nullptr;
  float* parts = nullptr;  // [2, size, ROOM]
  int rank = 0, size = 1;
  int first_rank = 0, num_here = 1;  // of this host
  int num_wires = 0;                 // 0, except on the first rank of one of several hosts
  uint32_t num = 0;
  int failure = 0;             // errno of a broken wire; ends all exchanges
  Wire wires[MAX_RANKS] = {};  // constant: initialization at run time would need the C++ library

  float* part(int of) const { return parts + ((size_t)(num & 1) * size + of) * ROOM; }

  // Announces our part of `num_floats`, already written; returns once all parts are there, or on
  // failure.
  void arrive(size_t num_floats) {
    announce(rank);
    if (num_wires && (failure = bring(num_floats * sizeof(float)))) return;
    for (int r = 0; r < size; r++) wait_for(arrivals[r]);
  }

  void leave() { num++; }

  void announce(int of) {
    Arrival& arrival = arrivals[of];
    __atomic_store_n(&arrival.num, num + 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&arrival.num_sleeping, __ATOMIC_SEQ_CST))
      syscall(SYS_futex, &arrival.num, FUTEX_WAKE, MAX_RANKS, nullptr, nullptr, 0);
  }

  // Exchanges the parts of this host, `part_bytes` each, with all other hosts. Returns 0 or errno.
  int bring(size_t part_bytes) {
    for (int r = first_rank; r < first_rank + num_here; r++) wait_for(arrivals[r]);
    for (int i = 0; i < num_wires; i++) wires[i].num_sent = wires[i].num_received = 0;
    size_t total = part_bytes * num_here;
    for (;;) {
      pollfd waiting[MAX_RANKS];
      int num_waiting = 0;
      for (int i = 0; i < num_wires; i++) {
        Wire& wire = wires[i];
        if (int error = move(wire, part_bytes, total)) return error;
        short events =
            (wire.num_sent < total ? POLLOUT : 0) | (wire.num_received < total ? POLLIN : 0);
        if (events) waiting[num_waiting++] = {wire.socket, events, 0};
      }
      if (!num_waiting) break;
      if (poll(waiting, num_waiting, -1) < 0 && errno != EINTR) return errno;
    }
    for (int i = 0; i < num_wires; i++)
      for (int r = 0; r < num_here; r++) announce(wires[i].first_rank + r);
    return 0;
  }

  // Sends and receives as much as possible without blocking. Returns 0 or errno.
  int move(Wire& wire, size_t part_bytes, size_t total) {
    while (wire.num_sent < total) {
      auto [from, num_bytes] = stretch(first_rank, wire.num_sent, part_bytes);
      ssize_t sent = send(wire.socket, from, num_bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
      if (sent < 0 && has_to_wait()) break;
      if (sent < 0) return errno;
      wire.num_sent += sent;
    }
    while (wire.num_received < total) {
      auto [to, num_bytes] = stretch(wire.first_rank, wire.num_received, part_bytes);
      ssize_t received = recv(wire.socket, to, num_bytes, MSG_DONTWAIT);
      if (received == 0) return ECONNRESET;
      if (received < 0 && has_to_wait()) break;
      if (received < 0) return errno;
      wire.num_received += received;
    }
    return 0;
  }

  struct Stretch {
    char* start;
    size_t num_bytes;
  };

  // The rest of the current part after `num_done` bytes of a host's parts, from rank `first` on.
  Stretch stretch(int first, size_t num_done, size_t part_bytes) const {
    size_t behind = num_done % part_bytes;
    return {(char*)part(first + (int)(num_done / part_bytes)) + behind, part_bytes - behind};
  }

  static bool has_to_wait() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

  // Correct after the counter has wrapped around, too.
  bool has_come(uint32_t seen) const { return (int32_t)(seen - num) > 0; }

  void wait_for(Arrival& other) {
    for (int i = 0; i < RANK_SPINS; i++) {
      if (has_come(__atomic_load_n(&other.num, __ATOMIC_ACQUIRE))) return;
      _mm_pause();
    }
    __atomic_fetch_add(&other.num_sleeping, 1, __ATOMIC_SEQ_CST);
    for (;;) {
      uint32_t seen = __atomic_load_n(&other.num, __ATOMIC_SEQ_CST);
      if (has_come(seen)) break;
      syscall(SYS_futex, &other.num, FUTEX_WAIT, seen, nullptr, nullptr, 0);
    }
    __atomic_fetch_sub(&other.num_sleeping, 1, __ATOMIC_SEQ_CST);
  }
};

inline Collectives collectives;

constexpr size_t SUM_STRIP = 1 << 12;  // floats per item

// Calls f(start, end) for strips of 0 … num, on all threads.
template <class F>
void each_strip(size_t num, F f) {
  auto strip = [=](int item) {
    size_t start = item * SUM_STRIP, end = start + SUM_STRIP;
    f(start, end < num ? end : num);
  };
  share(strip, (int)((num + SUM_STRIP - 1) / SUM_STRIP));
}

// Calls f(start, num) for each exchanged piece of x; collectives.part(r) is rank r's piece.
template <class F>
void exchange(const float* x, size_t total, F f) {
  if (collectives.failure) return;
  for (size_t start = 0; start < total; start += ROOM) {
    size_t num = total - start < ROOM ? total - start : ROOM;
    float* ours = collectives.part(collectives.rank);
    each_strip(num, [=](size_t from, size_t to) {
      memcpy(ours + from, x + start + from, (to - from) * sizeof(float));
    });
    collectives.arrive(num);
    if (collectives.failure) return;
    f(start, num);
    collectives.leave();
  }
}

// out = Σ x over ranks, in rank order, + bias; if `adds`: out += scale · this sum. x may be out.
// Each element is summed on its own, so a row has the same bits in every batch.
inline void sum_ranks(const float* x, size_t num_rows, size_t size, const float* bias, bool adds,
                      float scale, float* out) {
  exchange(x, num_rows * size, [=](size_t start, size_t num) {
    each_strip(num, [=](size_t from, size_t to) {
      const Collectives& all = collectives;
      for (size_t i = from; i < to; i++) {
        float sum = all.part(0)[i];
        for (int r = 1; r < all.size; r++) sum += all.part(r)[i];
        if (bias) sum += bias[(start + i) % size];
        out[start + i] = adds ? out[start + i] + scale * sum : sum;
      }
    });
  });
}

// x [total] of each rank → out [size, total]
inline void gather_ranks(const float* x, size_t total, float* out) {
  exchange(x, total, [=](size_t start, size_t num) {
    for (int r = 0; r < collectives.size; r++) {
      const float* part = collectives.part(r);
      float* to = out + r * total + start;
      each_strip(num, [=](size_t from, size_t end) {
        memcpy(to + from, part + from, (end - from) * sizeof(float));
      });
    }
  });
}
