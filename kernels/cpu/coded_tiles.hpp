// Attends from one token to keys and values that are codes, on AMX tiles: a block of codes becomes bf16 numbers in few steps.
#pragma once
#include "amx.hpp"
#include "coded_scaled.hpp"

namespace {

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

// Attends on tiles. The heads are the columns of one.
struct TileAttention : ScaledAttention {
    const std::unique_ptr<BlockReader> reader;
    const int words = width / 2;
    Buffer<uint32_t> query, sign_query;  // two channels in each word [words][MOST_HEADS]
    Buffer<uint32_t> k, signs, v;        // as their reader writes them, with rows to spare after keys
    alignas(LINE) float products[2 * TOKENS][MOST_HEADS], sign_products[TOKENS][MOST_HEADS];
    alignas(LINE) uint32_t weights[MOST_HEADS][TOKENS / 2] = {};

    TileAttention(const CodedAttention& in, std::unique_ptr<BlockReader> reader, int64_t sequence, int64_t group, int64_t head,
                  int heads)
        : ScaledAttention(in, sequence, group, head, heads, true), reader(std::move(reader)), query(words * MOST_HEADS),
          sign_query(query), k(2 * TOKENS * words), signs(k), v(TOKENS / 2 * width) {
        const int64_t from = ((sequence * in.groups + group) * in.heads + head) * width;
        const Buffer<float> ones(width, 1);
        lay_out(ones.data());
        if (in.q_signs) lay_out(widened((const bf16*)in.q_signs + from), ones.data(), sign_query);
    }

    void lay_out(const float* step) override { lay_out(q, step, query); }

    // Writes queries times the step of each channel, as tiles want them.
    void lay_out(const Buffer<float>& x, const float* step, Buffer<uint32_t>& to) const {
        for (int w = 0; w < words; w += LANES) {
            f32 low = load<f32>(step + 2 * w), high = load<f32>(step + 2 * w + LANES);
            u32 part[MOST_HEADS] = {};
            for (int h = 0; h < heads; h++) {
                const float* row = &x[h * width + 2 * w];
                part[h] = pack_neighbours(load<f32>(row) * low, load<f32>(row + LANES) * high);
            }
            transpose(part);
            UNROLL for (int i = 0; i < LANES; i++) store(&to[(w + i) * MOST_HEADS], part[i]);
        }
    }

    void run(int64_t first, int64_t count, State* to) override {
        Tiles tiles(true);
        ScaledAttention::run(first, count, to);
    }

    void multiply_keys(int64_t first, int count) override {
        reader->read_keys(first, count, words, k.data(), in.q_signs ? signs.data() : nullptr);
        ranged ? multiply_blocks(first, count) : multiply_rows(count);
        for (int t = 0; t < TOKENS; t += LANES) {
            u32 x[LANES];
            for (int i = 0; i < LANES; i++) x[i] = load<u32>(products[t + i]);
            transpose(x);
            for (int h = 0; h < heads; h++) store(logits[h] + t, x[h]);
        }
    }

    // Multiplies keys that have a scale each.
    void multiply_rows(int count) {
        multiply_on_tiles(k.data(), query.data(), products[0]);
        if (in.q_signs) multiply_on_tiles(signs.data(), sign_query.data(), sign_products[0]);
        for (int t = 0; t < count; t++) {
            f32 x = load<f32>(products[t]) * scales[0][t];
            if (in.q_signs) x += load<f32>(sign_products[t]) * (scales[2][t] * (float)in.codes.residual);
            store(products[t], x);
        }
    }

    // Multiplies keys whose channels have ranges, block by block.
    void multiply_blocks(int64_t first, int count) {
        each_block(first, count, [&](int64_t t, int64_t next, int64_t of_rows) {
            set_block(of_rows);
            multiply_on_tiles(&k[t * words], query.data(), products[t]);
            for (int64_t i = t; i < next; i++) store(products[i], load<f32>(products[i]) + load<f32>(centers));
        });
    }

    // Computes to[TOKENS][MOST_HEADS].
    void multiply_on_tiles(const uint32_t* rows, const uint32_t* query, float* to) const {
        const int64_t stride = 4 * words;
        SETTLE_MEMORY;
        TILE_ZERO(0);
        TILE_ZERO(1);
        for (int w = 0; w < words; w += 16) {
            TILE_LOAD(6, query + w * MOST_HEADS, LINE);
            TILE_LOAD(4, rows + w, stride);
            TILE_DOT(0, 4, 6);
            TILE_LOAD(5, rows + 16 * words + w, stride);
            TILE_DOT(1, 5, 6);
        }
        TILE_STORE(0, to, LINE);
        TILE_STORE(1, to + 16 * MOST_HEADS, LINE);
    }

    void add_values(int64_t first, int count) override {
        reader->read_values(first, count, words, v.data());
        const int64_t acc_stride = 4 * acc_width, v_stride = 4 * width;
        for (int range = 0; range < ranges; range++) {
            weigh_range(range, [&](int h, f32 a, f32 b) { store(weights[h], pack_neighbours(a, b)); });
            SETTLE_MEMORY;
            TILE_LOAD(4, weights, LINE);
            for (int c = range * dim / ranges; c < (range + 1) * dim / ranges; c += LANES) {
                TILE_LOAD(0, &acc[c], acc_stride);
                TILE_LOAD(6, &v[c], v_stride);
                TILE_DOT(0, 4, 6);
                TILE_STORE(0, &acc[c], acc_stride);
            }
        }
    }

    void put_sums(int head, float* to) const override {
        put_each(to, [&](int c) { return states[head].acc[c]; });
    }
};

}  // namespace
