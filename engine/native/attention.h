// Attention of a few rows over the keys and values of their sequence.
//
// A row's keys come in logical order: rows 0 … prefix - 1 of the cache, then those its list names, the last one its own.
// They are taken in blocks of 64, cut at multiples of 64 of the logical position, with a running maximum: what a row
// sees and where it stands decide every operation, not the rows beside it nor where they lie in the cache.
#pragma once

#include "vector.h"

namespace tandem {

constexpr int64_t BLOCK = 64;
constexpr int PARTS = BLOCK / LANES;

/// One row of a step. ``prefix`` keys lie one after another; ``count`` more in rows ``ancestors[first] …``.
struct Row {
    int64_t token, sequence, row, prefix, first, count;

    int64_t keys() const { return prefix + count; }
    int64_t position() const { return keys() - 1; }
    bool chain() const { return count == 0; }
};

/// Keys and values of one head as they lie in a cache: ``width`` elements a row, float16 or float32.
struct Heads {
    const void *keys, *values;
    int64_t width;
    bool half;
};

/// What one thread needs for ``most`` queries of ``width``.
struct Bench {
    float *keys, *values, *query, *seen, *top, *mass, *scores;
    int64_t most;

    static int64_t padded(int64_t width) { return (width + LANES - 1) / LANES * LANES; }
    static int64_t floats(int64_t most, int64_t width) {
        return BLOCK * padded(width) * 2 + most * padded(width) * 2 + most * 2 * LANES + 3 * BLOCK;
    }
    Bench(float* room, int64_t most, int64_t width) : most(most) {
        const int64_t wide = padded(width);
        keys = room, values = keys + BLOCK * wide, query = values + BLOCK * wide, seen = query + most * wide;
        top = seen + most * wide, mass = top + most * LANES, scores = mass + most * LANES;
    }
};

template <bool F16> inline __m256 eight(const Heads& h, const void* base, int64_t row, int64_t at) {
    if (F16) return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)((const uint16_t*)base + row * h.width + at)));
    return _mm256_loadu_ps((const float*)base + row * h.width + at);
}
template <bool F16> inline float one(const Heads& h, const void* base, int64_t row, int64_t at) {
    return F16 ? from_half(((const uint16_t*)base)[row * h.width + at]) : ((const float*)base)[row * h.width + at];
}

/// Eight registers of eight turned: what was element j of register i is element i of register j.
inline void turn(__m256* r) {
    __m256 t[8];
    EACH for (int i = 0; i < 8; i += 2) t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]), t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    __m256 u[8];
    EACH for (int i = 0; i < 8; i += 4) {
        u[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44), u[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xEE);
        u[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44), u[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xEE);
    }
    EACH for (int i = 0; i < 4; i++) {
        r[i] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x20);
        r[i + 4] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x31);
    }
}

/// Ask for what lies a block behind row ``row``: it is needed next.
template <bool F16> inline void ask(const Heads& h, const void* base, int64_t row) {
    const int64_t bytes = h.width * (F16 ? 2 : 4);
    const char* at = (const char*)base + (row + BLOCK) * bytes;
    for (int64_t i = 0; i < bytes; i += 64) _mm_prefetch(at + i, _MM_HINT_T0);
}

template <bool F16> inline void open_rows(const Heads& h, const int64_t* at, int64_t n, const Bench& b) {
    const int64_t wide = Bench::padded(h.width), even = h.width / 8 * 8;
    for (int64_t j = 0; j < n; j += 8) {
        // Beyond the last row: that row again, for a score that nobody looks at.
        int64_t row[8];
        EACH for (int i = 0; i < 8; i++) row[i] = at[j + i < n ? j + i : n - 1];
        EACH for (int i = 0; i < 8; i++) ask<F16>(h, h.keys, row[i]);
        for (int64_t d = 0; d < even; d += 8) {
            __m256 r[8];
            EACH for (int i = 0; i < 8; i++) r[i] = eight<F16>(h, h.keys, row[i], d);
            turn(r);
            EACH for (int i = 0; i < 8; i++) _mm256_storeu_ps(b.keys + (d + i) * BLOCK + j, r[i]);
        }
        for (int64_t d = even; d < h.width; d++)
            for (int i = 0; i < 8; i++) b.keys[d * BLOCK + j + i] = one<F16>(h, h.keys, row[i], d);
    }
    for (int64_t j = 0; j < n; j++) {
        float* to = b.values + j * wide;
        ask<F16>(h, h.values, at[j]);
        for (int64_t d = 0; d < even; d += 8) _mm256_storeu_ps(to + d, eight<F16>(h, h.values, at[j], d));
        for (int64_t d = even; d < wide; d++) to[d] = d < h.width ? one<F16>(h, h.values, at[j], d) : 0.f;
    }
}

