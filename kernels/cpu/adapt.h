// Adapters (arXiv 2106.09685): adds scale · B (A x) to the rows of a product that have an adapter.
//
// A step's tokens are sorted by adapter, so that its matrices are read once for all its rows. A
// row's result does not depend on the other rows of its batch.
#pragma once

#include "heads.h"
#include "products.h"

// Same layouts as in kernels/cpu/adapt.py and adapter.py.

// The change of adjacent outputs: b [n, rank], with a rank of whole tiles.
struct Piece {
  Matrix b;
  int32_t first;  // output
};

// The changes of one site by one adapter; outputs of two pieces do not overlap. a [ranks of all
// pieces, k]; for embeddings the tiles of a are rows [k, rank].
struct Pieces {
  Matrix a;
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

// Stores A x in T: out [num_rows, rank] of each piece.
template <class T>
struct Narrowed {
  T* out;
  int num_rows;
  const Piece* pieces;

  void operator()(int row, int tile, int num_tiles, const float* sums) const {
    const Piece* piece = pieces;
    T* to = out;
    for (int first = 0, end = tile + num_tiles; tile < end; tile++, sums += LANES) {
      for (int num; tile >= first + (num = piece->b.k / LANES); piece++)
        first += num, to += (size_t)num_rows * piece->b.k;
      store_narrow(to + (size_t)row * piece->b.k + (tile - first) * LANES, load(sums));
    }
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

// Adjacent rows x of one adapter; their results belong to the rows `tokens` of the output.
template <class T>
struct AdaptedRun {
  const T* x;
  int num;
  const int32_t* tokens;
  const Pieces* pieces;

  size_t inner_size() const { return (size_t)num * pieces->a.n; }
  int num_outputs() const {
    int found = 0;
    for (int p = 0; p < pieces->num; p++) found += pieces->each[p].b.n;
    return found;
  }
};

template <class T>
inline Scratch<T> adapted_rows;  // of tokens that are not adjacent
template <class T>
inline Scratch<T> adapted_inner;  // A x of all pieces
template <class T>
inline Scratch<AdaptedRun<T>> adapted_runs;

// The products of B with A x, which adapted_inner has for all pieces of `runs`, one after another.
template <class T>
void expand_runs(const AdaptedRun<T>* runs, int num_runs, int size, float scale, bool adds,
                 float* out) {
  typedef Product<T, T, Scattered> Expand;
  static Scratch<Expand> expands;
  static Scratch<int> ends;
  int num = 0;
  for (int i = 0; i < num_runs; i++) num += runs[i].pieces->num;
  Products<Expand, 16> expand = {expands.of(num), ends.of(num)};
  const T* inner = adapted_inner<T>.memory;
  for (int i = 0; i < num_runs; i++) {
    const AdaptedRun<T>& run = runs[i];
    for (int p = 0; p < run.pieces->num; p++) {
      const Piece& piece = run.pieces->each[p];
      Scattered scattered = {out + piece.first, run.tokens, size, piece.b.n, scale, adds};
      expand.each[expand.num++] = Expand{inner, run.num, packed<T>(piece.b), scattered};
      inner += (size_t)run.num * piece.b.k;
    }
  }
  expand.run(4);
}

// The rows of all runs → out [·, size]. Without `adds`, their other outputs become zero.
template <class T>
void adapt_runs(const AdaptedRun<T>* runs, int num_runs, int size, float scale, bool adds,
                float* out) {
  typedef Product<T, T, Narrowed<T>> Shrink;
  static Scratch<Shrink> shrinks;
  static Scratch<int> ends;
  size_t room = 0;
  for (int i = 0; i < num_runs; i++) {
    const AdaptedRun<T>& run = runs[i];
    room += run.inner_size();
    if (!adds && run.num_outputs() < size)
      each_row(run.num, 1, [=, &run](size_t row) {
        memset(out + (size_t)run.tokens[row] * size, 0, size * sizeof(float));
      });
  }
  if (!room) return;
  T* inner = adapted_inner<T>.of(room);
  Products<Shrink> shrink = {shrinks.of(num_runs), ends.of(num_runs)};
  for (int i = 0; i < num_runs; i++) {
    const AdaptedRun<T>& run = runs[i];
    const Pieces& pieces = *run.pieces;
    if (!pieces.num) continue;
    Narrowed<T> narrowed = {inner, run.num, pieces.each};
    shrink.each[shrink.num++] = Shrink{run.x, run.num, packed<T>(pieces.a), narrowed};
    inner += run.inner_size();
  }
  shrink.run(1);
  expand_runs(runs, num_runs, size, scale, adds, out);
}

// x [num_tokens, k] → out [num_tokens, op.size], rows with adapters only; see adapt_runs.
template <class T>
void adapt_rows(const Adapt& op, const T* x, int k, float scale, bool adds, float* out) {
  const AdaptedRows& rows = *op.rows;
  size_t room = 0;
  for (int i = 0; i < rows.num_segments; i++)
    if (rows.segments[i].first < 0) room += (size_t)rows.segments[i].num * k;
  T* gathered = adapted_rows<T>.of(room);
  AdaptedRun<T>* runs = adapted_runs<T>.of(rows.num_segments);
  for (int i = 0; i < rows.num_segments; i++) {
    const Segment& segment = rows.segments[i];
    const int32_t* own = rows.tokens + segment.start;
    runs[i] = {x + (size_t)segment.first * k, segment.num, own, &op.pieces(segment)};
    if (segment.first >= 0 || !runs[i].pieces->num) continue;
    runs[i].x = gathered;
    each_row(segment.num, k,
             [=](size_t at) { memcpy(gathered + at, x + (size_t)own[at / k] * k, k * sizeof(T)); });
    gathered += (size_t)segment.num * k;
  }
  adapt_runs(runs, rows.num_segments, op.size, scale, adds, out);
}

// ids [num_tokens] → added to out [num_tokens, op.size], rows with adapters only.
template <class T>
void adapt_embeddings(const Adapt& op, const int32_t* ids, float* out) {
  const AdaptedRows& rows = *op.rows;
  AdaptedRun<T>* runs = adapted_runs<T>.of(rows.num_segments);
  int num = 0;
  size_t room = 0;
  for (int i = 0; i < rows.num_segments; i++) {
    const Segment& segment = rows.segments[i];
    const Pieces& pieces = op.pieces(segment);
    if (!pieces.num) continue;
    runs[num] = {nullptr, segment.num, rows.tokens + segment.start, &pieces};
    room += runs[num++].inner_size();
  }
  if (!num) return;
  T* inner = adapted_inner<T>.of(room);
  for (int i = 0; i < num; i++) {
    const AdaptedRun<T>& run = runs[i];
    const Matrix& a = run.pieces->a;
    for (int row = 0; row < run.num; row++, inner += a.n)
      memcpy(inner, (const T*)a.tiles + (size_t)ids[run.tokens[row]] * a.n, a.n * sizeof(T));
  }
  expand_runs(runs, num, op.size, 1, true, out);
}
