// A weight matrix in strips of 16 rows, and the product of a strip with a few rows of activations.
//
// A strip's columns follow one another in blocks of 32. Quantised: the block's codes in quads, four columns of each of
// the 16 rows, so that a quad is one multiply-add of bytes; then the scales of the 16 rows, and their offsets. Four-bit
// codes: the low halves of 64 bytes are quad c, the high ones quad c + 4. Plain: 16 rows of one column side by side.
//
// Activations are rounded to eight bits in groups of 32 as well, so dots are whole numbers; a row's groups are added in
// the order of its columns, whatever rows stand beside it: its result is the same bits in every batch.
#pragma once

#include "vector.h"

namespace tandem {

enum Form : int32_t { FOUR = 4, EIGHT = 8, BRAIN = 16, HALF = 17, FLOAT = 32 };
enum Scale : int32_t { PLAIN = 0, SHORT = 1, SHORT_OFFSET = 2, LONG = 3, LONG_OFFSET = 4 };

/// A weight is ``scale * (code - centre) + offset``; a scale serves ``group`` columns, 32 or 16.
struct Matrix {
    int32_t form, scale, group, centre;
    int64_t rows, cols;
    uint8_t* data;

    bool quantised() const { return form == FOUR || form == EIGHT; }
    int64_t strips() const { return (rows + LANES - 1) / LANES; }
    int64_t codes() const { return form == FOUR ? 256 : form == EIGHT ? 512 : form == FLOAT ? 2048 : 1024; }
    int64_t scales() const {
        const int64_t width[] = {0, 32, 64, 64, 128};
        return quantised() ? width[scale] * (32 / group) : 0;
    }
    int64_t block() const { return codes() + scales(); }
    int64_t strip() const { return cols / 32 * block(); }
};

/// Rows of activations: as they are, and rounded to ``scale * q`` with, a group, the sum of q (of each half) and the
/// sum times the scale.
struct Input {
    float* x;
    int8_t* q;
    float *scale, *total;
    int32_t* sums;
    int64_t cols;
};

/// Round row ``row`` of ``in``, whose ``x`` is there. A min's product takes the rounded sum: codes alone are not
/// centred, so with the exact sum the rounding would not cancel. Where one of a group is no number, or infinite, its scale
/// is no number: codes cannot say so, and the products must.
inline void quantise(const Input& in, int64_t row) {
    const float* x = in.x + row * in.cols;
    int8_t* q = in.q + row * in.cols;
    const int64_t groups = in.cols / 32;
    for (int64_t g = 0; g < groups; g++) {
        const Lanes a = load(x + g * 32), b = load(x + g * 32 + 16);
        const float most = peak(larger(size(a), size(b)));
        const int64_t at = row * groups + g;
        if (!numbers(a, b) || most > 3.4028234e38f) {
            std::memset(q + g * 32, 0, 32);
            in.sums[2 * at] = in.sums[2 * at + 1] = 0;
            in.scale[at] = in.total[at] = __builtin_nanf("");
            continue;
        }
        const float inverse = most > 1e-30f ? 127.f / most : 0.f, scale = most > 1e-30f ? most / 127.f : 0.f;
        const Ints i = whole(a * splat(inverse)), j = whole(b * splat(inverse));
        store_bytes(q + g * 32, i), store_bytes(q + g * 32 + 16, j);
        const int first = sum(i), second = sum(j);
        in.sums[2 * at] = first, in.sums[2 * at + 1] = second;
        in.scale[at] = scale;
        in.total[at] = scale * float(first + second);
    }
}

inline int quad(const int8_t* q, int at) {
    int out;
    std::memcpy(&out, q + 4 * at, 4);
    return out;
}

#ifdef TANDEM_WIDE
constexpr int MOST = 8;

template <int M> inline void dot4(const uint8_t* w, const int8_t* q, int64_t stride, Ints* out) {
    const __m512i low = _mm512_set1_epi8(15);
    __m512i also[M];
    EACH for (int r = 0; r < M; r++) out[r].v = also[r] = _mm512_setzero_si512();
    EACH for (int c = 0; c < 4; c++) {
        const __m512i both = _mm512_loadu_si512(w + 64 * c);
        const __m512i a = _mm512_and_si512(both, low), b = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
        EACH for (int r = 0; r < M; r++) {
            out[r].v = _mm512_dpbusd_epi32(out[r].v, a, _mm512_set1_epi32(quad(q + r * stride, c)));
            also[r] = _mm512_dpbusd_epi32(also[r], b, _mm512_set1_epi32(quad(q + r * stride, c + 4)));
        }
    }
    EACH for (int r = 0; r < M; r++) out[r].v = _mm512_add_epi32(out[r].v, also[r]);
}

template <int M, int FROM, int TO>
inline void dot8(const uint8_t* w, const int8_t* q, int64_t stride, const int32_t* sums, int64_t groups, Ints* out) {
    const __m512i flip = _mm512_set1_epi8(-128);
    EACH for (int r = 0; r < M; r++) {
        const int32_t* s = sums + 2 * r * groups;
        out[r].v = _mm512_set1_epi32(-128 * ((FROM == 0 ? s[0] : 0) + (TO == 8 ? s[1] : 0)));
    }
    EACH for (int c = FROM; c < TO; c++) {
        const __m512i a = _mm512_xor_si512(_mm512_loadu_si512(w + 64 * c), flip);
        EACH for (int r = 0; r < M; r++) out[r].v = _mm512_dpbusd_epi32(out[r].v, a, _mm512_set1_epi32(quad(q + r * stride, c)));
    }
}
#else
constexpr int MOST = 4;

/// Left alone by the compiler: it would gather sums of whole numbers into trees that no set of registers holds.
inline __m256i fixed(__m256i x) {
    asm("" : "+x"(x));
    return x;
}

// 8 quads of 2 * 15 * 127 fit into 16 bits.
template <int M> inline void dot4(const uint8_t* w, const int8_t* q, int64_t stride, Ints* out) {
    const __m256i low = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    __m256i f[M], g[M];
    EACH for (int r = 0; r < M; r++) f[r] = g[r] = _mm256_setzero_si256();
    EACH for (int c = 0; c < 8; c++) {
        __m256i a = _mm256_loadu_si256((const __m256i*)(w + 64 * (c % 4)));
        __m256i b = _mm256_loadu_si256((const __m256i*)(w + 64 * (c % 4) + 32));
        if (c >= 4) a = _mm256_srli_epi16(a, 4), b = _mm256_srli_epi16(b, 4);
        a = fixed(_mm256_and_si256(a, low)), b = fixed(_mm256_and_si256(b, low));
        EACH for (int r = 0; r < M; r++) {
            const __m256i s = _mm256_set1_epi32(quad(q + r * stride, c));
            f[r] = fixed(_mm256_add_epi16(f[r], _mm256_maddubs_epi16(a, s)));
            g[r] = fixed(_mm256_add_epi16(g[r], _mm256_maddubs_epi16(b, s)));
        }
    }
    EACH for (int r = 0; r < M; r++) out[r] = {_mm256_madd_epi16(f[r], ones), _mm256_madd_epi16(g[r], ones)};
}

// |w| times x with w's sign: 2 * 128 * 127 fits into 16 bits.
template <int M, int FROM, int TO>
inline void dot8(const uint8_t* w, const int8_t* q, int64_t stride, const int32_t*, int64_t, Ints* out) {
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i f[M], g[M];
    EACH for (int r = 0; r < M; r++) f[r] = g[r] = _mm256_setzero_si256();
    EACH for (int c = FROM; c < TO; c++) {
        const __m256i a = _mm256_loadu_si256((const __m256i*)(w + 64 * c));
        const __m256i b = _mm256_loadu_si256((const __m256i*)(w + 64 * c + 32));
        const __m256i pa = _mm256_abs_epi8(a), pb = _mm256_abs_epi8(b);
        EACH for (int r = 0; r < M; r++) {
            const __m256i s = _mm256_set1_epi32(quad(q + r * stride, c));
            const __m256i u = _mm256_maddubs_epi16(pa, _mm256_sign_epi8(s, a));
            const __m256i v = _mm256_maddubs_epi16(pb, _mm256_sign_epi8(s, b));
            f[r] = fixed(_mm256_add_epi32(f[r], _mm256_madd_epi16(u, ones)));
            g[r] = fixed(_mm256_add_epi32(g[r], _mm256_madd_epi16(v, ones)));
        }
    }
    EACH for (int r = 0; r < M; r++) out[r] = {f[r], g[r]};
}
#endif

template <int SCALE> inline Lanes scale_of(const uint8_t* p) {
    return SCALE == SHORT || SCALE == SHORT_OFFSET ? load_half((const uint16_t*)p) : load((const float*)p);
}
template <int SCALE> inline Lanes offset_of(const uint8_t* p) {
    return SCALE == SHORT_OFFSET ? load_half((const uint16_t*)(p + 32)) : load((const float*)(p + 64));
}
template <int SCALE> constexpr bool HAS_OFFSET = SCALE == SHORT_OFFSET || SCALE == LONG_OFFSET;

/// 16 outputs of ``M`` rows from ``row`` on: one strip of quantised weights.
template <int FORM, int SCALE, int GROUP, int M>
inline void strip_of(const Matrix& m, const uint8_t* w, const Input& in, int64_t row, Lanes* f) {
    const int64_t cols = m.cols, groups = cols / 32, size = m.block();
    const int8_t* q = in.q + row * cols;
    const int64_t at = row * groups;
    EACH for (int r = 0; r < M; r++) f[r] = zero();
    for (int64_t g = 0; g < groups; g++, w += size, q += 32) {
        EACH for (int line = 0; line < (FORM == FOUR ? 5 : 9); line++)
            _mm_prefetch((const char*)w + (FORM == FOUR ? 3840 : 4096) + 64 * line, _MM_HINT_T0);
        const uint8_t* s = w + (FORM == FOUR ? 256 : 512);
        Ints dots[M];
        if (GROUP == 16) {
            const Lanes d = scale_of<SCALE>(s), e = scale_of<SCALE>(s + (SCALE == SHORT ? 32 : 64));
            const int32_t* sums = in.sums + 2 * (at + g);
            dot8<M, 0, 4>(w, q, cols, sums, groups, dots);
            EACH for (int r = 0; r < M; r++) f[r] = fma(real(dots[r]), d * splat(in.scale[at + r * groups + g]), f[r]);
            dot8<M, 4, 8>(w, q, cols, sums, groups, dots);
            EACH for (int r = 0; r < M; r++) f[r] = fma(real(dots[r]), e * splat(in.scale[at + r * groups + g]), f[r]);
            continue;
        }
        if (FORM == FOUR) dot4<M>(w, q, cols, dots);
        else dot8<M, 0, 8>(w, q, cols, in.sums + 2 * (at + g), groups, dots);
        const Lanes d = scale_of<SCALE>(s);
        EACH for (int r = 0; r < M; r++) {
            const int64_t n = at + r * groups + g;
            if (FORM == FOUR && !HAS_OFFSET<SCALE>) dots[r] = minus(dots[r], m.centre * (in.sums[2 * n] + in.sums[2 * n + 1]));
            f[r] = fma(real(dots[r]), d * splat(in.scale[n]), f[r]);
            if (HAS_OFFSET<SCALE>) f[r] = fma(offset_of<SCALE>(s), splat(in.total[n]), f[r]);
        }
    }
}

template <int FORM> inline Lanes weights(const uint8_t* w) {
    return FORM == BRAIN ? load_brain((const uint16_t*)w) : FORM == HALF ? load_half((const uint16_t*)w) : load((const float*)w);
}

/// The same of plain weights: ``M`` rows by ``S`` strips, each output one chain over the columns.
template <int FORM, int M, int S>
inline void plain_of(const Matrix& m, const uint8_t* w, const Input& in, int64_t row, Lanes* f) {
    constexpr int64_t WIDTH = FORM == FLOAT ? 64 : 32;
    const float* x = in.x + row * m.cols;
    const int64_t size = m.strip();
    EACH for (int i = 0; i < M * S; i++) f[i] = zero();
    for (int64_t c = 0; c < m.cols; c += 4, w += 4 * WIDTH, x += 4)
        EACH for (int k = 0; k < 4; k++)
            EACH for (int s = 0; s < S; s++) {
                const Lanes v = weights<FORM>(w + s * size + k * WIDTH);
                EACH for (int r = 0; r < M; r++) f[r * S + s] = fma(v, splat(x[r * m.cols + k]), f[r * S + s]);
            }
}

/// Where products go: row ``r``, strip ``s`` at ``out + r * stride + (s - first) * 16``, put or added.
struct Output {
    float* out;
    int64_t stride;
    bool add;
    const float* bias;

