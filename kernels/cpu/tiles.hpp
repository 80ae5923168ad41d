// Multiplies a few rows with a block: the inner loop of every matrix product here. A word is one fp32, or two bf16 that
// are adjacent in the dimension that is summed over.
#pragma once
#include "simd.hpp"

constexpr int TILE_ROWS = 4;

// Calls f(row, n) for all rows of a block, which eight divides: for n rows at a time. Registers of AVX2 hold the sums
// of six, which hide the time that a sum takes.
template <int AT_ONCE, class F> INLINE void in_tiles(int rows, F f) {
    int row = 0;
    if (HELD == 8)
        for (; row < rows / 8 * 6; row += 6) f(row, std::integral_constant<int, 6>{});
    for (; row < rows; row += AT_ONCE) f(row, std::integral_constant<int, AT_ONCE>{});
}

// Computes c[ROWS][V vectors] = or += a[ROWS][words] times b[words][V vectors]; strides are in words.
template <class T, bool ADD, int V, int ROWS>
INLINE void multiply_rows(const uint32_t* a, int64_t a_stride, const uint32_t* b, int64_t b_stride, int64_t words, float* c,
                          int64_t c_stride) {
    f32 sum[ROWS][V] = {};
    if (ADD) UNROLL for (int i = 0; i < V * ROWS; i++) sum[i / V][i % V] = load<f32>(c + i / V * c_stride + i % V * LANES);
    for (int64_t s = 0; s < words; s++) {
        u32 part[V];
        UNROLL for (int i = 0; i < V; i++) part[i] = load<u32>(b + s * b_stride + i * LANES);
#if !defined(__AVX512F__)
        keep(part[0]);
#endif
        UNROLL for (int r = 0; r < ROWS; r++) {
            u32 x = splat(a[r * a_stride + s]);
            UNROLL for (int i = 0; i < V; i++) sum[r][i] = T::dot(sum[r][i], x, part[i]);
        }
    }
    UNROLL for (int i = 0; i < V * ROWS; i++) store(c + i / V * c_stride + i % V * LANES, sum[i / V][i % V]);
}

// Does so for `rows` rows and `columns` columns. Not inlined: in larger functions gcc 12 writes what it keeps to memory.
template <class T, bool ADD>
__attribute__((noinline)) void multiply_columns(const uint32_t* a, int64_t a_stride, int rows, const uint32_t* b,
                                                int64_t b_stride, int64_t words, float* c, int64_t c_stride, int columns) {
    for (int n = 0; n < columns; n += LANES)
        in_tiles<TILE_ROWS>(rows, [&](int m, auto count) {
            multiply_rows<T, ADD, 1, count>(a + m * a_stride, a_stride, b + n, b_stride, words, c + m * c_stride + n, c_stride);
        });
}

// Computes acc[r][i] += rows[r][0 ... steps) times b, whose step s holds V vectors at b + s * stride (in words).
template <class T, int V>
inline void multiply(const uint32_t* const* rows, const uint32_t* b, int64_t stride, int steps, f32 (&acc)[TILE_ROWS][V]) {
    constexpr int AT_ONCE = std::max(1, HELD / (2 * TILE_ROWS));  // vectors of b
    if constexpr (V > AT_ONCE) {
        for (int i = 0; i < V; i++) {
            f32 part[TILE_ROWS][1];
            UNROLL for (int r = 0; r < TILE_ROWS; r++) part[r][0] = acc[r][i];
            multiply<T, 1>(rows, b + i * LANES, stride, steps, part);
            UNROLL for (int r = 0; r < TILE_ROWS; r++) acc[r][i] = part[r][0];
        }
        return;
    }
    f32 sum[TILE_ROWS][V];  // a local, so that it stays in registers
    UNROLL for (int i = 0; i < TILE_ROWS * V; i++) sum[i / V][i % V] = acc[i / V][i % V];
    for (int s = 0; s < steps; s++) {
        u32 part[V];
        UNROLL for (int i = 0; i < V; i++) {
            part[i] = load<u32>(b + s * stride + i * LANES);
            keep(part[i]);
        }
        UNROLL for (int r = 0; r < TILE_ROWS; r++) {
            u32 a = splat(rows[r][s]);
            UNROLL for (int i = 0; i < V; i++) sum[r][i] = T::dot(sum[r][i], a, part[i]);
        }
    }
    UNROLL for (int i = 0; i < TILE_ROWS * V; i++) acc[i / V][i % V] = sum[i / V][i % V];
}

// Packs adjacent lanes of a, then of b, as words of two bf16.
INLINE u32 pack_neighbours(f32 a, f32 b) {
#if defined(__AVX512BF16__)
    return (u32)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
#else
    return pack(evens(a, b),
                odds(a, b));
#endif
}

// These load sixteen floats from either type, and store them back; sixteen or thirty-two at a time.
INLINE f32 widen(const float* from) { return load<f32>(from); }
INLINE f32 widen(const bf16* from) { return (f32)(convert<u32>(load<Half>(from)) << 16); }
INLINE void narrow(float* to, f32 x) { store(to, x); }
INLINE void narrow(bf16* to, f32 x) { store(to, convert<Half>(rounded(x) >> 16)); }
INLINE void narrow(float* to, f32 a, f32 b) { store(to, a), store(to + LANES, b); }
INLINE void narrow(bf16* to, f32 a, f32 b) {
#if defined(__AVX512F__)
    store(to, pack_neighbours(a, b));
#else  // of two registers each, whose shuffles take twice as many steps
    narrow(to, a), narrow(to + LANES, b);
#endif
}

// Transposes sixteen rows of sixteen words. Always inlined: a call would pass them in memory.
inline __attribute__((always_inline)) void transpose(u32* x) {
    u32 y[LANES];
    UNROLL for (int i = 0; i < LANES; i += 2) {
        y[i] = shuffle<0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29>(x[i], x[i + 1]);
        y[i + 1] =
            shuffle<2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31>(x[i], x[i + 1]);
    }
    UNROLL for (int i = 0; i < LANES; i++) {  // four rows of columns 4 j + i % 4 for the quarters j
        u32 a = y[i / 4 * 4 + i % 4 / 2], b = y[i / 4 * 4 + i % 4 / 2 + 2];
        x[i] = i % 2 ? shuffle<2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31>(a, b)
                     : shuffle<0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29>(a, b);
    }
    UNROLL for (int i = 0; i < LANES; i++) {  // eight rows, quarters 0 and 2 or 1 and 3
        u32 a = x[i / 8 * 8 + i % 4], b = x[i / 8 * 8 + i % 4 + 4];
        y[i] = i % 8 / 4 ? shuffle<4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31>(a, b)
                         : shuffle<0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27>(a, b);
    }
    UNROLL for (int i = 0; i < LANES; i++) {
        u32 a = y[i % 8], b = y[i % 8 + 8];
        x[i] = i / 8 ? shuffle<8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31>(a, b)
                     : shuffle<0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23>(a, b);
    }
}

// Transposes `count` rows: word w of row r goes to out[w * stride + r]; rows past `count` are zero.
inline void transpose(const char* const* rows, int count, int words, uint32_t* out, int64_t stride) {
    for (int r = 0; r < stride; r += LANES)
        for (int w = 0; w < words; w += LANES) {
            u32 x[LANES] = {};
            int n = std::min(LANES, words - w);
            for (int i = 0; i < std::min(LANES, count - r); i++) std::memcpy(&x[i], rows[r + i] + 4 * w, 4 * n);
            transpose(x);
            for (int i = 0; i < n; i++) store(out + (w + i) * stride + r, x[i]);
        }
}
