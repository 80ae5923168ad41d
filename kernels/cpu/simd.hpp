// Defines sixteen-lane vectors in the compiler's vector extension, which maps them to AVX-512, pairs of AVX2 or NEON
// registers. Intrinsics are used only for what the extension cannot express, each beside a plain fallback.
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
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

typedef float f32 __attribute__((vector_size(64)));
typedef int32_t i32 __attribute__((vector_size(64)));
typedef uint32_t u32 __attribute__((vector_size(64)));
typedef uint16_t bf16;  // the upper half of a float

constexpr int LANES = 16;
constexpr int LINE = 64;  // bytes of a vector and a cache line
#define UNROLL _Pragma("GCC unroll 16")

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

template <class V> inline V load(const void* from) {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
}
template <class V> inline void store(void* to, V v) { std::memcpy(to, &v, sizeof v); }
inline f32 splat(float x) { return f32{} + x; }
inline u32 splat(uint32_t x) { return u32{} + x; }

#if defined(__AVX512F__)
inline f32 maximum(f32 a, f32 b) { return (f32)_mm512_max_ps((__m512)a, (__m512)b); }
inline float sum(f32 v) { return _mm512_reduce_add_ps((__m512)v); }
inline float largest(f32 v) { return _mm512_reduce_max_ps((__m512)v); }
inline int32_t smallest(i32 v) { return _mm512_reduce_min_epi32((__m512i)v); }
inline bool any(i32 mask) { return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask); }
#else
inline f32 maximum(f32 a, f32 b) { return a > b ? a : b; }
template <class V, class F> inline auto fold(V v, F f) {
    auto all = v[0];
    for (int i = 1; i < LANES; i++) all = f(all, v[i]);
    return all;
}
inline float sum(f32 v) { return fold(v, [](float a, float b) { return a + b; }); }
inline float largest(f32 v) { return fold(v, [](float a, float b) { return std::max(a, b); }); }
inline int32_t smallest(i32 v) { return fold(v, [](int32_t a, int32_t b) { return std::min(a, b); }); }
inline bool any(i32 mask) { return fold(mask, [](int32_t a, int32_t b) { return a | b; }); }
#endif

// A word holds two bf16, the even channel in the lower half.
inline f32 even(u32 words) { return (f32)(words << 16); }
inline f32 odd(u32 words) { return (f32)(words & 0xffff0000u); }

inline u32 rounded(f32 x) {  // to bf16, in the upper halves: to nearest, ties to even
    u32 bits = (u32)x;
    return bits + 0x7fff + ((bits >> 16) & 1);
}
inline u32 pack(f32 evens, f32 odds) { return (rounded(evens) >> 16) | (rounded(odds) & 0xffff0000u); }

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float y;
    std::memcpy(&y, &bits, 4);
    return y;
}
inline void put(float* to, float x) { *to = x; }
inline void put(bf16* to, float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    *to = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

// Computes acc + a.even * b.even + a.odd * b.odd, summed in fp32.
inline f32 dot_pairs(f32 acc, u32 a, u32 b) {
#if defined(__AVX512BF16__)
    return (f32)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#else
    acc += even(a) * even(b);
    return acc + odd(a) * odd(b);
#endif
}

// These give both element types one interface. A vector of either is one cache line; a word holds one float, or two bf16
// that are adjacent in the dimension that is summed over.
struct F32 {
    using Element = float;
    using Vector = f32;
    static constexpr int WIDTH = 16, PER_WORD = 1;  // channels of a vector, and of a word
    static f32 dot(f32 acc, f32 a, f32 b) { return acc + a * b; }
    static f32 dot(f32 acc, u32 a, u32 b) { return acc + (f32)a * (f32)b; }
};
struct BF16 {
    using Element = bf16;
    using Vector = u32;
    static constexpr int WIDTH = 32, PER_WORD = 2;
    static f32 dot(f32 acc, u32 a, u32 b) { return dot_pairs(acc, a, b); }
};

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
template <int DEGREE = 5> inline f32 exp2(f32 x) {
#if defined(__AVX512DQ__)
    // x - floor(x), and 0 for infinity
    f32 f = (f32)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
#else
    f32 below = x;
    x = x < -127.0f ? splat(-127.0f) : x;
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
    return below < -126.0f ? f32{} : (f32)scaled;
#endif
}
