// Sixteen float lanes, the one vector type of everything here: two registers with AVX2, one with AVX-512. Both do the
// same operations in the same order, every multiply-add is fused where it is written so and nowhere else, and the
// exponential is our own: a step gives the same bits on either.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__) && defined(__AVX512VNNI__)
#define TANDEM_WIDE 1
#elif !(defined(__AVX2__) && defined(__FMA__) && defined(__F16C__))
#error "needs AVX2, FMA and F16C"
#endif

namespace tandem {

constexpr int LANES = 16;

/// Of a loop whose count is known: unrolled, so that its arrays are registers at any level of optimisation.
#define EACH _Pragma("GCC unroll 16")

#ifdef TANDEM_WIDE

struct Lanes { __m512 v; };
struct Ints { __m512i v; };

inline Lanes zero() { return {_mm512_setzero_ps()}; }
inline Lanes splat(float x) { return {_mm512_set1_ps(x)}; }
inline Lanes load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline Lanes load_half(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
inline Lanes load_brain(const uint16_t* p) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}
inline void store(float* p, Lanes x) { _mm512_storeu_ps(p, x.v); }
inline void store_half(uint16_t* p, Lanes x) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(x.v, 0)); }
inline Lanes operator+(Lanes a, Lanes b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Lanes operator-(Lanes a, Lanes b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Lanes operator*(Lanes a, Lanes b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Lanes operator/(Lanes a, Lanes b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Lanes fma(Lanes a, Lanes b, Lanes c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Lanes larger(Lanes a, Lanes b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Lanes smaller(Lanes a, Lanes b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Lanes size(Lanes a) { return {_mm512_andnot_ps(_mm512_set1_ps(-0.f), a.v)}; }
inline Lanes nearest(Lanes a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline Ints whole(Lanes a) { return {_mm512_cvtps_epi32(a.v)}; }
inline Lanes real(Ints a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline Ints minus(Ints a, int b) { return {_mm512_sub_epi32(a.v, _mm512_set1_epi32(b))}; }
inline Lanes power(Ints n) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n.v, _mm512_set1_epi32(127)), 23))}; }
/// Whether no lane of either holds what is no number.
inline bool numbers(Lanes a, Lanes b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_UNORD_Q) == 0; }
inline void store_bytes(int8_t* p, Ints a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(a.v)); }
inline __m256 halves(Lanes a) { return _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1)); }
inline __m256 peaks(Lanes a) { return _mm256_max_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1)); }
inline __m256i halves(Ints a) { return _mm256_add_epi32(_mm512_castsi512_si256(a.v), _mm512_extracti64x4_epi64(a.v, 1)); }
/// Lanes ``from`` … ``to - 1`` of ``x``, ``other`` in the rest.
inline Lanes between(Lanes x, int from, int to, float other) {
    const __m512i at = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __mmask16 in = _mm512_cmpge_epi32_mask(at, _mm512_set1_epi32(from)) & _mm512_cmplt_epi32_mask(at, _mm512_set1_epi32(to));
    return {_mm512_mask_blend_ps(in, _mm512_set1_ps(other), x.v)};
}

#else

struct Lanes { __m256 a, b; };
struct Ints { __m256i a, b; };

