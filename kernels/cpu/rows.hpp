// Multiplies key rows with the queries of a group, for decode attention and index scores.
#pragma once
#include "simd.hpp"

constexpr int TOKENS = 32;  // rows of a block

// Sums over the lanes of sixteen vectors, and returns the sums as one vector.
INLINE f32 sums_of(const f32* v) {
    f32 pairs[8], fours[4], eights[2];
    UNROLL for (int i = 0; i < 8; i++) {
        f32 a = v[2 * i], b = v[2 * i + 1];
        pairs[i] = shuffle<0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29>(a, b) +
                   shuffle<2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31>(a, b);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        f32 a = pairs[2 * i], b = pairs[2 * i + 1];
        fours[i] = shuffle<0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29>(a, b) +
                   shuffle<2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31>(a, b);
    }
    auto halves = [](f32 a, f32 b) {
        return shuffle<0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27>(a, b) +
               shuffle<4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31>(a, b);
    };
    eights[0] = halves(fours[0], fours[1]), eights[1] = halves(fours[2], fours[3]);
    return halves(eights[0], eights[1]);
}

#if !defined(__AVX512F__)
typedef f32::Register Part;
constexpr int SUMS = 8;  // parts that take half of the registers

// Sums over the lanes of each register.
INLINE void sums_of(const Part* v, float scale, float* sums) {
#if defined(__AVX2__)
    __m256 x[4];
    UNROLL for (int i = 0; i < 4; i++) x[i] = _mm256_hadd_ps((__m256)v[2 * i], (__m256)v[2 * i + 1]);
    x[0] = _mm256_hadd_ps(x[0], x[1]), x[1] = _mm256_hadd_ps(x[2], x[3]);
    const auto low = _mm256_permute2f128_ps(x[0], x[1], 0x20), high = _mm256_permute2f128_ps(x[0], x[1], 0x31);
    store(sums, (Part)(low + high) * scale);
#else
    for (int i = 0; i < SUMS; i++) {
        float sum = 0;
        UNROLL for (int j = 0; j < f32::EACH; j++) sum += v[i][j];
        sums[i] = sum * scale;
    }
#endif
}
#endif

// Calls f(h, n) for all heads: `most` (4, 2 or 1) at a time, the rest in smaller steps.
template <int most, class F> void in_steps(int heads, F f) {
    for (int h = 0; h < heads;) {
        if (most >= 4 && heads - h >= 4)
            f(h, std::integral_constant<int, most >= 4 ? 4 : 1>{}), h += 4;
        else if (most >= 2 && heads - h >= 2)
            f(h, std::integral_constant<int, most >= 2 ? 2 : 1>{}), h += 2;
        else
            f(h, std::integral_constant<int, 1>{}), h += 1;
    }
}
constexpr int power_of_two_below(int n) { return n >= 4 ? 4 : n >= 2 ? 2 : 1; }

// Heads that are multiplied at once with rows of L lines.
template <int L> constexpr int HEADS_AT_ONCE = WIDENS ? 4 : power_of_two_below(8 / L);

// A phase passes over a block several times, some heads at a time; each pass prefetches its share of the coming rows,
// into L1 (LEVEL 3) or L2 (2).
template <int LEVEL> struct PassInto {
    int index, count;
    const char* const* ahead;

    void fetch(int from, int to, int lines) const {
        for (int t = (index * TOKENS + from) / count; t < (index * TOKENS + to) / count; t++)
            for (int i = 0; i < lines; i++) __builtin_prefetch(ahead[t] + i * LINE, 0, LEVEL);
    }
};
using Pass = PassInto<3>;

// Loads the first `bytes` of a line, zero-padded; nothing beyond them is touched.
template <class V> inline V load_part(const void* from, int bytes) {
#if defined(__AVX512BW__)
    return (V)_mm512_maskz_loadu_epi8(~0ull >> (LINE - bytes), from);
#else
    if (bytes == LINE) return load<V>(from);
    V v = {};
    if (bytes == LINE / 2)
        std::memcpy(&v, from, LINE / 2);  // without a call
    else
        std::memcpy(&v, from, bytes);
    return v;
#endif
}