/// The keys of a block, turned to ``[width][64]``, and its values ``[64][padded width]``: the rows ``at``.
inline void open_block(const Heads& h, const int64_t* at, int64_t n, const Bench& b) {
    if (h.half) open_rows<true>(h, at, n, b);
    else open_rows<false>(h, at, n, b);
}

/// ``Q`` queries times the open block's keys; a score is one chain over the width.
template <int Q, int P> inline void score(const Bench& b, int64_t width, int64_t wide, int64_t query, int part) {
    Lanes f[Q * P];
    EACH for (int i = 0; i < Q * P; i++) f[i] = zero();
    const float* k = b.keys + part * LANES;
    const float* q = b.query + query * wide;
    for (int64_t d = 0; d < width; d++, k += BLOCK) {
        Lanes s[Q];
        EACH for (int i = 0; i < Q; i++) s[i] = splat(q[i * wide + d]);
        EACH for (int p = 0; p < P; p++) {
            const Lanes v = load(k + p * LANES);
            EACH for (int i = 0; i < Q; i++) f[i * P + p] = fma(v, s[i], f[i * P + p]);
        }
    }
    EACH for (int i = 0; i < Q; i++)
        EACH for (int p = 0; p < P; p++) store(b.scores + i * BLOCK + (part + p) * LANES, f[i * P + p]);
}

/// Weigh keys ``from`` … ``to - 1`` of the open block for query ``i``: its scores at ``s`` become weights. What its sum
/// so far must be multiplied with is given back.
inline float weigh(const Bench& b, int64_t i, float* s, int from, int to) {
    constexpr float NEVER = -3e38f;
    Lanes p[PARTS], most = splat(NEVER);
    EACH for (int k = 0; k < PARTS; k++) {
        p[k] = between(load(s + k * LANES), from - k * LANES, to - k * LANES, NEVER);
        most = larger(most, p[k]);
    }
    const float before = b.top[i * LANES], here = peak(most), top = here > before ? here : before;
    EACH for (int k = 0; k < PARTS; k++) {
        p[k] = between(exponential(p[k] - splat(top)), from - k * LANES, to - k * LANES, 0.f);
        store(s + k * LANES, p[k]);
    }
    const float fade = top > before ? exponential(before - top) : 1.f;
    float* mass = b.mass + i * LANES;
    store(mass, fma(load(mass), splat(fade), (p[0] + p[1]) + (p[2] + p[3])));
    b.top[i * LANES] = top;
    return fade;
}

/// Add the weighted values of the open block to ``Q`` queries from ``i`` on, ``P`` registers of their width at a time.
template <int Q, int P> inline void mix(const Bench& b, int64_t wide, int64_t d, int64_t i, const float* fade, int64_t from, int64_t to) {
    float* seen = b.seen + i * wide + d;
    Lanes f[Q * P];
    EACH for (int q = 0; q < Q; q++)
        EACH for (int p = 0; p < P; p++) f[q * P + p] = load(seen + q * wide + p * LANES) * splat(fade[q]);
    const float *v = b.values + from * wide + d, *w = b.scores + from;
    for (int64_t j = from; j < to; j++, v += wide, w++)
        EACH for (int p = 0; p < P; p++) {
            const Lanes here = load(v + p * LANES);
            EACH for (int q = 0; q < Q; q++) f[q * P + p] = fma(here, splat(w[q * BLOCK]), f[q * P + p]);
        }
    EACH for (int q = 0; q < Q; q++)
        EACH for (int p = 0; p < P; p++) store(seen + q * wide + p * LANES, f[q * P + p]);
}

