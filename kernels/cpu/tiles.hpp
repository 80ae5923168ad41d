// Four rows times a block: the inner loop of every matrix product here. A word is one fp32, or two bf16 that stand
// next to each other in the dimension that is summed over.
#pragma once
#include "simd.hpp"

constexpr int TILE_ROWS = 4;

struct F32Words {
    using Element = float;
    static constexpr int PER_WORD = 1;
    static f32 dot(f32 acc, u32 a, u32 b) { return acc + (f32)a * (f32)b; }
};
struct BF16Words {
    using Element = bf16;
    static constexpr int PER_WORD = 2;
    static f32 dot(f32 acc, u32 a, u32 b) { return dot_pairs(acc, a, b); }
};

// acc[r][i] += rows[r][0 ... steps) times b, whose step s holds V vectors at b + s * stride (in words).
template <class T, int V>
inline void multiply(const uint32_t* const* rows, const uint32_t* b, int64_t stride, int steps, f32 (&acc)[TILE_ROWS][V]) {
    f32 sum[TILE_ROWS][V];  // of its own, so that it stays in registers
    UNROLL for (int i = 0; i < TILE_ROWS * V; i++) sum[i / V][i % V] = acc[i / V][i % V];
    for (int s = 0; s < steps; s++) {
        u32 part[V];
        UNROLL for (int i = 0; i < V; i++) {
            u32 once = load<u32>(b + s * stride + i * LANES);
#if defined(__AVX512F__)
            asm("" : "+v"(once));  // in a register: the compiler would read it again for each row
#endif
            part[i] = once;
        }
        UNROLL for (int r = 0; r < TILE_ROWS; r++) {
            u32 a = splat(rows[r][s]);
            UNROLL for (int i = 0; i < V; i++) sum[r][i] = T::dot(sum[r][i], a, part[i]);
        }
    }
    UNROLL for (int i = 0; i < TILE_ROWS * V; i++) acc[i / V][i % V] = sum[i / V][i % V];
}

// Neighbouring lanes of a, then of b, as words of two bf16.
inline u32 pack_neighbours(f32 a, f32 b) {
#if defined(__AVX512BF16__)
    return (u32)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
#else
    return pack(__builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30),
                __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31));
#endif
}

// Words of `count` rows as they come -> word w of row r at out[w * stride + r]; rows past `count` are zero.
inline void transpose(const char* const* rows, int count, int words, uint32_t* out, int64_t stride) {
    for (int w = 0; w < words; w++)
        for (int r = 0; r < stride; r++) {
            uint32_t word = 0;
            if (r < count) std::memcpy(&word, rows[r] + 4 * w, 4);
            out[w * stride + r] = word;
        }
}
