// Several GEMMs at a time.
#pragma once

#include "matrix.h"

// GEMMs of several matrices, each with its own rows; threads share the items of all.
template <class P>
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
    if (room) share(prepare, num);
    share(*this, end);
  }

  size_t room_of(int i) const { return (each[i].room() + 63) / 64 * 64; }

  void operator()(int item) {
    int low = 0, high = num - 1;
    while (low < high) {
      int middle = (low + high) / 2;
      if (item < ends[middle])
        high = middle;
      else
        low = middle + 1;
    }
    each[low](low ? item - ends[low - 1] : item);
  }
};
