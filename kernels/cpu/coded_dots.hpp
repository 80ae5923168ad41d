// Attends from one token to keys and values that are codes, without tiles. Codes become whole numbers of 16 bits in
// registers, and queries and weights are rounded to such, each to the largest of its head: that errs less than bf16, whose
// products take up to four times as long. The halves of a word hold codes of several channels, of which a shift and a mask (or
// a look-up) take out one each. For keys the lanes of a vector are tokens, for values channels.
#pragma once
#include "coded_scaled.hpp"
#if defined(__AVX2__) && !defined(__AVX512F__)
#define HAS_DOTS
#include "coded_avx2.hpp"
#elif defined(__AVX512BW__)
#define HAS_DOTS
namespace {

// Computes acc + a.even * b.even + a.odd * b.odd for halves that are whole numbers.
INLINE i32 dot_halves(i32 acc, u32 a, u32 b) {
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
inline u32 halves_in_order(f32 a, f32 b) { return halves_of(a, b, IN_ORDER); }
inline u32 halves_by_fours(f32 a, f32 b) { return halves_of(a, b, FOURS); }

// Writes words of a and of b in turn.
inline void mix(u32 a, u32 b, uint32_t* to) {
    store(to, shuffle<0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23>(a, b));
    store(to + LANES, shuffle<8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31>(a, b));
}

template <class Format> constexpr bool HAS_HALVES = false;
template <int BITS> constexpr bool HAS_HALVES<Integers<BITS>> = true;
template <> constexpr bool HAS_HALVES<Levels<2>> = true;
template <> constexpr bool HAS_HALVES<Levels<4>> = true;
template <> constexpr bool HAS_HALVES<Floats4> = true;

// Makes whole numbers of the codes of a format; what a code stands for is `unit` times its number.
template <class Format> struct Halves {
    static constexpr int BITS = Format::bytes(8), PLACES = 8 / BITS;  // of a byte
    static constexpr int STEPS = 2 * PLACES;  // of a half: the places of its lower byte, then those of the higher
    // Channels of a row that share a scale (0: all), and ranges of the 32 channels of a vector, which its lanes take in turn.
    static constexpr int GROUP = std::is_same_v<Format, Floats4> ? 16 : 0, MIXED = GROUP ? 2 * LANES / GROUP : 1;
    alignas(LINE) int16_t table[2 * LANES] = {};  // of levels, by the lower five bits of a code
    float unit = 1;

    explicit Halves(const float* levels) {
        if (Format::RANGED) return;
        for (int i = 0; i < 1 << BITS; i++) unit = std::max(i ? unit : 0, std::abs(levels[i]) / LARGEST_LEVEL);
        for (int i = 0; i < 2 * LANES; i++) table[i] = std::lrint(levels[i % (1 << BITS)] / unit);
    }
    INLINE u32 numbers(u32 codes) const {
        if (Format::RANGED) return codes & ((1u << BITS) - 1) * 0x10001;
        return (u32)_mm512_permutexvar_epi16((__m512i)codes, load<__m512i>(table));
    }

    // Prefetches a line: of codes of 8 bits into L2, which has more lines on their way at once than L1.
    static void fetch(const char* line) { __builtin_prefetch(line, 0, BITS == 8 ? 2 : 3); }
    // Repeats a word up to a vector, or the words of MIXED ranges in turn.
    static INLINE u32 repeat(const void* of) {
        if (MIXED == 1) return splat(load<uint32_t>(of));
        return (u32)_mm512_set1_epi64(load<int64_t>(of));
    }
    // Loads 32 bytes of two rows: each word has a half of both, of MIXED ranges in turn.
    static INLINE u32 halves_of_both(const char* a, const char* b) {
        static constexpr Order pairs =
            order_of([](int i) { return (MIXED == 1 ? i / 2 : i / 4 + i / 2 % 2 * 8) + i % 2 * LANES; });
        const __m512i one = _mm512_castsi256_si512(load<__m256i>(a));
        const __m512i both = _mm512_inserti64x4(one, load<__m256i>(b), 1);
        return (u32)_mm512_permutexvar_epi16(load<__m512i>(pairs.of), both);
    }
    // Returns the place of channel c among sums, which stand in the order of the lanes of words.
    static int64_t place_of(int64_t c) {
        return MIXED == 1 ? channel(BF16{}, c) : c / 32 * 32 + c % 2 * LANES + c % 16 / 2 * MIXED + c % 32 / 16;
    }

    // Multiplies keys with the queries of H heads: to[H][TOKENS]. words[bytes / 4][TOKENS]: the words of each key;
    // scales [groups][TOKENS].
    template <int H>
    void multiply(const uint32_t (*words)[TOKENS], int bytes, const uint32_t (*query)[MOST_DIM / 2],
                  const float (*scales)[TOKENS], float (*to)[TOKENS]) const {
        const int count = bytes / 4, each = GROUP ? GROUP / 4 : count;  // words, and words of a group
        f32 sums[H][2] = {};
        UNROLL for (int place = 0; place < PLACES; place++)
            for (int first = 0; first < count; first += each) {
                i32 low[H] = {}, high[H] = {};
                for (int w = first; w < first + each; w++) {
                    UNROLL for (int half = 0; half < 2; half++) {
                        const uint32_t shift = place * BITS + 8 * half;
                        const u32 x = numbers(load<u32>(words[w]) >> shift), y = numbers(load<u32>(words[w] + LANES) >> shift);
                        UNROLL for (int h = 0; h < H; h++) {
                            const u32 q = splat(query[h][place * bytes / 2 + 2 * w + half]);
                            low[h] = dot_halves(low[h], x, q), high[h] = dot_halves(high[h], y, q);
                        }
                    }
                }
                const float* scale = scales[GROUP ? (place * count + first) / each : 0];
                UNROLL for (int h = 0; h < H; h++) {
                    const f32 a = convert<f32>(low[h]), b = convert<f32>(high[h]);
                    sums[h][0] += Format::RANGED ? a : a * load<f32>(scale);
                    sums[h][1] += Format::RANGED ? b : b * load<f32>(scale + LANES);
                }
            }
        for (int h = 0; h < H; h++) store(to[h], sums[h][0]), store(to[h] + LANES, sums[h][1]);
    }

    // Adds `count` values times the weights of H heads, two tokens at a time: a word has a channel of both. range_of(channel)
    // is the first range of 32 channels. A head has weights [ranges / MIXED][TOKENS / 2][MIXED], in units [ranges]; its sums
    // stand in the order of `place_of`.
    template <int H>
    void add(const char* row, int64_t stride, int count, int bytes, RangeOf range_of,
             const uint32_t (*weights)[MOST_RANGES * TOKENS / 2], const float (*units)[MOST_RANGES], float* to,
             int64_t to_stride) const {
        constexpr int AT_ONCE = std::min(STEPS, HELD / 2 / H);
        for (int c = 0; c < bytes; c += 2 * LANES)
            for (int step = 0; step < STEPS; step += AT_ONCE) {
                int weight[AT_ONCE];  // where those of a step begin
                i32 sums[AT_ONCE][H] = {};
                UNROLL for (int i = 0; i < AT_ONCE; i++) weight[i] = range_of((step + i) % PLACES * bytes + c) * TOKENS / 2;
                for (int t = 0; t < count; t += 2) {
                    const char *a = row + t * stride + c, *b = t + 1 < count ? a + stride : a;
                    if (step == 0 && c % LINE == 0) {
                        fetch(a + TOKENS * stride);
                        fetch(b + TOKENS * stride);
                    }
                    const u32 codes = halves_of_both(a, b) >> uint32_t(step * BITS);
                    UNROLL for (int i = 0; i < AT_ONCE; i++) {
                        const u32 x = numbers(codes >> uint32_t(i * BITS));
                        UNROLL for (int h = 0; h < H; h++)
                            sums[i][h] = dot_halves(sums[i][h], x, repeat(&weights[h][weight[i] + t / 2 * MIXED]));
                    }
                }
                UNROLL for (int i = 0; i < AT_ONCE; i++) {
                    const int place = (step + i) % PLACES * bytes + c;
                    UNROLL for (int h = 0; h < H; h++) {
                        float* sum = to + h * to_stride + place + (step + i) / PLACES * LANES;
                        const f32 units_of_both = (f32)repeat(&units[h][range_of(place)]) * unit;
                        store(sum, load<f32>(sum) + convert<f32>(sums[i][h]) * units_of_both);
                    }
                }
            }
    }
};

}  // namespace
#endif

#if defined(HAS_DOTS)
namespace {

// Queries as whole numbers, for the steps of a block of keys.
struct WholeQueries {
    // BY_FOURS: of each four channels the first and the third, then the others; else in order
    alignas(LINE) uint32_t of[MOST_HEADS][MOST_DIM / 2];
    float units[MOST_HEADS];