inline Lanes zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Lanes splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Lanes load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline Lanes load_half(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
inline __m256 brain(const uint16_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
inline Lanes load_brain(const uint16_t* p) { return {brain(p), brain(p + 8)}; }
inline void store(float* p, Lanes x) { _mm256_storeu_ps(p, x.a), _mm256_storeu_ps(p + 8, x.b); }
inline void store_half(uint16_t* p, Lanes x) {
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x.a, 0)), _mm_storeu_si128((__m128i*)(p + 8), _mm256_cvtps_ph(x.b, 0));
}
inline Lanes operator+(Lanes x, Lanes y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline Lanes operator-(Lanes x, Lanes y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline Lanes operator*(Lanes x, Lanes y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline Lanes operator/(Lanes x, Lanes y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline Lanes fma(Lanes x, Lanes y, Lanes z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline Lanes larger(Lanes x, Lanes y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline Lanes smaller(Lanes x, Lanes y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline Lanes size(Lanes x) {
    const __m256 sign = _mm256_set1_ps(-0.f);
    return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
inline Lanes nearest(Lanes x) {
    return {_mm256_round_ps(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
            _mm256_round_ps(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline Ints whole(Lanes x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
inline Lanes real(Ints x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline Ints minus(Ints x, int y) {
    const __m256i v = _mm256_set1_epi32(y);
    return {_mm256_sub_epi32(x.a, v), _mm256_sub_epi32(x.b, v)};
}
inline Lanes power(Ints n) {
    const __m256i bias = _mm256_set1_epi32(127);
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n.a, bias), 23)),
            _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n.b, bias), 23))};
}
inline bool numbers(Lanes x, Lanes y) {
    const __m256 none = _mm256_or_ps(_mm256_cmp_ps(x.a, y.a, _CMP_UNORD_Q), _mm256_cmp_ps(x.b, y.b, _CMP_UNORD_Q));
    return _mm256_movemask_ps(none) == 0;
}
inline void store_bytes(int8_t* p, Ints x) {
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xD8);
    _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}
inline __m256 halves(Lanes x) { return _mm256_add_ps(x.a, x.b); }
inline __m256 peaks(Lanes x) { return _mm256_max_ps(x.a, x.b); }
inline __m256i halves(Ints x) { return _mm256_add_epi32(x.a, x.b); }
/// Lanes ``from`` … ``to - 1`` of ``x``, ``other`` in the rest.
inline Lanes between(Lanes x, int from, int to, float other) {
    const __m256i low = _mm256_set1_epi32(from - 1), high = _mm256_set1_epi32(to);
    const __m256i at = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), next = _mm256_add_epi32(at, _mm256_set1_epi32(8));
    const __m256 rest = _mm256_set1_ps(other);
    const __m256i in = _mm256_and_si256(_mm256_cmpgt_epi32(at, low), _mm256_cmpgt_epi32(high, at));
    const __m256i also = _mm256_and_si256(_mm256_cmpgt_epi32(next, low), _mm256_cmpgt_epi32(high, next));
    return {_mm256_blendv_ps(rest, x.a, _mm256_castsi256_ps(in)), _mm256_blendv_ps(rest, x.b, _mm256_castsi256_ps(also))};
}

#endif

/// The sum of all lanes, always by the same tree: 16 to 8 to 4 to 2 to 1.
inline float sum(Lanes x) {
    const __m256 eight = halves(x);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_shuffle_ps(four, four, 1)));
}
inline int sum(Ints x) {
    const __m256i eight = halves(x);
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4E));
    return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xB1)));
}
inline float peak(Lanes x) {
    const __m256 eight = peaks(x);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_shuffle_ps(four, four, 1)));
}

/// ``exp(x)`` within 2 units in the last place for -87 … 88; beyond, the value at that end. What is no number stays so:
/// of two operands the instructions give the second one then.
inline Lanes exponential(Lanes x) {
    x = smaller(splat(88.f), larger(splat(-87.f), x));
    const Lanes n = nearest(x * splat(1.44269504f));
    Lanes r = fma(n, splat(-0.693359375f), x);
    r = fma(n, splat(2.12194440e-4f), r);
    Lanes p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = fma(p, r * r, r + splat(1.f));
    return p * power(whole(n));
}
inline float exponential(float x) {
    alignas(64) float out[LANES];
    store(out, exponential(splat(x)));
    return out[0];
}

/// ``x * sigmoid(x)``.
inline Lanes silu(Lanes x) { return x / (splat(1.f) + exponential(zero() - x)); }

/// The first ``n`` of 16, zero behind them.
inline Lanes load_some(const float* p, int n) {
    if (n >= LANES) return load(p);
    alignas(64) float in[LANES] = {};
    std::memcpy(in, p, sizeof(float) * (n > 0 ? n : 0));
    return load(in);
}
inline void store_some(float* p, Lanes x, int n) {
    if (n >= LANES) return store(p, x);
    alignas(64) float out[LANES];
    store(out, x);
    std::memcpy(p, out, sizeof(float) * (n > 0 ? n : 0));
}

inline float from_half(uint16_t x) { return _cvtsh_ss(x); }
inline uint16_t to_half(float x) { return _cvtss_sh(x, 0); }
inline float from_brain(uint16_t x) {
    const uint32_t bits = uint32_t(x) << 16;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

/// ``out = x / sqrt(sum(x²) + eps) * weight``: RMS norm where ``eps`` and ``weight`` carry the count of elements.
inline void norm(const float* x, const float* weight, int64_t n, float eps, float* out) {
    Lanes squares = zero();
    for (int64_t i = 0; i < n; i += LANES) {
        const Lanes v = load_some(x + i, int(n - i));
        squares = fma(v, v, squares);
    }
    const Lanes scale = splat(1.f / __builtin_sqrtf(sum(squares) + eps));
    for (int64_t i = 0; i < n; i += LANES)
        store_some(out + i, load_some(x + i, int(n - i)) * scale * load_some(weight + i, int(n - i)), int(n - i));
}

/// Turn the neighbouring pairs of ``x`` by ``turn``, cosine and sine a pair.
inline void rotate(float* x, const float* turn, int64_t width) {
    for (int64_t i = 0; i < width; i += 2) {
        const float a = x[i], b = x[i + 1], c = turn[i], s = turn[i + 1];
        x[i] = a * c - b * s;
        x[i + 1] = a * s + b * c;
    }
}

}  // namespace tandem
