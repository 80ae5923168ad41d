// Sixteen-lane vectors in the compiler's own vector extension: it maps them to AVX-512, to pairs of AVX2 or to NEON
// registers. Only what the extension cannot say is written with intrinsics, each beside a plain form.
#pragma once
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <vector>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

typedef float f32 __attribute__((vector_size(64)));
typedef int32_t i32 __attribute__((vector_size(64)));
typedef uint32_t u32 __attribute__((vector_size(64)));
typedef uint16_t bf16;  // the upper half of a float

constexpr int LANES = 16;
constexpr float NEGATIVE_INFINITY = -INFINITY;

template <class V> inline V load(const void* from) {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
}
template <class V> inline void store(void* to, V v) { std::memcpy(to, &v, sizeof v); }
inline f32 splat(float x) { return f32{} + x; }
inline u32 splat(uint32_t x) { return u32{} + x; }
inline f32 maximum(f32 a, f32 b) { return a > b ? a : b; }

inline float sum(f32 v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#else
    float total = 0;
    for (int i = 0; i < LANES; i++) total += v[i];
    return total;
#endif
}

inline float largest(f32 v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float best = v[0];
    for (int i = 1; i < LANES; i++) best = std::max(best, v[i]);
    return best;
#endif
}

// A word holds two bf16, the even channel in its lower half.
inline f32 even(u32 words) { return (f32)(words << 16); }
inline f32 odd(u32 words) { return (f32)(words & 0xffff0000u); }

inline uint32_t round_to_upper_half(float x) {  // to nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u;
}
inline u32 round_to_upper_half(f32 x) {
    u32 bits = (u32)x;
    return (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u;
}
inline u32 pack(f32 evens, f32 odds) { return (round_to_upper_half(evens) >> 16) | round_to_upper_half(odds); }

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float y;
    std::memcpy(&y, &bits, 4);
    return y;
}

// acc + a.even * b.even + a.odd * b.odd, summed in fp32
inline f32 dot_pairs(f32 acc, u32 a, u32 b) {
#if defined(__AVX512BF16__)
    return (f32)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#else
    acc += even(a) * even(b);
    return acc + odd(a) * odd(b);
#endif
}

// 2^x with a relative error of 1e-7; 0 below -126
inline f32 exp2(f32 x) {
    f32 clamped = x < -127.0f ? splat(-127.0f) : x;  // lets NaN through
    f32 shifted = clamped + 12582912.0f;             // the integer part lands in the lowest bits
    f32 f = clamped - (shifted - 12582912.0f);
    f32 y = splat(1.327647129e-3f);
    y = y * f + 9.675540961e-3f;
    y = y * f + 5.550713092e-2f;
    y = y * f + 2.402212024e-1f;
    y = y * f + 6.931469440e-1f;
    y = y * f + 1.0f;
    i32 scaled = (i32)y + ((i32)shifted << 23);
    return x < -126.0f ? f32{} : (f32)scaled;
}

// Sums over the lanes of sixteen vectors, as one vector.
inline f32 sums_of(const f32* v) {
    f32 pairs[8], fours[4];
    for (int i = 0; i < 8; i++) {
        f32 a = v[2 * i], b = v[2 * i + 1];
        pairs[i] = __builtin_shufflevector(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
                   __builtin_shufflevector(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
    }
    for (int i = 0; i < 4; i++) {
        f32 a = pairs[2 * i], b = pairs[2 * i + 1];
        fours[i] = __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
                   __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    }
    f32 eights[2];
    for (int i = 0; i < 2; i++) {
        f32 a = fours[2 * i], b = fours[2 * i + 1];
        eights[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
                    __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    }
    f32 a = eights[0], b = eights[1];
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
           __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
}
