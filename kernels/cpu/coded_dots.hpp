// Attends from one token to keys and values that are codes, without tiles. Codes become whole numbers of 16 bits in
// registers, and queries and weights are rounded to such, each to the largest of its head: that errs less than bf16, whose
// products take up to four times as long. The halves of a word hold codes of several channels, of which a shift and a mask (or
// a look-up) take out one each. For keys the lanes of a vector are tokens, for values channels.
#pragma once
#include "coded_scaled.hpp"

#if defined(__AVX512BW__)
namespace {

// The largest whole number of a query or weight, and of a level: sums of MOST_DIM products fit 32 bits.
constexpr int LARGEST = (1 << 14) - 1, LARGEST_LEVEL = (1 << 9) - 1;

// Computes acc + a.even * b.even + a.odd * b.odd for halves that are whole numbers.
inline i32 dot_halves(i32 acc, u32 a, u32 b) {
#if defined(__AVX512VNNI__)
    return (i32)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)a, (__m512i)b);
#else
    return acc + (i32)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#endif
}

// Gives for each half of a vector its place among the halves of two.
struct Order {
    alignas(LINE) uint16_t of[2 * LANES];
};
constexpr Order order_of(int (*half)(int)) {
    Order order{};
    for (int i = 0; i < 2 * LANES; i++) order.of[i] = half(i);
    return order;
}

constexpr Order IN_ORDER = order_of([](int i) { return 2 * i; });
constexpr Order FOURS = order_of([](int i) { return 2 * (i / 4 * 4 + i % 4 / 2 + i % 2 * 2); });  // of four, 0, 2, 1, 3
// Rounds two vectors to whole numbers of 16 bits, in an order of their 32 numbers.
inline u32 halves_of(f32 a, f32 b, const Order& order) {
    const __m512i low = _mm512_cvtps_epi32((__m512)a), high = _mm512_cvtps_epi32((__m512)b);
    return (u32)_mm512_permutex2var_epi16(low, load<__m512i>(order.of), high);
}

template <class Format> constexpr bool HAS_HALVES = false;
template <int BITS> constexpr bool HAS_HALVES<Integers<BITS>> = true;
template <> constexpr bool HAS_HALVES<Levels<2>> = true;
template <> constexpr bool HAS_HALVES<Levels<4>> = true;

