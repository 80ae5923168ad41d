// Attends from one token to keys and values that are codes, on AMX tiles: a block of codes becomes bf16 numbers as they are,
// in few steps, and the scales of codes are applied to queries, logits and weights, of which there are fewer.
#pragma once
#include "amx.hpp"
#include "attention.hpp"
#include "codes.hpp"

namespace {

constexpr int TILE_HEADS = 16;  // heads of a tile

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

// Prefetches a row. What lies behind the last one is not read.
inline void fetch(const char* row, int bytes) {
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
        const u32 shifts = (u32{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} * CHANNELS / BYTES) * N;
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

// Turns blocks of rows into numbers.
struct BlockReader {
    virtual ~BlockReader() = default;
    // Writes keys, and their signs if there are some, row by row [count][words].
    virtual void read_keys(int64_t first, int count, int64_t words, uint32_t* k, uint32_t* signs) = 0;
    // Writes pairs of values [count / 2][2 * words]; a last one without a partner has any numbers there.
    virtual void read_values(int64_t first, int count, int64_t words, uint32_t* v) = 0;
};

template <class KeyFormat, class Format> struct BlockReaderOf : BlockReader {
    const Places at;
    const int dim;
    const Numbers<KeyFormat> keys;
    const Numbers<Format> values;
    static constexpr float BOTH_SIGNS[2] = {-1, 1};
    const Numbers<Levels<1>> signs{BOTH_SIGNS};

    BlockReaderOf(const Codes& in, int64_t sequence, int64_t group)
        : at(in, sequence, group), dim(in.dim), keys(in.key_levels), values(in.levels) {}

    void read_keys(int64_t first, int count, int64_t words, uint32_t* k, uint32_t* k_signs) override {
        for (int i = 0; i < count; i++) {
            const char* row = at.k[first + i];
            fetch(row + TOKENS * at.k.row, KeyFormat::bytes(dim));
            keys.write(row, dim, k + i * words);
            if (k_signs) signs.write(row + KeyFormat::bytes(dim), dim, k_signs + i * words);
        }
    }

    void read_values(int64_t first, int count, int64_t words, uint32_t* v) override {
        for (int i = 0; i < count; i += 2) {
            const char *a = at.v[first + i], *b = at.v[first + std::min(i + 1, count - 1)];
            fetch(a + TOKENS * at.v.row, Format::bytes(dim));
            fetch(b + TOKENS * at.v.row, Format::bytes(dim));
            values.write_two(a, b, dim, v + i * words);
        }
    }
};

// Attends from up to TILE_HEADS heads of a group to rows of codes.
struct TileAttention {
    const CodedAttention& in;
    const Places at;
    BlockReader& reader;
    const bool ranged = in.codes.kind == INTEGERS;
    const int heads, dim = in.codes.dim, width = in.width, words = width / 2;
    const int ranges = ranged ? in.codes.ranges : 1, acc_width = width + (ranged ? ranges * LANES : 0);
    const float key_middle = ranged ? ((1 << in.codes.key_bits) - 1) * 0.5f : 0;
    const float middle = ranged ? ((1 << in.codes.bits) - 1) * 0.5f : 0;  // of values
    Buffer<float> q;                     // [TILE_HEADS][width]
    Buffer<uint32_t> query, sign_query;  // two channels in each word [words][TILE_HEADS]
    Buffer<uint32_t> k, signs, v;        // as their reader writes them, with rows to spare after keys
    Buffer<float> acc;                   // [TILE_HEADS][width, and a vector for each range]
    State states[TILE_HEADS];
    int64_t block = -1;                            // whose ranges of keys are in `query`
    alignas(LINE) float centers[TILE_HEADS] = {};  // what the middles of these ranges add to the logits
    alignas(LINE) float scales[2 * MOST_RANGES][TOKENS];
    alignas(LINE) float products[2 * TOKENS][TILE_HEADS], sign_products[TOKENS][TILE_HEADS];
    alignas(LINE) float logits[TILE_HEADS][TOKENS];
    alignas(LINE) uint32_t weights[TILE_HEADS][TOKENS / 2] = {};

    TileAttention(const CodedAttention& in, BlockReader& reader, int64_t sequence, int64_t group, int64_t head, int heads)
        : in(in), at(in.codes, sequence, group), reader(reader), heads(heads), query(words * TILE_HEADS), sign_query(query),
          k(2 * TOKENS * words), signs(k), v(TOKENS / 2 * width), acc(TILE_HEADS * acc_width) {
        const int64_t from = ((sequence * in.groups + group) * in.heads + head) * width;
        const Buffer<float> ones(width, 1);
        q = widened((const bf16*)in.q + from);
        lay_out(q, ones.data(), query);
        if (in.q_signs) lay_out(widened((const bf16*)in.q_signs + from), ones.data(), sign_query);
        for (int h = 0; h < TILE_HEADS; h++) states[h] = {-INFINITY, f32{}, &acc[h * acc_width]};
    }

    Buffer<float> widened(const bf16* from) const {
        Buffer<float> to(TILE_HEADS * width);
        for (int c = 0; c < heads * width; c += LANES) store(&to[c], widen(from + c));
        return to;
    }

    // Writes queries times the step of each channel, as tiles want them.
    void lay_out(const Buffer<float>& x, const float* step, Buffer<uint32_t>& to) const {
        for (int w = 0; w < words; w += LANES) {
            f32 low = load<f32>(step + 2 * w), high = load<f32>(step + 2 * w + LANES);
            u32 part[TILE_HEADS] = {};
            for (int h = 0; h < heads; h++) {
                const float* row = &x[h * width + 2 * w];
                part[h] = pack_neighbours(load<f32>(row) * low, load<f32>(row + LANES) * high);
            }
            transpose(part);
            UNROLL for (int i = 0; i < LANES; i++) store(&to[(w + i) * TILE_HEADS], part[i]);
        }
    }

    void run(int64_t first, int64_t count, State* to) {
        Tiles tiles(true);
        for (int64_t done = 0; done < count; done += TOKENS) {
            const int n = std::min<int64_t>(TOKENS, count - done);
            read_scales(first + done, n);
            reader.read_keys(first + done, n, words, k.data(), in.q_signs ? signs.data() : nullptr);
            ranged ? multiply_blocks(first + done, n) : multiply_rows(n);
            weigh_all(n);
            reader.read_values(first + done, n, words, v.data());
            for (int r = 0; r < ranges; r++) add_values(r);
        }
        for (int h = 0; h < heads; h++) {
            to[h].top = states[h].top, to[h].totals = states[h].totals;
            for (int r = 0; r < ranges; r++) {
                const float center = ranged ? sum(load<f32>(states[h].acc + width + r * LANES)) : 0;
                for (int c = r * dim / ranges; c < (r + 1) * dim / ranges; c++)
                    to[h].acc[channel(BF16{}, c)] = states[h].acc[c] + center;
            }
        }
    }

    // Reads the scales of rows [scales of a row][TOKENS], two at a time; behind the last row it repeats.
    void read_scales(int64_t first, int count) {
        const int each = ranged ? 2 * ranges : in.codes.ranges;
        for (int s = 0; s < each; s += 2) {
            const int place = std::min(s, each - 2);
            for (int t = 0; t < TOKENS; t += LANES) {
                alignas(LINE) uint32_t both[LANES];
                for (int i = 0; i < LANES; i++)
                    std::memcpy(both + i, at.v_range[first + std::min(t + i, count - 1)] + 2 * place, 4);
                const Half low = __builtin_convertvector(load<u32>(both), Half);
                const Half high = __builtin_convertvector(load<u32>(both) >> 16, Half);
                widen_halves(&low, LANES, scales[place] + t);
                widen_halves(&high, LANES, scales[place + 1] + t);
            }
        }
    }

    // Multiplies keys that have a scale each.
    void multiply_rows(int count) {
        multiply_keys(k.data(), query.data(), products[0]);
        if (in.q_signs) multiply_keys(signs.data(), sign_query.data(), sign_products[0]);
        for (int t = 0; t < count; t++) {
            f32 x = load<f32>(products[t]) * scales[0][t];
            if (in.q_signs) x += load<f32>(sign_products[t]) * (scales[2][t] * (float)in.codes.residual);
            store(products[t], x);
        }
    }

    // Multiplies keys whose channels have ranges, block by block.
    void multiply_blocks(int64_t first, int count) {
        for (int64_t t = 0, next; t < count; t = next) {
            const int64_t of_row = (first + t) / in.codes.block;
            next = std::min<int64_t>(count, (of_row + 1) * in.codes.block - first);
            if (of_row != block) set_block(of_row);
            multiply_keys(&k[t * words], query.data(), products[t]);
            for (int64_t i = t; i < next; i++) store(products[i], load<f32>(products[i]) + load<f32>(centers));
        }
    }

    void set_block(int64_t to) {
        alignas(LINE) float range[2 * MOST_DIM] = {};
        widen_halves(at.k_range[block = to], 2 * dim, range);
        lay_out(q, range + dim, query);
        for (int h = 0; h < heads; h++) {
            f32 center = {};
            for (int c = 0; c < dim; c += LANES)
                center += load<f32>(&q[h * width + c]) * (load<f32>(range + c) + load<f32>(range + dim + c) * key_middle);
            centers[h] = sum(center);
        }
    }

    // Computes to[TOKENS][TILE_HEADS].
    void multiply_keys(const uint32_t* rows, const uint32_t* query, float* to) const {
        const int64_t stride = 4 * words;
        SETTLE_MEMORY;
        TILE_ZERO(0);
        TILE_ZERO(1);
        for (int w = 0; w < words; w += 16) {
            TILE_LOAD(6, query + w * TILE_HEADS, LINE);
            TILE_LOAD(4, rows + w, stride);
            TILE_DOT(0, 4, 6);
            TILE_LOAD(5, rows + 16 * words + w, stride);
            TILE_DOT(1, 5, 6);
        }
        TILE_STORE(0, to, LINE);
        TILE_STORE(1, to + 16 * TILE_HEADS, LINE);
    }

    // Turns the products of a block into weights.
    void weigh_all(int count) {
        for (int t = 0; t < TOKENS; t += LANES) {
            u32 x[LANES];
            for (int i = 0; i < LANES; i++) x[i] = load<u32>(products[t + i]);
            transpose(x);
            for (int h = 0; h < heads; h++) store(logits[h] + t, (f32)x[h] * ((float)in.scale * (float)M_LOG2E));
        }
        for (int h = 0; h < heads; h++) {
            for (int t = count; t < TOKENS; t++) logits[h][t] = -INFINITY;
            weigh(logits[h], states[h], acc_width);
        }
    }

    // Adds a block's values in one range, or all where rows have a scale each.
    void add_values(int range) {
        const float* step = scales[ranged ? ranges + range : 1];
        const f32 low = load<f32>(step), high = load<f32>(step + LANES);
        const f32 low_center = load<f32>(scales[range]) + low * middle;
        const f32 high_center = load<f32>(scales[range] + LANES) + high * middle;
        for (int h = 0; h < heads; h++) {
            f32 a = load<f32>(logits[h]), b = load<f32>(logits[h] + LANES);
            store(weights[h], pack_neighbours(a * low, b * high));
            if (!ranged) continue;
            float* center = states[h].acc + width + range * LANES;
            store(center, load<f32>(center) + a * low_center + b * high_center);
        }
        const int64_t acc_stride = 4 * acc_width, v_stride = 4 * width;
        SETTLE_MEMORY;
        TILE_LOAD(4, weights, LINE);
        for (int c = range * dim / ranges; c < (range + 1) * dim / ranges; c += LANES) {
            TILE_LOAD(0, &acc[c], acc_stride);
            TILE_LOAD(6, &v[c], v_stride);
            TILE_DOT(0, 4, 6);
            TILE_STORE(0, &acc[c], acc_stride);
        }
    }
};

}  // namespace
