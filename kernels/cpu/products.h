// Several GEMMs at a time.
#pragma once

#include "matrix.h"

constexpr size_t SMALL_ROOM = 1 << 16;  // of rows that one thread prepares as fast as several

// GEMMs of several matrices, each with its own rows; threads share the items of all. A thread takes
// up to AT_ONCE adjacent items: small ones take less time than taking an item.
template <class P, int AT_ONCE = 1>
struct Products {
  P* each;
  int* ends;  // cumulative number of items
  int num = 0;

  void run(int unit) {
    size_t room = 0;
    int num_tiles = 0, end = 0;
    for (int i = 0; i < num; i++) room += room_of(i), num_tiles += each[i].w.num_tiles();
    uint8_t* memory = product_room.of(room);
    for (int i = 0; i < num; i++) {
      each[i].take_room(memory);
      memory += room_of(i);
      each[i].divide(unit, num_tiles);
      ends[i] = end += each[i].items.num();
    }
    auto prepare = [=](int i) {
      for (int part = 0; part < each[i].num_parts(); part++) each[i].prepare(part);
    };
    if (room > SMALL_ROOM)
      share(prepare, num);
    else
      for (int i = 0; i < num; i++) prepare(i);
    int at_once = end / (4 * pool_size());
    at_once = at_once < 1 ? 1 : at_once < AT_ONCE ? at_once : AT_ONCE;
    auto take = [=](int turn) {
      int item = turn * at_once, last = item + at_once < end ? item + at_once : end;
      for (int i = product_of(item); item < last; item++) {
        if (item == ends[i]) i++;
        if constexpr (AT_ONCE > 1) {
          int next = item + 1, own = next < ends[i] ? i : i + 1;
          if (next < last) each[own].fetch(next - start_of(own));
        }
        each[i](item - start_of(i));
      }
    };
    share(take, div_up(end, at_once));
  }

  size_t room_of(int i) const { return (each[i].room() + 63) / 64 * 64; }

  int start_of(int i) const { return i ? ends[i - 1] : 0; }
  int product_of(int item) const {
    int low = 0, high = num - 1;
    while (low < high) {
      int middle = (low + high) / 2;
      if (item < ends[middle])
        high = middle;
      else
        low = middle + 1;
    }
    return low;
  }
};