// Makes whole numbers of the codes of a format; what a code stands for is `unit` times its number.
template <class Format> struct Halves {
    static constexpr int BITS = Format::bytes(8), PLACES = 8 / BITS;  // of a byte
    static constexpr int STEPS = 2 * PLACES;  // of a half: the places of its lower byte, then those of the higher
    alignas(LINE) int16_t table[2 * LANES] = {};  // of levels, by the lower five bits of a code
    float unit = 1;

    explicit Halves(const float* levels) {
        if (Format::RANGED) return;
        for (int i = 0; i < 1 << BITS; i++) unit = std::max(i ? unit : 0, std::abs(levels[i]) / LARGEST_LEVEL);
        for (int i = 0; i < 2 * LANES; i++) table[i] = std::lrint(levels[i % (1 << BITS)] / unit);
    }
    u32 numbers(u32 codes) const {
        if (Format::RANGED) return codes & ((1u << BITS) - 1) * 0x10001;
        return (u32)_mm512_permutexvar_epi16((__m512i)codes, load<__m512i>(table));
    }

    // Multiplies keys with the queries of H heads: to[H][TOKENS]. words[bytes / 4][TOKENS]: the words of each key.
    template <int H>
    void multiply(const uint32_t (*words)[TOKENS], int bytes, const uint32_t (*query)[MOST_DIM / 2],
                  int32_t (*to)[TOKENS]) const {
        i32 low[H] = {}, high[H] = {};
        for (int w = 0; w < bytes / 4; w++) {
            const u32 a = load<u32>(words[w]), b = load<u32>(words[w] + LANES);
            UNROLL for (int i = 0; i < STEPS; i++) {
                const u32 x = numbers(a >> uint32_t(i * BITS)), y = numbers(b >> uint32_t(i * BITS));
                const int at = i % PLACES * bytes / 2 + 2 * w + i / PLACES;
                UNROLL for (int h = 0; h < H; h++) {
                    const u32 q = splat(query[h][at]);
                    low[h] = dot_halves(low[h], x, q), high[h] = dot_halves(high[h], y, q);
                }
            }
        }
        for (int h = 0; h < H; h++) store(to[h], low[h]), store(to[h] + LANES, high[h]);
    }

    // Adds `count` values times the weights of H heads, two tokens at a time: a word has a channel of both. range_of(channel)
    // is the range of 32 channels, weights [ranges][MOST_HEADS][TOKENS / 2] in units [ranges][MOST_HEADS]; sums stand in the
    // order of `channel`.
    template <int H, class RangeOf>
    void add(const char* row, int64_t stride, int count, int bytes, RangeOf range_of,
             const uint32_t (*weights)[MOST_HEADS][TOKENS / 2], const float (*units)[MOST_HEADS], int head, float* to,
             int64_t to_stride) const {
        constexpr int AT_ONCE = std::min(STEPS, 16 / H);
        static constexpr Order pairs = order_of([](int i) { return i / 2 + i % 2 * LANES; });
        for (int c = 0; c < bytes; c += 2 * LANES)
            for (int step = 0; step < STEPS; step += AT_ONCE) {
                const uint32_t(*weight[AT_ONCE])[TOKENS / 2];
                i32 sums[AT_ONCE][H] = {};
                UNROLL for (int i = 0; i < AT_ONCE; i++) weight[i] = weights[range_of((step + i) % PLACES * bytes + c)] + head;
                for (int t = 0; t < count; t += 2) {
                    const char *a = row + t * stride + c, *b = t + 1 < count ? a + stride : a;
                    if (step == 0 && c % LINE == 0) {
                        __builtin_prefetch(a + TOKENS * stride);
                        __builtin_prefetch(b + TOKENS * stride);
                    }
                    const __m512i one = _mm512_castsi256_si512(load<__m256i>(a));
                    const __m512i both = _mm512_inserti64x4(one, load<__m256i>(b), 1);
                    u32 codes = (u32)_mm512_permutexvar_epi16(load<__m512i>(pairs.of), both) >> uint32_t(step * BITS);
                    UNROLL for (int i = 0; i < AT_ONCE; i++) {
                        const u32 x = numbers(codes >> uint32_t(i * BITS));
                        UNROLL for (int h = 0; h < H; h++)
                            sums[i][h] = dot_halves(sums[i][h], x, splat(weight[i][h][t / 2]));
                    }
                }
                UNROLL for (int i = 0; i < AT_ONCE; i++) {
                    const int place = (step + i) % PLACES * bytes + c;
                    UNROLL for (int h = 0; h < H; h++) {
                        float* sum = to + h * to_stride + place + (step + i) / PLACES * LANES;
                        const float unit_of_both = unit * units[range_of(place)][head + h];
                        store(sum, load<f32>(sum) + __builtin_convertvector(sums[i][h], f32) * unit_of_both);
                    }
                }
            }
    }
};

// Calls f(h, n) for all heads, four at a time: n is 1, 2 or 4, and may reach beyond the last head.
template <class F> void by_four(int heads, F f) {
    for (int h = 0; h < heads; h += 4)
        if (heads - h == 1)
            f(h, std::integral_constant<int, 1>{});
        else if (heads - h == 2)
            f(h, std::integral_constant<int, 2>{});
        else
            f(h, std::integral_constant<int, 4>{});
}