    // Lays out queries [heads][width] times the step of each channel.
    template <bool BY_FOURS> void lay_out(const float* q, int heads, int width, const float* step) {
        for (int h = 0; h < heads; h++, q += width) {
            auto scaled = [&](int c) { return load<f32>(q + c) * load<f32>(step + c); };
            f32 most = {};
            for (int c = 0; c < width; c += LANES) most = maximum(most, (f32)((u32)scaled(c) & 0x7fffffffu));
            const float top = largest(most), times = top > 0 ? LARGEST / top : 0;
            units[h] = top < INFINITY ? top / LARGEST : NAN;
            for (int c = 0; c < width; c += 2 * LANES)
                if constexpr (BY_FOURS)
                    store(of[h] + c / 2, halves_by_fours(scaled(c) * times, scaled(c + LANES) * times));
                else
                    store(of[h] + c / 2, halves_in_order(scaled(c) * times, scaled(c + LANES) * times));
        }
    }
};

// Prefetches the rows of the next block, in shares: a burst would keep loads waiting.
template <class Numbers> struct Ahead {
    const char* at;
    const int64_t share;

    Ahead(const HeadRows& rows, int64_t first, int shares) : at(rows[first + TOKENS]), share(rows.row * TOKENS / shares) {}
    INLINE void fetch() {
        const char* from = at;
        for (at += share; from < at; from += LINE) Numbers::fetch(from);
    }
};

template <class KeyFormat, class Format> struct DotAttention : ScaledAttention {
    static constexpr int MOST_KEPT = 16;
    static constexpr bool BY_FOURS = !WIDENS || std::is_same_v<KeyFormat, Floats4>;
    static constexpr float BOTH_SIGNS[2] = {-1, 1};
    const Halves<KeyFormat> keys;
    const Halves<Format> values;
    const Halves<Levels<1>> signs{BOTH_SIGNS};
    const int key_bytes = KeyFormat::bytes(dim), bytes = Format::bytes(dim);
    const int row_bytes = key_bytes + (WIDENS && in.q_signs ? dim / 8 : 0);  // of a key and its signs
    WholeQueries query, sign_query;
    alignas(LINE) uint32_t key_words[MOST_DIM / 4][TOKENS];
    alignas(LINE) uint32_t weights[MOST_HEADS][MOST_RANGES * TOKENS / 2] = {};
    alignas(LINE) float kept[MOST_KEPT][TOKENS] = {};  // channels of keys that are kept in full
    float weight_units[MOST_HEADS][MOST_RANGES] = {};

    DotAttention(const CodedAttention& in, int64_t sequence, int64_t group, int64_t head, int heads)
        : ScaledAttention(in, sequence, group, head, heads, false), keys(in.codes.key_levels), values(in.codes.levels) {
        const Buffer<float> ones(width, 1);
        lay_out(ones.data());
        if (!WIDENS || !in.q_signs) return;
        const int64_t from = ((sequence * in.groups + group) * in.heads + head) * width;
        sign_query.template lay_out<!WIDENS>(widened((const bf16*)in.q_signs + from).data(), heads, width, ones.data());
    }

    // Returns whether each 32 bytes of values are codes of MIXED whole ranges, third bits are those of 16 bytes, and no more
    // channels are kept in full than there is room for.
    static bool takes(const CodedAttention& in) {
        const Codes& codes = in.codes;
        if (!WIDENS && (in.q_signs || codes.channels)) return false;  // AVX-512 decodes these
        constexpr bool THREE = std::is_same_v<KeyFormat, Levels<3>> || std::is_same_v<Format, Levels<3>>;
        return (THREE ? codes.dim == 128 : Format::bytes(codes.dim) % 32 == 0) && (!in.q_signs || codes.dim % 32 == 0) &&
               (codes.kind != INTEGERS || codes.dim / codes.ranges % 32 == 0) && codes.channels <= MOST_KEPT;
    }

    void lay_out(const float* step) override { query.template lay_out<BY_FOURS>(q.data(), heads, width, step); }

    void multiply_keys(int64_t first, int count) override {
        turn_keys(first, count);
        if (!ranged) {
            multiply(first, keys, key_words, key_bytes, query, scales, [&](int h, f32 x, int t) { store(logits[h] + t, x); });
            if (WIDENS && in.q_signs)
                multiply(first, signs, key_words + key_bytes / 4, dim / 8, sign_query, scales + 2, [&](int h, f32 x, int t) {
                    store(logits[h] + t, load<f32>(logits[h] + t) + x * (float)in.codes.residual);
                });
            return;
        }
        const i32 lanes = numbers();
        each_block(first, count, [&](int from, int next, int64_t of_rows) {  // the rows before are those of other blocks
            set_block(of_rows);
            read_kept(first, from, next);
            const uint8_t* which = (const uint8_t*)at.which[of_rows];
            multiply(first, keys, key_words, key_bytes, query, scales, [&](int h, f32 x, int t) {
                x += centers[h];
                for (int j = 0; WIDENS && j < in.codes.channels; j++) x += load<f32>(kept[j] + t) * q[h * width + which[j]];
                store(logits[h] + t, select(lanes + t >= from, x, load<f32>(logits[h] + t)));
            });
        });
    }
    // Calls take(head, products of sixteen keys, the first of these). first: the row of the first key.
    template <class Numbers, class Take>
    void multiply([[maybe_unused]] int64_t first, const Numbers& keys, const uint32_t (*words)[TOKENS], int bytes,
                  const WholeQueries& query, const float (*scales)[TOKENS], Take take) {
        by_four(heads, [&](int h, auto n) {
            alignas(LINE) float products[n][TOKENS];
            keys.template multiply<n>(words, bytes, query.of + h, scales, products
#if !defined(__AVX512F__)
                                      , Ahead<Numbers>(at.k, first, TOKENS / EACH * Numbers::PLACES)
#endif
            );
            for (int i = 0; i < std::min<int>(n, heads - h); i++)
                for (int t = 0; t < TOKENS; t += LANES)
                    take(h + i, load<f32>(products[i] + t) * (keys.unit * query.units[h + i]), t);
        });
    }
    // Writes the words of keys so that the lanes of a vector are tokens. Behind the last row it repeats.
    void turn_keys(int64_t first, int count) {
#if !defined(__AVX512F__)
        if (row_bytes % 16 == 0) {
            turn_rows(at.k, first, count, row_bytes, key_words);
            return;
        }
#endif
        for (int t = 0; t < TOKENS; t += LANES)
            for (int b = 0; b < row_bytes; b += LINE) {
                u32 x[LANES];
                for (int i = 0; i < LANES; i++) {
                    const char* row = at.k[first + std::min(t + i, count - 1)] + b;
                    if (!WIDENS) keys.fetch(row + TOKENS * at.k.row);
                    x[i] = load_part<u32>(row, std::min(LINE, row_bytes - b));
                }
                transpose(x);
                UNROLL for (int i = 0; i < LANES; i++) store(key_words[b / 4 + i] + t, x[i]);
            }
    }
    // Reads the channels that are kept in full of rows from `from` to next - 1 behind `first`.
    void read_kept(int64_t first, int from, int next) {
        for (int t = from; WIDENS && in.codes.channels && t < next; t++)
            for (int j = 0; j < in.codes.channels; j++) kept[j][t] = to_float(((const bf16*)at.kept[first + t])[j]);
    }

#if !defined(__AVX512F__)
    // Adds values of NVFP4: finds the units of four ranges' weights at once, and all units before weights, which wait for them.
    void add_turned(int64_t first, int count) {
        alignas(LINE) uint32_t turned[MOST_DIM / 32 * TOKENS / 2 * EACH];
        values.turn(at.v[first], at.v.row, count, bytes, turned);
        by_four(heads, [&](int from, auto n) {
            const int end = std::min<int>(from + n, heads);
            alignas(LINE) float scaled[n][MOST_RANGES][TOKENS], times[n][MOST_RANGES];
            for (int h = from; h < end; h++)
                for (int r = 0; r < ranges; r += 4) {
                    f32::Register most[4];
                    UNROLL for (int i = 0; i < 4; i++) {
                        const float* step = scales[ranges + r + i];
                        const f32 x = load<f32>(logits[h]) * load<f32>(step);
                        const f32 y = load<f32>(logits[h] + LANES) * load<f32>(step + LANES), more = maximum(x, y);
                        store(scaled[h - from][r + i], x), store(scaled[h - from][r + i] + LANES, y);
                        most[i] = (f32::Register)_mm256_max_ps((__m256)more.part[0], (__m256)more.part[1]);
                    }
                    const __m128 all = largest_of_four(most);
                    store(weight_units[h] + r, all * (values.unit / LARGEST));
                    store(times[h - from] + r, _mm_and_ps(LARGEST / all, _mm_cmpgt_ps(all, _mm_setzero_ps())));
                }
            for (int h = from; h < end; h++)
                for (int r = 0; r < ranges; r++) {
                    const float *x = scaled[h - from][r], each = times[h - from][r];
                    store(weights[h] + r * LANES, u32{{packed(load<f32>(x) * each), packed(load<f32>(x + LANES) * each)}});
                }
            values.template add_turned<n>(turned, ranges, weights + from, weight_units + from, states[from].acc, acc_width,
                                          Ahead<Halves<Format>>(at.v, first, dim / LANES),
                                          Ahead<Halves<Format>>(at.v_range, first, dim / LANES));
        });
    }
#endif

    void add_values(int64_t first, int count) override {
#if !defined(__AVX512F__)
        if constexpr (std::is_same_v<Format, Floats4>) return add_turned(first, count);
#endif
        for (int r = 0; r < ranges; r++)
            weigh_range(r, [&](int h, f32 a, f32 b) {
                weight_units[h][r] = largest(maximum(a, b)) / LARGEST;
                const float times = weight_units[h][r] > 0 ? 1 / weight_units[h][r] : 0;
                store(weights[h] + r * LANES, halves_in_order(a * times, b * times));
            });
#if defined(__AVX512F__)
        constexpr int MIXED = Halves<Format>::MIXED;
        for (int r = 0; MIXED > 1 && r < ranges; r += MIXED)
            for (int h = 0; h < heads; h++) {
                uint32_t* of_both = weights[h] + r * LANES;
                const u32 a = load<u32>(of_both), b = load<u32>(of_both + LANES);
                mix(a, b, of_both);
            }
#endif
        by_four(heads, [&](int h, auto n) {
            values.template add<n>(at.v[first], at.v.row, count, bytes, RangeOf{ranges, dim}, weights + h, weight_units + h,
                                   states[h].acc, acc_width
#if !defined(__AVX512F__)
                                   , Ahead<Halves<Format>>(at.v, first, dim / LANES),
                                   Ahead<Halves<Format>>(at.v_range, first, dim / LANES)
#endif
            );
        });
    }

    void put_sums(int head, float* to) const override {
        put_each(to, [&](int c) { return states[head].acc[values.place_of(c)]; });
    }
};

}  // namespace
#endif
