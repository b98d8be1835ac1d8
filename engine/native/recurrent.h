// What recurrent layers are built from: a causal convolution over few rows, and the gated delta rule.
#pragma once

#include <vector>

#include "step.h"

namespace tandem {

/// ``silu`` of row ``r``'s convolution for channels ``from`` … ``to - 1``: inputs ``seen`` (or the next ``width``) in
/// order, each times its tap.
inline void convolve(const float* inputs, const int64_t* seen, const float* weight, int64_t r, int64_t width, int64_t channels,
                     int64_t from, int64_t to, float* out) {
    for (int64_t c = from; c < to; c += LANES) {
        const int left = int(to - c);
        Lanes total = zero();
        for (int64_t k = 0; k < width; k++) {
            const int64_t row = seen ? seen[r * width + k] : r + k;
            total = fma(load_some(inputs + row * channels + c, left), load_some(weight + k * channels + c, left), total);
        }
        store_some(out + r * channels + c, silu(total), left);
    }
}

/// Rows of one sequence for the delta rule: ``q``, ``k`` ``[n, heads, keys]``, ``v`` ``[n, heads, values]``, ``decay``,
/// ``rate`` ``[n, heads]``.
struct Recalled {
    const float *q, *k, *v, *decay, *rate;
    int64_t n, heads, keys, values;
};

constexpr int64_t SLICE = 2 * LANES;

/// One row for a slice of a head's values, ``state`` ``[keys][SLICE]``: fade, correct towards ``v``, recall by ``q``.
inline void advance(const Recalled& in, int64_t r, int64_t head, int64_t from, int64_t width, float* state, float* out) {
    const int64_t at = r * in.heads + head;
    const float *q = in.q + at * in.keys, *k = in.k + at * in.keys, *v = in.v + at * in.values + from;
    const Lanes decay = splat(in.decay[at]), rate = splat(in.rate[at]);
    Lanes known[2] = {zero(), zero()}, wrong[2], seen[2] = {zero(), zero()};
    for (int64_t i = 0; i < in.keys; i++)
        EACH for (int p = 0; p < 2; p++) {
            const Lanes s = load(state + i * SLICE + p * LANES) * decay;
            store(state + i * SLICE + p * LANES, s);
            known[p] = fma(s, splat(k[i]), known[p]);
        }
    EACH for (int p = 0; p < 2; p++) wrong[p] = (load_some(v + p * LANES, int(width) - p * LANES) - known[p]) * rate;
    for (int64_t i = 0; i < in.keys; i++)
        EACH for (int p = 0; p < 2; p++) {
            const Lanes s = fma(wrong[p], splat(k[i]), load(state + i * SLICE + p * LANES));
            store(state + i * SLICE + p * LANES, s);
            seen[p] = fma(s, splat(q[i]), seen[p]);
        }
    if (out) EACH for (int p = 0; p < 2; p++) store_some(out + at * in.values + from + p * LANES, seen[p], int(width) - p * LANES);
}

/// All rows for the slice of ``head`` from value ``from`` on. A row starts from its parent's state; null: from that of
/// the row before. ``last`` gets the last row's state.
inline void recall(const Recalled& in, const float* state, const int64_t* parents, int64_t head, int64_t from, float* out, float* last) {
    const int64_t width = in.values - from < SLICE ? in.values - from : SLICE, size = in.keys * SLICE;
    const int64_t base = head * in.keys * in.values + from;
    // States that a row other than the next one starts from.
    std::vector<int64_t> place(size_t(in.n) + 1, -1);
    int64_t kept = 1;
    if (parents) {
        place[0] = 0;
        for (int64_t r = 0; r < in.n; r++)
            if (parents[r] != r - 1 && place[parents[r] + 1] < 0) place[parents[r] + 1] = kept++;
    }
    const Room<float> room((kept + 1) * size);
    float *now = room.data, *store_at = room.data + size;
    for (int64_t i = 0; i < in.keys; i++)
        for (int64_t p = 0; p < SLICE; p += LANES)
            store(now + i * SLICE + p, load_some(state + base + i * in.values + p, int(width - p)));
    if (parents) std::memcpy(store_at, now, sizeof(float) * size);
    for (int64_t r = 0; r < in.n; r++) {
        if (parents && parents[r] != r - 1) std::memcpy(now, store_at + place[parents[r] + 1] * size, sizeof(float) * size);
        advance(in, r, head, from, width, now, out);
        if (parents && place[r + 1] >= 0) std::memcpy(store_at + place[r + 1] * size, now, sizeof(float) * size);
    }
    for (int64_t i = 0; i < in.keys; i++)
        for (int64_t p = 0; p < SLICE; p += LANES)
            store_some(last + base + i * in.values + p, load(now + i * SLICE + p), int(width - p));
}

}  // namespace tandem