template <class KeyFormat, class Format> struct DotAttention : ScaledAttention {
    const Halves<KeyFormat> keys;
    const Halves<Format> values;
    const int key_bytes = KeyFormat::bytes(dim), bytes = Format::bytes(dim);
    alignas(LINE) uint32_t query[MOST_HEADS][MOST_DIM / 2];  // of each four channels the first and the third, then the others
    alignas(LINE) uint32_t key_words[MOST_DIM / 4][TOKENS];
    alignas(LINE) uint32_t weights[MOST_RANGES][MOST_HEADS][TOKENS / 2] = {};
    float query_units[MOST_HEADS], weight_units[MOST_RANGES][MOST_HEADS] = {};

    DotAttention(const CodedAttention& in, int64_t sequence, int64_t group, int64_t head, int heads)
        : ScaledAttention(in, sequence, group, head, heads, false), keys(in.codes.key_levels), values(in.codes.levels) {
        lay_out(Buffer<float>(width, 1).data());
    }

    // Returns whether each 32 bytes of values are codes of the same range.
    static bool takes(const Codes& in) {
        return Format::bytes(in.dim) % 32 == 0 && (in.kind != INTEGERS || in.dim / in.ranges % 32 == 0);
    }

    void lay_out(const float* step) override {
        alignas(LINE) float x[MOST_DIM];
        for (int h = 0; h < heads; h++) {
            f32 most = {};
            for (int c = 0; c < width; c += LANES) {
                const f32 scaled = load<f32>(&q[h * width + c]) * load<f32>(step + c);
                most = maximum(most, maximum(scaled, -scaled));
                store(x + c, scaled);
            }
            query_units[h] = largest(most) / LARGEST;
            const float times = query_units[h] > 0 ? 1 / query_units[h] : 0;
            for (int c = 0; c < width; c += 2 * LANES)
                store(query[h] + c / 2, halves_of(load<f32>(x + c) * times, load<f32>(x + c + LANES) * times, FOURS));
        }
    }

    void multiply_keys(int64_t first, int count) override {
        turn_keys(first, count);
        if (!ranged) {
            multiply([&](int h, f32 x, int t) { store(logits[h] + t, x * load<f32>(scales[0] + t)); });
            return;
        }
        const i32 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        each_block(first, count, [&](int from, int) {  // the rows before are those of other blocks
            multiply([&](int h, f32 x, int t) {
                store(logits[h] + t, lanes + t >= from ? x + centers[h] : load<f32>(logits[h] + t));
            });
        });
    }
    // Calls take(head, products of sixteen keys, the first of these).
    template <class Take> void multiply(Take take) {
        by_four(heads, [&](int h, auto n) {
            alignas(LINE) int32_t products[n][TOKENS];
            keys.template multiply<n>(key_words, key_bytes, query + h, products);
            for (int i = 0; i < std::min<int>(n, heads - h); i++)
                for (int t = 0; t < TOKENS; t += LANES) {
                    const f32 sums = __builtin_convertvector(load<i32>(products[i] + t), f32);
                    take(h + i, sums * (keys.unit * query_units[h + i]), t);
                }
        });
    }
    // Writes the words of keys so that the lanes of a vector are tokens. Behind the last row it repeats.
    void turn_keys(int64_t first, int count) {
        for (int t = 0; t < TOKENS; t += LANES)
            for (int b = 0; b < key_bytes; b += LINE) {
                u32 x[LANES];
                for (int i = 0; i < LANES; i++) {
                    const char* row = at.k[first + std::min(t + i, count - 1)] + b;
                    __builtin_prefetch(row + TOKENS * at.k.row);
                    x[i] = load_part<u32>(row, std::min(LINE, key_bytes - b));
                }
                transpose(x);
                UNROLL for (int i = 0; i < LANES; i++) store(key_words[b / 4 + i] + t, x[i]);
            }
    }

    void add_values(int64_t first, int count) override {
        for (int r = 0; r < ranges; r++)
            weigh_range(r, [&](int h, f32 a, f32 b) {
                weight_units[r][h] = largest(maximum(a, b)) / LARGEST;
                const float times = weight_units[r][h] > 0 ? 1 / weight_units[r][h] : 0;
                store(weights[r][h], halves_of(a * times, b * times, IN_ORDER));
            });
        by_four(heads, [&](int h, auto n) {
            auto range_of = [&](int c) { return c * ranges / dim; };
            values.template add<n>(at.v[first], at.v.row, count, bytes, range_of, weights, weight_units, h, states[h].acc,
                                   acc_width);
        });
    }

    float sum_of(int head, int c) const override { return states[head].acc[channel(BF16{}, c)]; }
};

}  // namespace
#endif