#if !defined(__AVX512F__)
// Loads the first `bytes` of a register, an even number, zero-padded; nothing beyond them is touched.
INLINE u32::Register load_words(const char* from, int bytes) {
    if (bytes >= REGISTER) return load<u32::Register>(from);
    u32::Register v = {};
#if defined(__AVX2__)
    const auto number = numbers().part[0];
    v = (u32::Register)_mm256_maskload_epi32((const int*)from, (__m256i)(number < bytes / 4));
    if (bytes % 4) {
        uint16_t last;
        std::memcpy(&last, from + bytes - 2, 2);
        v |= (u32::Register)(number == bytes / 4) & last;
    }
#else
    std::memcpy(&v, from, bytes);
#endif
    return v;
}
#endif

// Computes the logits of H heads and a block's rows of L lines; if rows end inside the last line (PART), it holds
// `rest` bytes. The queries are padded to whole lines.
#if defined(__AVX512F__)
// They stay in registers: H * L vectors.
template <class T, int L, int H, bool PART, class P>
void add_logits(const typename T::Query* q, const char* const* rows, int rest, P pass, float scale, float* logits,
                int64_t stride) {
    using V = typename T::Vector;
    constexpr int R = LANES / H;  // rows of a tile
    V query[H * L];
    UNROLL for (int i = 0; i < H * L; i++) query[i] = load<V>(q + i * T::WIDTH);
    for (int at = 0; at < TOKENS; at += R) {
        pass.fetch(at, at + R, L);
        f32 acc[LANES] = {};
        UNROLL for (int t = 0; t < R; t++) {
            const char* row = rows[at + t];
            UNROLL for (int c = 0; c < L; c++) {
                V part = PART && c == L - 1 ? load_part<V>(row + c * LINE, rest) : load<V>(row + c * LINE);
                UNROLL for (int h = 0; h < H; h++) acc[h * R + t] = T::dot(acc[h * R + t], query[h * L + c], part);
            }
        }
        alignas(LINE) float sums[LANES];
        store(sums, sums_of(acc) * scale);
        for (int h = 0; h < H; h++) std::memcpy(logits + h * stride + at, sums + h * R, R * sizeof(float));
    }
}
#else
// They are in fp32, and read from L1 for a pair of rows. Each product is summed in one register.
template <class T, int L, int H, bool PART, class P>
void add_logits(const float* q, const char* const* rows, int rest, P pass, float scale, float* logits, int64_t stride) {
    constexpr int N = T::PER_WORD, R = SUMS / H;
    constexpr int ROWS = H == 1 ? 1 : R, PAIR = H == 1 ? 1 : 2;  // one head reads faster row by row
    for (int at = 0; at < TOKENS; at += R) {
        pass.fetch(at, at + R, L);
        Part acc[SUMS] = {};
        UNROLL for (int first = 0; first < R; first += ROWS)
            UNROLL for (int i = 0; i < L * f32::PARTS; i++) {
                const int c = i / f32::PARTS, at_word = i % f32::PARTS * f32::EACH, left = rest - at_word * 4;
                if (PART && c == L - 1 && left <= 0) break;
                UNROLL for (int r = first; r < first + ROWS; r += PAIR) {
                    Part k[PAIR][N];
                    UNROLL for (int t = 0; t < PAIR; t++) {
                        const char* from = rows[at + r + t] + i * REGISTER;
                        T::widen_part(PART && c == L - 1 ? load_words(from, left) : load<u32::Register>(from), k[t]);
                    }
                    UNROLL for (int n = 0; n < N; n++)
                        UNROLL for (int h = 0; h < H; h++) {
                            const Part x = load<Part>(q + (h * L + c) * T::WIDTH + n * LANES + at_word);
                            UNROLL for (int t = 0; t < PAIR; t++) acc[h * R + r + t] += x * k[t][n];
                        }
                }
            }
        alignas(LINE) float sums[SUMS];
        sums_of(acc, scale, sums);
        for (int h = 0; h < H; h++) std::memcpy(logits + h * stride + at, sums + h * R, R * sizeof(float));
    }
}
#endif

// Computes the logits of all heads [heads][TOKENS], `stride` apart.
template <class T, int L, bool PART = false>
void block_logits(const typename T::Query* q, const char* const* rows, const char* const* ahead, int heads,
                  float scale, float* logits, int64_t stride, int rest = LINE) {
    constexpr int AT_ONCE = HEADS_AT_ONCE<L>;
    Pass pass{0, 0, ahead};
    in_steps<AT_ONCE>(heads, [&](int, auto) { pass.count++; });
    in_steps<AT_ONCE>(heads, [&](int h, auto n) {
        add_logits<T, L, n, PART>(q + h * L * T::WIDTH, rows, rest, pass, scale, logits + h * stride, stride);
        pass.index++;
    });
}
