// A whole step of a dense decoder: rows of several sequences in, logits out, one parallel region a tile of rows.
//
// Every number of a row depends on that row alone: tiles, threads and neighbours decide who computes it and when.
#pragma once

#include <cstdlib>
#include <new>
#include <vector>

#include "attention.h"
#include "matrix.h"
#include "team.h"

namespace tandem {

constexpr int64_t TILE = 64;
/// Up to so many rows, every thread rounds all activations for itself: cheaper than to wait for one another.
constexpr int64_t FEW = 4;

/// A matrix that lies over up to three: parts of different kinds with one input, or none where ``rows`` is 0.
struct Layer {
    const float *attn_norm, *ffn_norm, *q_norm, *k_norm, *qkv_bias, *out_bias;
    Matrix qkv[3], out, gate, up, down;
    int64_t window;
};

struct Model {
    int64_t layers, hidden, heads, kv_heads, head_dim, rotary, ff, vocab;
    float eps, reserved;
    const float *turns, *norm;
    Matrix table, head;
    const Layer* layer;
};

/// Keys and values of a sequence, float16 ``[layers, 2 * kv_heads, rows, head_dim]``.
struct Cache {
    uint16_t* data;
    int64_t rows;
};

/// Memory that is given back, aligned.
template <class T> class Room {
  public:
    explicit Room(int64_t n) : data((T*)std::aligned_alloc(64, size_t((n * sizeof(T) + 127) / 64 * 64))) {
        if (!data) throw std::bad_alloc();
    }
    Room(const Room&) = delete;
    ~Room() { std::free(data); }
    T* const data;
};

/// An :struct:`Input` with its memory.
class Rounded {
  public:
    Rounded(int64_t rows, int64_t most)
        : x(rows * most), q(rows * most), scale(rows * most / 32 + 1), total(rows * most / 32 + 1), sums(rows * most / 16 + 2) {}
    Input of(int64_t cols) const { return {x.data, q.data, scale.data, total.data, sums.data, cols}; }

  private:
    Room<float> x;
    Room<int8_t> q;
    Room<float> scale, total;
    Room<int32_t> sums;
};

/// Rows of one sequence that stand together in a tile, few enough for one bench.
struct Segment {
    int64_t first, count;
};

class Step {
  public:
    Step(const Model& model, int64_t threads)
        : m(model),
          layers(model.layer, model.layer + model.layers),
          share(model.heads / model.kv_heads),
          together_(share >= 64 ? 1 : 64 / share < 16 ? 64 / share : 16),
          wide((model.heads + 2 * model.kv_heads) * model.head_dim),
          stream(TILE * model.hidden),
          mixed(TILE * wide),
          shared(TILE, most()),
          seen(TILE * model.heads * model.head_dim),
          gated(TILE * model.ff) {
        for (int64_t i = 0; i < threads; i++) {
            own.push_back(new Rounded(FEW, most()));
            bench.push_back(new Room<float>(Bench::floats(together_ * share, model.head_dim)));
        }
    }
    ~Step() {
        for (auto* o : own) delete o;
        for (auto* b : bench) delete b;
    }

    /// Put the logits of the rows that ``wanted`` marks at ``logits``, in order.
    void run(const Row* rows, const uint8_t* wanted, int64_t n, const int64_t* ancestors, const Cache* caches, float* logits,
             int64_t threads) {
        threads = threads < int64_t(own.size()) ? threads : int64_t(own.size());
        for (int64_t first = 0; first < n; first += TILE) {
            const int64_t count = n - first < TILE ? n - first : TILE;
            logits = tile(rows + first, wanted + first, count, ancestors, caches, logits, threads < 1 ? 1 : threads);
        }
    }

  private:
    int64_t most() const {
        const int64_t attended = m.heads * m.head_dim, other = m.hidden > m.ff ? m.hidden : m.ff;
        return attended > other ? attended : other;
    }