/// Take keys ``from`` … ``to - 1`` of the open block into ``Q`` queries from ``i`` on.
template <int Q> inline void take(const Bench& b, int64_t width, int64_t i, int64_t from, int64_t to) {
    const int64_t wide = Bench::padded(width);
    score<Q, 2>(b, width, wide, i, 0);
    if (to > 2 * LANES) score<Q, 2>(b, width, wide, i, 2);
    float fade[Q];
    for (int q = 0; q < Q; q++) fade[q] = weigh(b, i + q, b.scores + q * BLOCK, int(from), int(to));
    int64_t d = 0;
    for (; d + 2 * LANES <= wide; d += 2 * LANES) mix<Q, 2>(b, wide, d, i, fade, from, to);
    if (d < wide) mix<Q, 1>(b, wide, d, i, fade, from, to);
}

/// Queries ``first`` … ``first + share * n - 1`` of the bench over the open block, which starts at key ``start``.
inline void take_rows(const Bench& b, int64_t width, const Row* rows, int64_t n, int64_t share, int64_t first, int64_t start,
                      int64_t window) {
    for (int64_t t = 0; t < n; t++) {
        const int64_t keys = rows[t].keys(), low = window && keys > window ? keys - window : 0;
        const int64_t from = low > start ? low - start : 0, to = keys - start < BLOCK ? keys - start : BLOCK;
        if (from >= to) continue;
        int64_t i = first + t * share;
        const int64_t end = i + share;
        for (; end - i == 3 || end - i > 4; i += 3) take<3>(b, width, i, from, to);
        for (; i + 2 <= end; i += 2) take<2>(b, width, i, from, to);
        if (i < end) take<1>(b, width, i, from, to);
    }
}

/// One key head: ``n`` rows of one sequence, ``share`` queries each (row ``t``'s at ``q + t * stride``), put out beside
/// one another at ``out + t * wide_out``. ``window`` keys a row sees at most, 0: all. ``scale`` multiplies the queries.
inline void attend(const Heads& h, const Row* rows, int64_t n, const int64_t* ancestors, const float* q, int64_t stride,
                   int64_t share, float scale, int64_t window, const Bench& b, float* out, int64_t out_stride) {
    const int64_t wide = Bench::padded(h.width);
    int64_t last = 0, low = INT64_MAX, common = INT64_MAX;
    bool chains = true;
    for (int64_t t = 0; t < n; t++) {
        const int64_t keys = rows[t].keys(), from = window && keys > window ? keys - window : 0;
        last = keys > last ? keys : last, low = from < low ? from : low;
        chains = chains && rows[t].chain();
        common = rows[t].prefix < common ? rows[t].prefix : common;
        for (int64_t s = 0; s < share; s++) {
            const int64_t i = t * share + s;
            for (int64_t d = 0; d < h.width; d++) b.query[i * wide + d] = q[t * stride + s * h.width + d] * scale;
            for (int64_t d = 0; d < wide; d++) b.seen[i * wide + d] = 0.f;
            b.top[i * LANES] = -3e38f;
            store(b.mass + i * LANES, zero());
        }
    }
    int64_t at[BLOCK];
    for (int64_t start = low / BLOCK * BLOCK; start < last; start += BLOCK) {
        if (chains || start + BLOCK <= common) {
            const int64_t here = last - start < BLOCK ? last - start : BLOCK;
            for (int64_t j = 0; j < here; j++) at[j] = start + j;
            open_block(h, at, here, b);
            take_rows(b, h.width, rows, n, share, 0, start, window);
            continue;
        }
        for (int64_t t = 0; t < n; t++) {
            const Row& row = rows[t];
            const int64_t left = row.keys() - start, here = left < BLOCK ? left : BLOCK;
            for (int64_t j = 0; j < here; j++) {
                const int64_t k = start + j;
                at[j] = k < row.prefix ? k : ancestors[row.first + k - row.prefix];
            }
            if (here <= 0) continue;
            open_block(h, at, here, b);
            take_rows(b, h.width, rows + t, 1, share, t * share, start, window);
        }
    }
    for (int64_t t = 0; t < n; t++)
        for (int64_t s = 0; s < share; s++) {
            const int64_t i = t * share + s;
            const float inverse = 1.f / sum(load(b.mass + i * LANES));
            for (int64_t d = 0; d < h.width; d++) out[t * out_stride + s * h.width + d] = b.seen[i * wide + d] * inverse;
        }
}

}  // namespace tandem
