// What Python calls, by ctypes: matrices, the dense step, and the pieces that other models are built from.
// No call keeps anything but a step's handle; every call says how many threads it may use.

#include "recurrent.h"
#include "step.h"

using namespace tandem;

extern "C" {

/// Sizes of the structures, so that both sides agree on them.
int64_t tandem_sizes(int64_t which) {
    const int64_t sizes[] = {sizeof(Matrix), sizeof(Layer), sizeof(Model), sizeof(Row), sizeof(Cache)};
    return which < 5 ? sizes[which] : 0;
}

/// The instructions that the compiler was told it may use.
const char* tandem_instructions() {
#ifdef TANDEM_WIDE
    return "avx512-vnni";
#else
    return "avx2";
#endif
}

int64_t tandem_matrix_bytes(const Matrix* m) { return m->strips() * m->strip(); }

/// Rows ``first`` … of a quantised matrix: codes a byte a column, scales (and offsets) a group.
void tandem_matrix_pack(const Matrix* m, int64_t first, int64_t n, const uint8_t* codes, const float* scales, const float* offsets) {
    const int64_t groups = m->cols / m->group;
    for (int64_t r = 0; r < n; r++)
        pack_row(*m, first + r, codes + r * m->cols, scales + r * groups, offsets ? offsets + r * groups : nullptr);
}

/// Rows ``first`` … of a plain matrix, as they lie in the file.
void tandem_matrix_pack_plain(const Matrix* m, int64_t first, int64_t n, const uint8_t* rows) {
    const int64_t width = m->cols * (m->form == FLOAT ? 4 : 2);
    for (int64_t r = 0; r < n; r++) pack_plain(*m, first + r, rows + r * width);
}

void tandem_matrix_gather(const Matrix* m, const int64_t* ids, int64_t n, float* out) {
    for (int64_t r = 0; r < n; r++) decode_row(*m, ids[r], out + r * m->cols);
}

/// ``x`` ``[n, cols]`` times the matrix: ``[n, rows]``.
void tandem_matrix_multiply(const Matrix* m, const float* x, int64_t n, float* out, int64_t threads) {
    const Rounded room(n < TILE ? n : TILE, m->cols);
    const Input in = room.of(m->cols);
    together(threads, [&](Thread& t) {
        const int64_t a = t.from(m->strips()), b = t.to(m->strips());
        for (int64_t first = 0; first < n; first += TILE) {
            const int64_t count = n - first < TILE ? n - first : TILE;
            for (int64_t r = t.from(count); r < t.to(count); r++) {
                std::memcpy(in.x + r * m->cols, x + (first + r) * m->cols, sizeof(float) * m->cols);
                if (m->quantised()) quantise(in, r);
            }
            t.wait();
            multiply(*m, a, b, in, count, {out + first * m->rows + a * LANES, m->rows, false, nullptr});
            t.wait();
        }
    });
}

/// Null where there is no memory for it.
void* tandem_step_new(const Model* model, int64_t threads) {
    try {
        return new Step(*model, threads);
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}

void tandem_step_free(void* step) { delete (Step*)step; }

void tandem_step_run(void* step, const Row* rows, const uint8_t* wanted, int64_t n, const int64_t* ancestors, const Cache* caches,
                     float* logits, int64_t threads) {
    ((Step*)step)->run(rows, wanted, n, ancestors, caches, logits, threads);
}

/// ``x / sqrt(sum(x²) + eps) * weight`` of ``n`` rows.
void tandem_norm(const float* x, const float* weight, int64_t n, int64_t cols, float eps, float* out) {
    for (int64_t r = 0; r < n; r++) norm(x + r * cols, weight, cols, eps, out + r * cols);
}

/// Attention of rows of one sequence: ``q`` ``[n, heads, width]`` over ``kv`` ``[2 * kv_heads, rows, width]``, float16 or
/// float32, each row ``per`` bytes apart from the next head's.
void tandem_attend(const float* q, const Row* rows, int64_t n, const int64_t* ancestors, const uint8_t* kv, int64_t half, int64_t per,
                   int64_t heads, int64_t kv_heads, int64_t width, float scale, int64_t window, float* out, int64_t threads) {
    const int64_t share = heads / kv_heads, most = share >= 64 ? 1 : 64 / share < 16 ? 64 / share : 16;
    const int64_t segments = (n + most - 1) / most;
    together(threads, [&](Thread& t) {
        const Room<float> room(Bench::floats(most * share, width));
        const Bench bench(room.data, most * share, width);
        t.each(segments * kv_heads, [&](int64_t i) {
            const int64_t first = i / kv_heads * most, count = n - first < most ? n - first : most, head = i % kv_heads;
            const Heads h{kv + head * per, kv + (kv_heads + head) * per, width, half != 0};
            const int64_t at = (first * heads + head * share) * width;
            attend(h, rows + first, count, ancestors, q + at, heads * width, share, scale, window, bench, out + at, heads * width);
        });
    });
}

/// A causal convolution and silu: ``inputs`` ``[width - 1 + n, channels]``, ``seen`` ``[n, width]`` or null.
void tandem_convolve(const float* inputs, const int64_t* seen, const float* weight, int64_t n, int64_t width, int64_t channels,
                     float* out, int64_t threads) {
    together(threads, [&](Thread& t) {
        const int64_t blocks = (channels + LANES - 1) / LANES, to = t.to(blocks) * LANES;
        for (int64_t r = 0; r < n; r++)
            convolve(inputs, seen, weight, r, width, channels, t.from(blocks) * LANES, to < channels ? to : channels, out);
    });
}

/// The gated delta rule over ``n`` rows; ``out`` null: only the last row's state is wanted.
void tandem_recall(const float* state, const float* q, const float* k, const float* v, const float* decay, const float* rate,
                   const int64_t* parents, int64_t n, int64_t heads, int64_t keys, int64_t values, float* out, float* last,
                   int64_t threads) {
    const Recalled in{q, k, v, decay, rate, n, heads, keys, values};
    const int64_t slices = (values + SLICE - 1) / SLICE;
    together(threads, [&](Thread& t) {
        for (int64_t i = t.from(heads * slices); i < t.to(heads * slices); i++)
            recall(in, state, parents, i / slices, i % slices * SLICE, out, last);
    });
}
}
