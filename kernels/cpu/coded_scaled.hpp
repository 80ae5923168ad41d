// Attends from one token to keys and values that are codes, whose numbers stay as they are: the scales of codes are applied
// to queries, logits and weights, of which there are fewer. Subclasses say how numbers are made and multiplied: on AMX tiles
// (coded_tiles.hpp), or as whole numbers (coded_dots.hpp).
#pragma once
#include "attention.hpp"
#include "codes.hpp"

namespace {

constexpr int MOST_HEADS = 16;  // that are taken at once: those of a tile
// The largest whole number of a query or weight, and of a level: sums of MOST_DIM products fit 32 bits. That of a level is
// a multiple of 12, so that the levels of NVFP4, multiples of a half up to 6, are exact.
constexpr int LARGEST = (1 << 14) - 1, LARGEST_LEVEL = 42 * 12;

// Says where the rows of one head stand. Where rows have scales of their own, these stand in `v_range`.
struct Places {
    const Codes& codes;
    const HeadRows k, v, k_range, v_range, kept, which;

    Places(const Codes& in, int64_t sequence, int64_t group)
        : codes(in),
          k(in.k, in.k_batch, in.k_group, in.k_token, in.k_table, sequence, group),
          v(in.v, in.v_batch, in.v_group, in.v_token, in.v_table, sequence, group),
          k_range(in.k_range, in.k_range_batch, in.k_range_group, in.k_range_block, in.k_range_table, sequence, group),
          v_range(in.v_range, in.v_range_batch, in.v_range_group, in.v_range_token, in.v_range_table, sequence, group),
          kept(in.kept, in.kept_batch, in.kept_group, in.kept_token, in.kept_table, sequence, group),
          which(in.which, in.which_batch, in.which_group, in.which_block, in.which_table, sequence, group) {}
};

// Names the range of a value's channel.
struct RangeOf {
    int ranges, dim;
    int operator()(int channel) const { return channel * ranges / dim; }
};

// Prefetches a row. What lies behind the last one is not read.
inline void fetch(const char* row, int bytes) {
    asm("");  // gcc drops calls of what only prefetches
    for (int i = 0; i < bytes; i += LINE) __builtin_prefetch(row + i);
}

// Holds what the codes of a format stand for, less the middle of a range, without scales and rounded to bf16.
template <class Format> struct Numbers {
    static constexpr int BITS = Format::bytes(8);
    static constexpr float MIDDLE = Format::RANGED ? ((1 << BITS) - 1) * 0.5f : 0;
    typename Format::Table table;
    alignas(LINE) bf16 places[2 * LANES] = {};  // by the lower five bits of a code, if it has fewer

    explicit Numbers(const float* levels) : table(levels) {
        if constexpr (BITS <= 4)
            for (int i = 0; i < 2 * LANES; i++) {
                alignas(LINE) const uint8_t code[LANES] = {uint8_t(i % (1 << BITS))};
                put(places + i, exact(code)[0]);
            }
    }
    f32 exact(const uint8_t* codes) const { return table(codes) - MIDDLE; }

    // Writes a row of `dim` numbers.
    void write(const char* row, int dim, uint32_t* to) const {
#if defined(__AVX512BW__)
        if constexpr (BITS <= 4)
            if (look_up<32>(dim, [&](int from, int bytes) { return words_of_row(row + from, bytes); }, to)) return;
#endif
        alignas(LINE) uint8_t spread[MOST_DIM + LINE];
        const uint8_t* codes = Format::spread_row(row, dim, spread);
        int c = 0;
        for (; c + 2 * LANES <= dim; c += 2 * LANES)
            store(to + c / 2, pack_neighbours(exact(codes + c), exact(codes + c + LANES)));
        if (c < dim) narrow((bf16*)to + c, exact(codes + c));
    }
    // Writes two rows, of which each word has a number of both.
    void write_two(const char* a, const char* b, int dim, uint32_t* to) const {
#if defined(__AVX512BW__)
        if constexpr (BITS <= 4) {
            auto words = [&](int from, int bytes) { return words_of_row_pair(a + from, b + from, bytes); };
            if (look_up<16>(dim, words, to)) return;
        }
#endif
        alignas(LINE) uint8_t spread[2][MOST_DIM + LINE];
        const uint8_t *of_a = Format::spread_row(a, dim, spread[0]), *of_b = Format::spread_row(b, dim, spread[1]);
        for (int c = 0; c < dim; c += LANES) {
            const f32 x = exact(of_a + c), y = exact(of_b + c);
            // numbers of 8 bits are bf16 already
            store(to + c, BITS == 8 ? (u32)x >> 16 | ((u32)y & 0xffff0000u) : pack(x, y));
        }
    }

#if defined(__AVX512BW__)
    // Writes numbers for codes of which words(from, bytes) has some in the lowest bits of each half word, those of W channels.
    // Returns whether codes lie so that it can.
    template <int W, class Words> bool look_up(int dim, Words words, uint32_t* to) const {
        auto put = [&](int c, u32 codes) {
            store(to + c * LANES / W, (u32)_mm512_permutexvar_epi16((__m512i)codes, load<__m512i>(places)));
        };
        if constexpr (BITS != 3) return each_part<BITS, W>(dim, words, 0, put);
        u32 low[MOST_DIM / W];
        return each_part<2, W>(dim, words, 0, [&](int c, u32 codes) { low[c / W] = codes; }) &&
               each_part<1, W>(dim, words, dim / 4,
                               [&](int c, u32 codes) { put(c, (low[c / W] & 0x30003u) | (codes << 2 & 0x40004u)); });
    }
    // Calls f(first channel, words) for codes of N bits that begin at byte `first`: those of all lowest bits come first.
    template <int N, int W, class Words, class F> static bool each_part(int dim, Words words, int first, F f) {
        const int bytes = dim * N / 8;
        if (bytes % W == 0) {
            for (int i = 0; i < bytes; i += W) {
                const u32 codes = words(first + i, W);
                UNROLL for (int place = 0; place < 8 / N; place++) f(place * bytes + i, codes >> uint32_t(N * place));
            }
            return true;
        }
        return (bytes == 8 && each_part_of<N, W, 8>(dim, words, first, f)) ||
               (bytes == 16 && each_part_of<N, W, 16>(dim, words, first, f));
    }
    // Does so for BYTES that are less than W: they are taken again and again, with the shifts of each.
    template <int N, int W, int BYTES, class Words, class F>
    static bool each_part_of(int dim, Words words, int first, F f) {
        constexpr int CHANNELS = W / LANES;  // of a word
        const u32 shifts = ((u32)numbers() * CHANNELS / BYTES) * N;
        u32 codes = words(first, BYTES) >> shifts;
        for (int c = 0; c < dim; c += W, codes >>= uint32_t(W / BYTES * N)) f(c, codes);
        return true;
    }
    static u32 words_of_row(const char* row, int bytes) {
        const __m256i codes = bytes == 8    ? _mm256_set1_epi64x(load<int64_t>(row))
                              : bytes == 16 ? _mm256_broadcastsi128_si256(load<__m128i>(row))
                                            : load<__m256i>(row);
        return (u32)_mm512_cvtepu8_epi16(codes);
    }
    static u32 words_of_row_pair(const char* a, const char* b, int bytes) {
        auto words = [&](const char* row) {
            const __m128i codes = bytes == 8 ? _mm_set1_epi64x(load<int64_t>(row)) : load<__m128i>(row);
            return (u32)_mm512_cvtepu8_epi32(codes);
        };
        return words(a) | words(b) << 16;
    }
#endif
};

// Copies up to 16 bytes, without a call.
INLINE void copy_part(char* to, const char* from, int bytes) {
    if (bytes == 16) return (void)std::memcpy(to, from, 16);
    if (bytes & 8) std::memcpy(to, from, 8), to += 8, from += 8;
    if (bytes & 4) std::memcpy(to, from, 4), to += 4, from += 4;
    if (bytes & 2) std::memcpy(to, from, 2), to += 2, from += 2;
    if (bytes & 1) *to = *from;
}

// Loads up to 16 bytes of sixteen rows, and turns them: each of four vectors has a word of all rows.
template <class RowOf> void turn_four(RowOf row_of, int bytes, u32* to) {
    u32 fours[4];  // of rows that are four apart
#if defined(__AVX512BW__) && defined(__AVX512VL__)
    const __mmask16 mask = 0xffff >> (16 - bytes);
    UNROLL for (int i = 0; i < 4; i++) {
        auto part = [&](int row) { return _mm_maskz_loadu_epi8(mask, row_of(i + row)); };
        __m512i four = _mm512_inserti32x4(_mm512_castsi128_si512(part(0)), part(4), 1);
        fours[i] = (u32)_mm512_inserti32x4(_mm512_inserti32x4(four, part(8), 2), part(12), 3);
    }
#else
#if defined(__AVX2__)
    auto both = [&](int i) {
        const __m256i one = _mm256_castsi128_si256(load<__m128i>(row_of(i)));
        return (u32::Register)_mm256_inserti128_si256(one, load<__m128i>(row_of(i + 4)), 1);
    };
    if (bytes == 4) {
        alignas(LINE) uint32_t word[LANES];
        for (int i = 0; i < LANES; i++) word[i] = load<uint32_t>(row_of(i));
        for (int i = 0; i < 4; i++) to[i] = load<u32>(word);  // the others are not wanted
        return;
    }
    if (bytes == 16)
        for (int i = 0; i < 4; i++) fours[i] = {{both(i), both(i + 8)}};
    else
#endif
    {
        std::memset(fours, 0, sizeof fours);
        for (int i = 0; i < LANES; i++) copy_part((char*)&fours[i % 4] + i / 4 * 16, row_of(i), bytes);
    }
#endif
    u32 pairs[4];
    UNROLL for (int i = 0; i < 4; i += 2) {
        u32 a = fours[i], b = fours[i + 1];
        pairs[i] = shuffle<0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29>(a, b);
        pairs[i + 1] = shuffle<2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31>(a, b);
    }
    UNROLL for (int i = 0; i < 4; i += 2) {
        u32 a = pairs[i / 2], b = pairs[i / 2 + 2];
        to[i] = shuffle<0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29>(a, b);
        to[i + 1] = shuffle<2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31>(a, b);
    }
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// Writes the four words from byte `at` on of eight rows so that the lanes of a register are rows: each TOKENS behind the last.
INLINE void turn_words(const char* const* rows, int at, uint32_t* to) {
    __m256i x[4], pairs[4];
    UNROLL for (int i = 0; i < 4; i++)
        x[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(load<__m128i>(rows[i] + at)), load<__m128i>(rows[i + 4] + at), 1);
    UNROLL for (int i = 0; i < 2; i++) {
        pairs[i] = _mm256_unpacklo_epi32(x[2 * i], x[2 * i + 1]);
        pairs[i + 2] = _mm256_unpackhi_epi32(x[2 * i], x[2 * i + 1]);
    }
    UNROLL for (int i = 0; i < 2; i++) {
        store(to + 2 * i * TOKENS, _mm256_unpacklo_epi64(pairs[2 * i], pairs[2 * i + 1]));
        store(to + (2 * i + 1) * TOKENS, _mm256_unpackhi_epi64(pairs[2 * i], pairs[2 * i + 1]));
    }
}

// Does so for rows of `bytes`, a multiple of 16, from row `first` on. Behind the last of `count` it repeats.
INLINE void turn_rows(const HeadRows& of, int64_t first, int count, int bytes, uint32_t (*to)[TOKENS]) {
    const char *row = of[first], *rows[8];
    for (int t = 0; t < TOKENS; t += 8) {
        for (int i = 0; i < 8; i++, row += t + i < count ? of.row : 0) rows[i] = row;
        uint32_t* words = to[0] + t;
        for (int b = 0; b < bytes; b += 16, words += 4 * TOKENS) turn_words(rows, b, words);
    }
}
#endif

// Calls f(h, n) for all heads, so many at a time that registers hold their sums: n is 1, 2 or 4, and may reach beyond the
// last head.
template <class F> void by_four(int heads, F f) {
    for (int h = 0; h < heads; h += 4)
        if (heads - h == 1)
            f(h, std::integral_constant<int, 1>{});
        else if (heads - h == 2)
            f(h, std::integral_constant<int, 2>{});
        else
            f(h, std::integral_constant<int, 4>{});
}

// Attends from up to MOST_HEADS heads of a group to rows of codes.
struct ScaledAttention {
    const CodedAttention& in;
    const Places at;
    const bool ranged = in.codes.kind == INTEGERS, four = in.codes.kind == FLOATS4;
    const int heads, dim = in.codes.dim, width = in.width;
    const int ranges = ranged || four ? in.codes.ranges : 1;  // of a value
    const int acc_width = width + (ranged ? ranges * LANES : 0);
    const float key_middle, middle;  // of the integers of keys and of values; 0 if they are not taken less their middle
    Buffer<float> q;    // [heads][width]
    Buffer<float> acc;  // [MOST_HEADS][width, and a vector for each range]
    State states[MOST_HEADS];
    int64_t block = -1;                            // whose ranges of keys are in the queries that are laid out
    alignas(LINE) float centers[MOST_HEADS] = {};  // what the middles of these ranges add to the logits
    alignas(LINE) float scales[2 * MOST_RANGES][TOKENS];
    alignas(LINE) float logits[MOST_HEADS][TOKENS];

    // centered: whether a subclass takes integers less the middle of their range
    ScaledAttention(const CodedAttention& in, int64_t sequence, int64_t group, int64_t head, int heads, bool centered)
        : in(in), at(in.codes, sequence, group), heads(heads),
          key_middle(centered && ranged ? ((1 << in.codes.key_bits) - 1) * 0.5f : 0),
          middle(centered && ranged ? ((1 << in.codes.bits) - 1) * 0.5f : 0),
          q(widened((const bf16*)in.q + ((sequence * in.groups + group) * in.heads + head) * width)),
          acc(MOST_HEADS * acc_width) {
        for (int h = 0; h < MOST_HEADS; h++) states[h] = {-INFINITY, f32{}, &acc[h * acc_width]};
    }
    virtual ~ScaledAttention() = default;

    // Lays out queries times the step of each channel.
    virtual void lay_out(const float* step) = 0;
    // Writes the logits of a block, without what is common to all.
    virtual void multiply_keys(int64_t first, int count) = 0;
    // Adds the values of a block whose weights are in `logits`.
    virtual void add_values(int64_t first, int count) = 0;
    // Writes the sums of a head's channels in the order of bf16.
    virtual void put_sums(int head, float* to) const = 0;
    // Does so where sum_of(c) is that of channel c.
    template <class SumOf> void put_each(float* to, SumOf sum_of) const {
        for (int c = 0; c < dim; c += 2 * LANES)
            for (int odd = 0; odd < 2; odd++)
                UNROLL for (int i = 0; i < LANES; i++) to[c + odd * LANES + i] = sum_of(c + 2 * i + odd);
    }

    Buffer<float> widened(const bf16* from) const {
        Buffer<float> to(heads * width);
        for (int c = 0; c < heads * width; c += LANES) store(&to[c], widen(from + c));
        return to;
    }

    // Attends to `count` rows from `first` on.
    virtual void run(int64_t first, int64_t count, State* to) {
        for (int64_t done = 0; done < count; done += TOKENS) {
            const int n = std::min<int64_t>(TOKENS, count - done);
            read_scales(first + done, n);
            multiply_keys(first + done, n);
            weigh_all(n);
            add_values(first + done, n);
        }
        for (int h = 0; h < heads; h++) {
            to[h].top = states[h].top, to[h].totals = states[h].totals;
            put_sums(h, to[h].acc);
            for (int r = 0; ranged && r < ranges; r++) {
                const float center = sum(load<f32>(states[h].acc + width + r * LANES));
                const int end = (r + 1) * dim / ranges;
                int c = r * dim / ranges;
                // whole vectors of bf16 are in place
                for (; c % (2 * LANES) == 0 && c + 2 * LANES <= end; c += 2 * LANES)
                    for (int i = 0; i < 2 * LANES; i += LANES) store(to[h].acc + c + i, load<f32>(to[h].acc + c + i) + center);
                for (; c < end; c++) to[h].acc[channel(BF16{}, c)] += center;
            }
        }
    }

    // Reads the scales of rows [scales of a row][TOKENS]; behind the last row it repeats.
    void read_scales(int64_t first, int count) {
        if (four) return read_scales_of<1>(first, count, 2 * ranges);
        read_scales_of<2>(first, count, ranged ? 2 * ranges : in.codes.ranges);
    }
    // Does so for `all` scales of BYTES each.
    template <int BYTES> void read_scales_of(int64_t first, int count, int all) {
        alignas(LINE) float of_block[2][TOKENS] = {};  // the scales of a tensor of NVFP4: of its keys and of its values
        if (BYTES == 1)
            each_block(first, count, [&](int t, int next, int64_t of_rows) {
                for (int side = 0; side < 2; side++)
                    std::fill(of_block[side] + t, of_block[side] + next, ((const float*)at.k_range[of_rows])[side]);
            });
#if defined(__AVX2__) && !defined(__AVX512F__)
        if (BYTES * all % 16 == 0) {
            alignas(LINE) uint32_t words[MOST_RANGES][TOKENS];
            turn_rows(at.v_range, first, count, BYTES * all, words);
            for (int scale = 0; scale < all; scale += 4 / BYTES)
                for (int t = 0; t < TOKENS; t += 8) {
                    const __m256i word = load<__m256i>(words[scale * BYTES / 4] + t);
                    if (BYTES == 2) {
                        const __m256i low = _mm256_blend_epi16(word, _mm256_setzero_si256(), 0xaa);
                        const __m256i packed = _mm256_packus_epi32(low, _mm256_srli_epi32(word, 16));
                        const __m256i both = _mm256_permute4x64_epi64(packed, 0xd8);
                        store(scales[scale] + t, _mm256_cvtph_ps(_mm256_castsi256_si128(both)));
                        store(scales[scale + 1] + t, _mm256_cvtph_ps(_mm256_extracti128_si256(both, 1)));
                        continue;
                    }
                    UNROLL for (int i = 0; i < 4; i++) {
                        const auto code = (i32::Register)word << (24 - 8 * i) >> 4;  // a float that is 2^120 times smaller
                        const auto x = (f32::Register)(code & (int32_t)0x87f00000) * 0x1p120f;
                        store(scales[scale + i] + t, x * load<f32::Register>(of_block[scale >= ranges] + t));
                    }
                }
            return;
        }
#endif
        for (int b = 0; b < BYTES * all; b += 16)
            for (int t = 0; t < TOKENS; t += LANES) {
                u32 words[4];
                turn_four([&](int i) { return at.v_range[first + std::min(t + i, count - 1)] + b; },
                          std::min(16, BYTES * all - b), words);
                UNROLL for (int i = 0; i < 16 / BYTES; i++) {
                    const int scale = b / BYTES + i;
                    if (scale >= all) break;
                    const u32 code = words[i * BYTES / 4] >> uint32_t(i * BYTES % 4 * 8);
                    const Half bits = convert<Half>(code & (BYTES == 1 ? 0xffu : 0xffffu));
                    const f32 x = BYTES == 1 ? Floats::Table::numbers(bits) * load<f32>(of_block[scale >= ranges] + t)
                                             : from_halves(bits);
                    store(scales[scale] + t, x);
                }
            }
    }

    // Calls f(t, next, block) for the rows t to next - 1 of each block of tokens that share ranges or scales.
    template <class F> void each_block(int64_t first, int count, F f) {
        for (int64_t t = 0, next; t < count; t = next) {
            const int64_t of_rows = (first + t) / in.codes.block;
            next = std::min<int64_t>(count, (of_rows + 1) * in.codes.block - first);
            f(t, next, of_rows);
        }
    }

    // Lays out queries for the ranges of a block of keys, unless they are.
    void set_block(int64_t to) {
        if (to == block) return;
        alignas(LINE) float range[2 * MOST_DIM];
        if (width > dim) std::fill(range, range + 2 * MOST_DIM, 0.0f);
        widen_halves(at.k_range[block = to], 2 * dim, range);
        fetch(at.k_range[to + 1], 4 * dim);
        for (int64_t j = 0; j < in.codes.channels; j++) {  // what is kept in full has no range
            const int c = ((const uint8_t*)at.which[to])[j];
            range[c] = range[dim + c] = 0;
        }
        lay_out(range + dim);
        for (int c = 0; key_middle != 0 && c < dim; c += LANES)
            store(range + c, load<f32>(range + c) + load<f32>(range + dim + c) * key_middle);
        for (int h = 0; h < heads; h++) {
            f32 center = {};
            for (int c = 0; c < dim; c += LANES) center += load<f32>(&q[h * width + c]) * load<f32>(range + c);
            centers[h] = sum(center);
        }
    }

    // Turns the logits of a block into weights.
    void weigh_all(int count) {
        for (int h = 0; h < heads; h++) {
            for (int t = 0; t < TOKENS; t += LANES)
                store(logits[h] + t, load<f32>(logits[h] + t) * ((float)in.scale * (float)M_LOG2E));
            for (int t = count; t < TOKENS; t++) logits[h][t] = -INFINITY;
            weigh(logits[h], states[h], acc_width);
        }
    }

    // Calls put(head, weights of sixteen values, weights of the others) for values in one range, or all where rows have a
    // scale each, and adds what their least numbers add, if they have some.
    template <class Put> void weigh_range(int range, Put put) {
        const float* step = scales[ranges + range];
        const f32 low = load<f32>(step), high = load<f32>(step + LANES);
        const f32 low_center = load<f32>(scales[range]) + low * middle;
        const f32 high_center = load<f32>(scales[range] + LANES) + high * middle;
        for (int h = 0; h < heads; h++) {
            f32 a = load<f32>(logits[h]), b = load<f32>(logits[h] + LANES);
            put(h, a * low, b * high);
            if (!ranged) continue;
            float* center = states[h].acc + width + range * LANES;
            store(center, load<f32>(center) + a * low_center + b * high_center);
        }
    }
};

}  // namespace