    void put(const Matrix& m, int64_t first, int64_t strip, int64_t row, Lanes f) const {
        float* to = out + row * stride + (strip - first) * LANES;
        const int64_t left = m.rows - strip * LANES;
        if (bias) f = f + load_some(bias + strip * LANES, int(left));
        if (add) f = f + load_some(to, int(left));
        store_some(to, f, int(left));
    }
};

template <int FORM, int SCALE, int GROUP>
void quantised_strips(const Matrix& m, int64_t a, int64_t b, const Input& in, int64_t n, const Output& to) {
    for (int64_t s = a; s < b; s++) {
        const uint8_t* w = m.data + s * m.strip();
        Lanes f[MOST];
        int64_t row = 0;
        for (; row + MOST <= n; row += MOST) {
            strip_of<FORM, SCALE, GROUP, MOST>(m, w, in, row, f);
            for (int r = 0; r < MOST; r++) to.put(m, a, s, row + r, f[r]);
        }
        if (MOST > 4 && row + 4 <= n) {
            strip_of<FORM, SCALE, GROUP, 4>(m, w, in, row, f);
            for (int r = 0; r < 4; r++) to.put(m, a, s, row + r, f[r]);
            row += 4;
        }
        if (row + 3 == n) {
            strip_of<FORM, SCALE, GROUP, 3>(m, w, in, row, f);
            for (int r = 0; r < 3; r++) to.put(m, a, s, row + r, f[r]);
        } else if (row + 2 == n) {
            strip_of<FORM, SCALE, GROUP, 2>(m, w, in, row, f);
            for (int r = 0; r < 2; r++) to.put(m, a, s, row + r, f[r]);
        } else if (row + 1 == n) {
            strip_of<FORM, SCALE, GROUP, 1>(m, w, in, row, f);
            to.put(m, a, s, row, f[0]);
        }
    }
}

template <int FORM> void plain_strips(const Matrix& m, int64_t a, int64_t b, const Input& in, int64_t n, const Output& to) {
    Lanes f[4];
    for (int64_t s = a; s < b;) {
        const uint8_t* w = m.data + s * m.strip();
        int64_t row = 0;
        for (; row + 4 <= n; row += 4) {
            plain_of<FORM, 4, 1>(m, w, in, row, f);
            for (int r = 0; r < 4; r++) to.put(m, a, s, row + r, f[r]);
        }
        const int wide = n < 4 && s + 4 <= b ? 4 : 1;
        for (; row < n; row++) {
            if (wide == 4) plain_of<FORM, 1, 4>(m, w, in, row, f);
            else plain_of<FORM, 1, 1>(m, w, in, row, f);
            for (int i = 0; i < wide; i++) to.put(m, a, s + i, row, f[i]);
        }
        s += wide;
    }
}

/// The strips ``a`` … ``b - 1`` of ``m`` times the first ``n`` rows of ``in``.
inline void multiply(const Matrix& m, int64_t a, int64_t b, const Input& in, int64_t n, const Output& to) {
    if (m.form == FOUR) {
        if (m.scale == SHORT) return quantised_strips<FOUR, SHORT, 32>(m, a, b, in, n, to);
        if (m.scale == SHORT_OFFSET) return quantised_strips<FOUR, SHORT_OFFSET, 32>(m, a, b, in, n, to);
        return quantised_strips<FOUR, LONG_OFFSET, 32>(m, a, b, in, n, to);
    }
    if (m.form == EIGHT) {
        if (m.group == 16) return quantised_strips<EIGHT, LONG, 16>(m, a, b, in, n, to);
        if (m.scale == SHORT) return quantised_strips<EIGHT, SHORT, 32>(m, a, b, in, n, to);
        return quantised_strips<EIGHT, LONG_OFFSET, 32>(m, a, b, in, n, to);
    }
    if (m.form == BRAIN) return plain_strips<BRAIN>(m, a, b, in, n, to);
    if (m.form == HALF) return plain_strips<HALF>(m, a, b, in, n, to);
    return plain_strips<FLOAT>(m, a, b, in, n, to);
}

/// Row ``row`` of ``m`` as float32: exactly what the file's weights decode to.
inline void decode_row(const Matrix& m, int64_t row, float* out) {
    const uint8_t* w = m.data + row / LANES * m.strip();
    const int lane = int(row % LANES);
    for (int64_t c = 0; c < m.cols; c++) {
        if (!m.quantised()) {
            const int64_t at = c * LANES + lane;
            out[c] = m.form == FLOAT ? ((const float*)w)[at]
                     : m.form == HALF ? from_half(((const uint16_t*)w)[at]) : from_brain(((const uint16_t*)w)[at]);
            continue;
        }
        const uint8_t* block = w + c / 32 * m.block();
        const int at = int(c % 32), q = at / 4, k = at % 4;
        int code;
        if (m.form == FOUR) code = (block[(q % 4) * 64 + lane * 4 + k] >> (q < 4 ? 0 : 4)) & 15;
        else code = ((const int8_t*)block)[q * 64 + lane * 4 + k];
        const uint8_t* s = block + m.codes();
        const bool brief = m.scale == SHORT || m.scale == SHORT_OFFSET, offset = m.scale == SHORT_OFFSET || m.scale == LONG_OFFSET;
        if (m.group == 16 && at >= 16) s += m.scales() / 2;
        const float scale = brief ? from_half(((const uint16_t*)s)[lane]) : ((const float*)s)[lane];
        out[c] = float(code - m.centre) * scale;
        if (offset) out[c] += brief ? from_half(((const uint16_t*)s)[LANES + lane]) : ((const float*)s)[LANES + lane];
    }
}

/// Put one row's codes, a byte a column, and its scales and offsets, one a group, in their places.
inline void pack_row(const Matrix& m, int64_t row, const uint8_t* codes, const float* scales, const float* offsets) {
    uint8_t* w = m.data + row / LANES * m.strip();
    const int lane = int(row % LANES);
    const int parts = 32 / m.group;
    for (int64_t g = 0; g < m.cols / 32; g++, w += m.block(), codes += 32) {
        for (int q = 0; q < 8; q++)
            for (int k = 0; k < 4; k++) {
                if (m.form == EIGHT) w[q * 64 + lane * 4 + k] = codes[4 * q + k];
                else if (q < 4) w[q * 64 + lane * 4 + k] = uint8_t(codes[4 * q + k] | codes[4 * q + k + 16] << 4);
            }
        for (int p = 0; p < parts; p++) {
            uint8_t* s = w + m.codes() + p * m.scales() / parts;
            const float scale = scales[g * parts + p];
            if (m.scale == SHORT || m.scale == SHORT_OFFSET) {
                ((uint16_t*)s)[lane] = to_half(scale);
                if (m.scale == SHORT_OFFSET) ((uint16_t*)s)[LANES + lane] = to_half(offsets[g]);
            } else {
                ((float*)s)[lane] = scale;
                if (m.scale == LONG_OFFSET) ((float*)s)[LANES + lane] = offsets[g];
            }
        }
    }
}

/// Put one row of plain weights in its place.
inline void pack_plain(const Matrix& m, int64_t row, const uint8_t* from) {
    const int64_t width = m.form == FLOAT ? 4 : 2;
    uint8_t* w = m.data + row / LANES * m.strip() + row % LANES * width;
    for (int64_t c = 0; c < m.cols; c++) std::memcpy(w + c * LANES * width, from + c * width, size_t(width));
}

}  // namespace tandem
