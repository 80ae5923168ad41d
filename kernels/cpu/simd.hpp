// Computes with vectors of sixteen numbers, in fp32 or bf16. Intrinsics are used only for what the compiler's vector extension
// cannot express, each beside a plain fallback.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <vector>

#include "team.hpp"
#include "vectors.hpp"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

typedef uint16_t bf16;  // the upper half of a float

// Aligns a std::vector to cache lines: a read across two lines takes twice as long.
template <class T> struct AtLine {
    using value_type = T;
    template <class U> struct rebind { using other = AtLine<U>; };
    AtLine() = default;
    template <class U> AtLine(const AtLine<U>&) {}
    T* allocate(size_t n) { return (T*)std::aligned_alloc(LINE, (n * sizeof(T) + LINE - 1) / LINE * LINE); }
    void deallocate(T* p, size_t) { std::free(p); }
    bool operator==(const AtLine&) const { return true; }
    bool operator!=(const AtLine&) const { return false; }
};
template <class T> using Buffer = std::vector<T, AtLine<T>>;

INLINE i32 numbers() {  // of the lanes
    alignas(LINE) static constexpr int32_t all[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return load<i32>(all);
}
INLINE f32 splat(float x) { return f32{} + x; }
INLINE u32 splat(uint32_t x) { return u32{} + x; }

#if defined(__AVX512F__)
INLINE f32 maximum(f32 a, f32 b) { return (f32)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE float sum(f32 v) { return _mm512_reduce_add_ps((__m512)v); }
INLINE float largest(f32 v) { return _mm512_reduce_max_ps((__m512)v); }
INLINE int32_t smallest(i32 v) { return _mm512_reduce_min_epi32((__m512i)v); }
INLINE bool any(i32 mask) { return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask); }
#else
INLINE f32 maximum(f32 a, f32 b) { return select(a > b, a, b); }
// Reduces the lanes by f, first those of all registers.
template <class V, class F> inline auto fold(V v, F f) {
    for (int i = 1; i < V::PARTS; i++) v.part[0] = f(v.part[0], v.part[i]);
    auto all = v[0];
    for (int i = 1; i < V::EACH; i++) all = f(all, v.part[0][i]);
    return all;
}
INLINE float sum(f32 v) { return fold(v, [](auto a, auto b) { return a + b; }); }
INLINE float largest(f32 v) {
#if defined(__AVX2__)
    const __m256 all = _mm256_max_ps((__m256)v.part[0], (__m256)v.part[1]);
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
#else
    return fold(v, [](auto a, auto b) { return a > b ? a : b; });
#endif
}
INLINE int32_t smallest(i32 v) { return fold(v, [](auto a, auto b) { return a < b ? a : b; }); }
INLINE bool any(i32 mask) {
#if defined(__AVX2__)
    const __m256i all = (__m256i)(mask.part[0] | mask.part[1]);
    return !_mm256_testz_si256(all, all);
#else
    return fold(mask, [](auto a, auto b) { return a | b; });
#endif
}
#endif

// Returns a bit for each lane of a comparison, that of the first lane in the lowest.
INLINE uint32_t bits_of(i32 mask) {
#if defined(__AVX512DQ__)
    return _mm512_movepi32_mask((__m512i)mask);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    return _mm256_movemask_ps((__m256)mask.part[0]) | _mm256_movemask_ps((__m256)mask.part[1]) << 8;
#else
    uint32_t bits = 0;
    for (int i = 0; i < LANES; i++) bits |= (mask[i] & 1u) << i;
    return bits;
#endif
}

// A word holds two bf16, the even channel in the lower half.
INLINE f32 even(u32 words) { return (f32)(words << 16); }
INLINE f32 odd(u32 words) { return (f32)(words & 0xffff0000u); }

INLINE u32 rounded(f32 x) {  // to bf16, in the upper halves: to nearest, ties to even
    u32 bits = (u32)x;
    return bits + 0x7fff + ((bits >> 16) & 1);
}
INLINE u32 pack(f32 evens, f32 odds) { return (rounded(evens) >> 16) | (rounded(odds) & 0xffff0000u); }

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float y;
    std::memcpy(&y, &bits, 4);
    return y;
}
// Writes `count` numbers in fp32, and returns these.
template <class E> const float* widened(const E* from, int64_t count, float* to) {
    for (int64_t i = 0; i < count; i++) to[i] = to_float(from[i]);
    return to;
}
inline void put(float* to, float x) { *to = x; }
inline void put(bf16* to, float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    *to = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

#if defined(__AVX512BF16__)
constexpr bool DOTS_PAIRS = true;  // in one step
#else
constexpr bool DOTS_PAIRS = false;
#endif

// Computes acc + a.even * b.even + a.odd * b.odd, summed in fp32.
INLINE f32 dot_pairs(f32 acc, u32 a, u32 b) {
#if defined(__AVX512BF16__)
    return (f32)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#else
    acc += even(a) * even(b);
    return acc + odd(a) * odd(b);
#endif
}

// Whether bf16 that takes part in many products is widened to fp32 once, because the processor has no vectors of 64 bytes:
// to take words apart for each product costs as much as the products.
#if defined(__AVX512F__)
constexpr bool WIDENS = false;
#else
constexpr bool WIDENS = true;
#endif

// These give both element types one interface. A vector of either is one cache line; a word holds one float, or two bf16
// that are adjacent in the dimension that is summed over.
struct F32 {
    using Element = float;
    using Query = float;
    using Vector = f32;
    static constexpr int WIDTH = 16, PER_WORD = 1;  // channels of a vector, and of a word
    static INLINE void widen(const void* from, f32* to) { to[0] = load<f32>(from); }  // in the order of a head's sums
#if !defined(__AVX512F__)
    static INLINE void widen_part(u32::Register words, f32::Register* to) { to[0] = (f32::Register)words; }
#endif
    static INLINE f32 dot(f32 acc, f32 a, f32 b) { return acc + a * b; }
    static INLINE f32 dot(f32 acc, u32 a, u32 b) { return acc + (f32)a * (f32)b; }
};
struct BF16 {
    using Element = bf16;
    using Query = std::conditional_t<WIDENS, float, bf16>;  // as it is multiplied with rows
    using Vector = u32;
    static constexpr int WIDTH = 32, PER_WORD = 2;
    static INLINE void widen(const void* from, f32* to) { to[0] = even(load<u32>(from)), to[1] = odd(load<u32>(from)); }
#if !defined(__AVX512F__)
    static INLINE void widen_part(u32::Register words, f32::Register* to) {
        to[0] = (f32::Register)(words << 16), to[1] = (f32::Register)(words & 0xffff0000u);
    }
#endif
    static INLINE f32 dot(f32 acc, u32 a, u32 b) { return dot_pairs(acc, a, b); }
};
// Returns `count` channels of queries as they are multiplied with rows; `room` holds them if they are widened.
template <class T> const typename T::Query* queries(const typename T::Element* q, int64_t count, Buffer<float>& room) {
    if constexpr (std::is_same_v<typename T::Query, typename T::Element>) {
        return q;
    } else {
        room.resize(count);
        for (int64_t c = 0; c < count; c += T::WIDTH) {
            f32 wide[T::PER_WORD];
            T::widen(q + c, wide);
            for (int i = 0; i < T::PER_WORD; i++) store(&room[c + i * LANES], wide[i]);
        }
        return room.data();
    }
}

// Names the rows of one KV head of a sequence, by strides in bytes or by the table of `Ragged`.
struct HeadRows {
    char* first;
    int64_t row;  // bytes from one to the next

    HeadRows(const void* x, int64_t batch, int64_t group, int64_t row, const int64_t* table, int64_t sequence, int64_t at)
        : first((char*)x + sequence * batch + at * group), row(row) {
        if (table) first = (char*)table[3 * sequence] + at * table[3 * sequence + 1], this->row = table[3 * sequence + 2];
    }
    char* operator[](int64_t i) const { return first + i * row; }
};

// Computes 2^x, with a relative error of 2e-7 for DEGREE 5, and of 1e-4 for 3, enough for what is then rounded to bf16.
// It is 0 where a float cannot hold it, or below -126.
template <int DEGREE = 5> INLINE f32 exp2(f32 x) {
#if defined(__AVX512DQ__)
    // x - floor(x), and 0 for infinity
    f32 f = (f32)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
#else
    f32 below = x;
    x = select(x < -127.0f, splat(-127.0f), x);
    f32 shifted = x - 0.5f + 12582912.0f;  // the integer part lands in the lowest bits
    f32 f = x - (shifted - 12582912.0f);
#endif
    f32 y = splat(DEGREE == 5 ? 1.877576671e-3f : 7.802410985e-2f);
    if (DEGREE == 5) {
        y = y * f + 8.989348573e-3f;
        y = y * f + 5.582630180e-2f;
    }
    y = y * f + (DEGREE == 5 ? 2.401536272e-1f : 2.260679008e-1f);
    y = y * f + (DEGREE == 5 ? 6.931530709e-1f : 6.958331686e-1f);
    y = y * f + (DEGREE == 5 ? 9.999999252e-1f : 9.999252641e-1f);
#if defined(__AVX512DQ__)
    return (f32)_mm512_scalef_ps((__m512)y, (__m512)x);
#else
    i32 scaled = (i32)y + ((i32)shifted << 23);
    return select(below < -126.0f, f32{}, (f32)scaled);
#endif
}
