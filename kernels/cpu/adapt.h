// Adapters (arXiv 2106.09685): adds scale · B (A x) to the rows of a product that have an adapter.
//
// A step's tokens are sorted by adapter, so that its matrices are read once for all its rows. A
// row's result does not depend on the other rows of its batch.
#pragma once

#include "experts.h"

// Same layouts as in kernels/cpu/adapt.py and adapter.py.

// The change of adjacent outputs: a [rank, k] and b [n, rank], with a rank of whole tiles.
struct Piece {
  Matrix a, b;
  int32_t first;  // output
};

// The changes of one site by one adapter; outputs of two pieces do not overlap.
struct Pieces {
  const Piece* each;
  int32_t num;
};

// The tokens of one adapter.
struct Segment {
  int32_t start, num;  // in AdaptedRows::tokens
  int32_t adapter;     // index
  int32_t first;       // token, if they are adjacent; else −1
};

struct AdaptedRows {
  const Pieces* const* adapters;  // by index: the pieces of each site
  const Segment* segments;
  const int32_t* tokens;      // of all segments
  const uint8_t* is_adapted;  // [num_tokens]
  int32_t num_segments;
};

struct Adapt {
  const AdaptedRows* rows;
  int32_t site, size;  // size: outputs of the site's product

  const Pieces& pieces(const Segment& segment) const {
    return rows->adapters[segment.adapter][site];
  }
};

// Stores the product in T, out [num_rows, n].
template <class T>
struct Narrowed {
  T* out;
  int n;

  void operator()(int row, int tile, int num_tiles, const float* sums) const {
    T* to = out + (size_t)row * n + tile * LANES;
    for (int t = 0; t < num_tiles; t++) store_narrow(to + t * LANES, load(sums + t * LANES));
  }
};

// Multiplies the product by scale; stores it in the rows `tokens` of out, or adds it to them.
struct Scattered {
  float* out;  // first output of the first token
  const int32_t* tokens;
  int size, n;  // outputs of a token, and of the product
  float scale;
  bool adds;

  void operator()(int row, int tile, int num_tiles, const float* sums) const {
    float* to = out + (size_t)tokens[row] * size;
    for (int t = 0; t < num_tiles; t++) {
      int at = (tile + t) * LANES, num = n - at < LANES ? n - at : LANES;
      f32x16 delta = mul(load(sums + t * LANES), spread(scale));
      if (num == LANES) {  // access to parts of tiles takes longer than a small sum
        store(to + at, adds ? add(load(to + at), delta) : delta);
      } else {
        if (adds) delta = add(load_some(to + at, num), delta);
        store_some(to + at, delta, num);
      }
    }
  }
};

template <class T>
inline Scratch<T> adapted_rows;  // rows of tokens that are not adjacent, then A x of all pieces

// x [num_tokens, k] → out [num_tokens, op.size], rows with adapters only. Without `adds`, their
// other outputs become zero.
template <class T>
void adapt_rows(const Adapt& op, const T* x, int k, float scale, bool adds, float* out) {
  typedef Product<T, T, Narrowed<T>> Shrink;
  typedef Product<T, T, Scattered> Expand;
  static Scratch<Shrink> shrinks;
  static Scratch<Expand> expands;
  static Scratch<int> ends;
  const AdaptedRows& rows = *op.rows;
  const int32_t* tokens = rows.tokens;
  int num = 0;
  size_t room = 0;
  for (int i = 0; i < rows.num_segments; i++) {
    const Segment& segment = rows.segments[i];
    const Pieces& pieces = op.pieces(segment);
    int num_outputs = 0;
    for (int p = 0; p < pieces.num; p++) {
      num_outputs += pieces.each[p].b.n;
      room += (size_t)segment.num * pieces.each[p].a.n;
    }
    if (pieces.num && segment.first < 0) room += (size_t)segment.num * k;
    if (!adds && num_outputs < op.size)
      each_row(segment.num, 1, [=](size_t at) {
        memset(out + (size_t)tokens[segment.start + at] * op.size, 0, op.size * sizeof(float));
      });
    num += pieces.num;
  }
  if (!num) return;

  T* memory = adapted_rows<T>.of(room);
  Products<Shrink> shrink = {shrinks.of(num), ends.of(2 * num)};
  Products<Expand> expand = {expands.of(num), ends.of(2 * num) + num};
  for (int i = 0; i < rows.num_segments; i++) {
    const Segment& segment = rows.segments[i];
    const Pieces& pieces = op.pieces(segment);
    if (!pieces.num) continue;
    const int32_t* own = tokens + segment.start;
    const T* given = x + (size_t)segment.first * k;
    if (segment.first < 0) {
      T* gathered = memory;
      each_row(segment.num, k, [=](size_t at) {
        memcpy(gathered + at, x + (size_t)own[at / k] * k, k * sizeof(T));
      });
      given = gathered;
      memory += (size_t)segment.num * k;
    }
    for (int p = 0; p < pieces.num; p++) {
      const Piece& piece = pieces.each[p];
      Scattered scattered = {out + piece.first, own, op.size, piece.b.n, scale, adds};
      shrink.each[shrink.num++] =
          Shrink{given, segment.num, packed<T>(piece.a), {memory, piece.a.n}};
      expand.each[expand.num++] = Expand{memory, segment.num, packed<T>(piece.b), scattered};
      memory += (size_t)segment.num * piece.a.n;
    }
  }
  shrink.run(1);
  expand.run(4);  // a tile of so few elements takes less time than taking an item
}