    float* tile(const Row* rows, const uint8_t* wanted, int64_t n, const int64_t* ancestors, const Cache* caches, float* logits,
                int64_t threads) {
        std::vector<Segment> segments;
        bool apart = true;
        for (int64_t i = 0; i < n;) {
            int64_t end = i;
            while (end < n && rows[end].sequence == rows[i].sequence) end++;
            for (int64_t at = i; at < end; at += together_) segments.push_back({at, end - at < together_ ? end - at : together_});
            apart = apart && end - i <= together_;
            i = end;
        }
        std::vector<int64_t> last;
        for (int64_t i = 0; i < n; i++)
            if (wanted[i]) last.push_back(i);
        const int64_t given = int64_t(last.size());
        together(threads, [&](Thread& t) {
            for (int64_t i = t.from(n); i < t.to(n); i++) decode_row(m.table, rows[i].token, stream.data + i * m.hidden);
            t.wait();
            for (int64_t l = 0; l < m.layers; l++) layer(t, layers[l], l, rows, n, segments, apart, ancestors, caches);
            if (!given) return;
            const Input in = prepare(t, given, m.hidden, m.head.quantised(), [&](int64_t r, float* x) {
                norm(stream.data + last[r] * m.hidden, m.norm, m.hidden, m.eps, x);
            });
            const int64_t a = t.from(m.head.strips()), b = t.to(m.head.strips());
            multiply(m.head, a, b, in, given, {logits + a * LANES, m.vocab, false, nullptr});
        });
        return logits + given * m.vocab;
    }

    /// ``n`` rows of activations, each made by ``fill`` and rounded if ``round``; by every thread, or each its share.
    template <class F> Input prepare(Thread& t, int64_t n, int64_t cols, bool round, F&& fill) {
        const bool alone = n <= FEW;
        const Input in = (alone ? *own[t.id] : shared).of(cols);
        for (int64_t r = alone ? 0 : t.from(n); r < (alone ? n : t.to(n)); r++) {
            fill(r, in.x + r * cols);
            if (round) quantise(in, r);
        }
        if (!alone) t.wait();
        return in;
    }

    void layer(Thread& t, const Layer& l, int64_t index, const Row* rows, int64_t n, const std::vector<Segment>& segments,
               bool apart, const int64_t* ancestors, const Cache* caches) {
        const int64_t hidden = m.hidden, attended = m.heads * m.head_dim;
        Input in = prepare(t, n, hidden, true, [&](int64_t r, float* x) {
            norm(stream.data + r * hidden, l.attn_norm, hidden, m.eps, x);
        });
        beside(t, l, in, n);
        t.wait();
        const int64_t items = int64_t(segments.size()) * m.kv_heads;
        if (!apart) {
            t.each(n * m.kv_heads, [&](int64_t i) { write(l, index, rows[i / m.kv_heads], i / m.kv_heads, i % m.kv_heads, caches); });
        }
        t.each(items, [&](int64_t i) {
            const Segment& s = segments[i / m.kv_heads];
            const int64_t head = i % m.kv_heads;
            if (apart)
                for (int64_t r = s.first; r < s.first + s.count; r++) write(l, index, rows[r], r, head, caches);
            look(t, l, index, rows, s, head, ancestors, caches);
        });
        in = prepare(t, n, attended, l.out.quantised(), [&](int64_t r, float* x) {
            std::memcpy(x, seen.data + r * attended, sizeof(float) * attended);
        });
        add(t, l.out, in, n, l.out_bias);
        t.wait();
        in = prepare(t, n, hidden, true, [&](int64_t r, float* x) { norm(stream.data + r * hidden, l.ffn_norm, hidden, m.eps, x); });
        gate(t, l, in, n);
        t.wait();
        in = prepare(t, n, m.ff, l.down.quantised(), [&](int64_t r, float* x) {
            std::memcpy(x, gated.data + r * m.ff, sizeof(float) * m.ff);
        });
        add(t, l.down, in, n, nullptr);
        t.wait();
    }

    /// The queries, keys and values of all rows.
    void beside(Thread& t, const Layer& l, const Input& in, int64_t n) {
        int64_t strips = 0, col = 0;
        for (const Matrix& part : l.qkv) strips += part.strips();
        int64_t from = t.from(strips), to = t.to(strips);
        for (const Matrix& part : l.qkv) {
            const int64_t a = from < 0 ? 0 : from, b = to < part.strips() ? to : part.strips();
            if (a < b) multiply(part, a, b, in, n, {mixed.data + col + a * LANES, wide, false, l.qkv_bias ? l.qkv_bias + col : nullptr});
            from -= part.strips(), to -= part.strips(), col += part.rows;
        }
    }

    /// Norm and turn the queries and the key of key head ``head`` of row ``r``; put key and value into the cache.
    void write(const Layer& l, int64_t index, const Row& row, int64_t r, int64_t head, const Cache* caches) {
        const int64_t width = m.head_dim;
        const float* turn = m.turns + row.position() * m.rotary;
        float* q = mixed.data + r * wide + head * share * width;
        for (int64_t s = 0; s < share; s++) {
            if (l.q_norm) norm(q + s * width, l.q_norm, width, m.eps * width / m.hidden, q + s * width);
            rotate(q + s * width, turn, m.rotary);
        }
        float* k = mixed.data + r * wide + (m.heads + head) * width;
        if (l.k_norm) norm(k, l.k_norm, width, m.eps * width / m.hidden, k);
        rotate(k, turn, m.rotary);
        const float* v = mixed.data + r * wide + (m.heads + m.kv_heads + head) * width;
        uint16_t *keys = place(caches[row.sequence], index, head) + row.row * width;
        uint16_t *values = place(caches[row.sequence], index, m.kv_heads + head) + row.row * width;
        for (int64_t d = 0; d < width; d++) keys[d] = to_half(k[d]), values[d] = to_half(v[d]);
    }

    uint16_t* place(const Cache& c, int64_t index, int64_t head) const {
        return c.data + (index * 2 * m.kv_heads + head) * c.rows * m.head_dim;
    }

    void look(const Thread& t, const Layer& l, int64_t index, const Row* rows, const Segment& s, int64_t head,
              const int64_t* ancestors, const Cache* caches) {
        const Cache& c = caches[rows[s.first].sequence];
        const Heads h{place(c, index, head), place(c, index, m.kv_heads + head), m.head_dim, true};
        const Bench b(bench[t.id]->data, together_ * share, m.head_dim);
        const int64_t at = head * share * m.head_dim, attended = m.heads * m.head_dim;
        attend(h, rows + s.first, s.count, ancestors, mixed.data + s.first * wide + at, wide, share,
               1.f / __builtin_sqrtf(float(m.head_dim)), l.window, b, seen.data + s.first * attended + at, attended);
    }

    /// Add the product to the stream.
    void add(Thread& t, const Matrix& w, const Input& in, int64_t n, const float* bias) {
        const int64_t a = t.from(w.strips()), b = t.to(w.strips());
        multiply(w, a, b, in, n, {stream.data + a * LANES, m.hidden, true, bias});
    }

    /// ``silu(gate) * up`` of all rows, a strip at a time.
    void gate(Thread& t, const Layer& l, const Input& in, int64_t n) {
        constexpr int64_t STRIPS = 4;
        alignas(64) float g[TILE * STRIPS * LANES], u[TILE * STRIPS * LANES];
        const int64_t strips = l.gate.strips(), end = t.to(strips);
        for (int64_t s = t.from(strips); s < end; s += STRIPS) {
            const int64_t stop = s + STRIPS < end ? s + STRIPS : end, width = STRIPS * LANES;
            multiply(l.gate, s, stop, in, n, {g, width, false, nullptr});
            multiply(l.up, s, stop, in, n, {u, width, false, nullptr});
            for (int64_t r = 0; r < n; r++)
                for (int64_t i = 0; i < (stop - s) * LANES; i += LANES)
                    store(gated.data + r * m.ff + s * LANES + i, silu(load(g + r * width + i)) * load(u + r * width + i));
        }
    }

    const Model m;
    const std::vector<Layer> layers;
    const int64_t share, together_, wide;
    Room<float> stream, mixed;
    Rounded shared;
    Room<float> seen, gated;
    std::vector<Rounded*> own;
    std::vector<Room<float>*> bench;
};

}  // namespace tandem
