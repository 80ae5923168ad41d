// Multiplies a group's queries with every row of an index.
#include "amx.hpp"
#include "calls.hpp"
#include "rows.hpp"

namespace {

using Rows = RowScores;

constexpr int64_t CHUNK = 1024;  // rows per task

// Holds the rows of one group.
struct Index {
    const char* first;
    int64_t row, count;  // bytes from one to the next; how many there are

    Index(const RowScores& in, int64_t pair) : row(in.x_row), count(in.count) {
        int64_t sequence = pair / in.groups, group = pair % in.groups;
        first = (const char*)in.x + sequence * in.x_batch + group * in.x_group;
        if (const int64_t* table = in.table ? in.table + 3 * sequence : nullptr)
            first = (const char*)table[0] + group * table[1], row = table[2], count = in.counts[sequence];
    }
};

inline void copy_row(char* to, const char* from, int64_t bytes) {
    int64_t i = 0;
    for (; i + LINE <= bytes; i += LINE) store(to + i, load<u32>(from + i));
    if (i < bytes) store(to + i, load_part<u32>(from + i, bytes - i));
}

// Multiplies every query of a group with every row of x [B G S C].
template <class T, int L, bool PART>
void products(const typename T::Element* q, const Rows& in, float* out) {
    int64_t chunks = (in.count + CHUNK - 1) / CHUNK, pairs = in.batch * in.groups;
    int rest = in.row_bytes - (L - 1) * LINE;
    each_task(pairs * chunks, pairs * in.count > 2048, [&](int64_t task) {
        int64_t pair = task / chunks, first = task % chunks * CHUNK;
        Index index(in, pair);
        const auto* queries = q + pair * in.heads * L * T::WIDTH;
        for (int64_t at = first; at < std::min(first + CHUNK, index.count); at += TOKENS) {
            const char *rows[TOKENS], *ahead[TOKENS];
            for (int t = 0; t < TOKENS; t++) {
                rows[t] = index.first + std::min(at + t, index.count - 1) * index.row;
                ahead[t] = index.first + std::min(at + t + 2 * TOKENS, index.count - 1) * index.row;
            }
            float* to = out + pair * in.heads * in.count + at;
            if (at + TOKENS <= index.count) {
                block_logits<T, L, PART>(queries, rows, ahead, in.heads, 1.0f, to, in.count, rest);
            } else {
                Buffer<float> last(in.heads * TOKENS);
                block_logits<T, L, PART>(queries, rows, ahead, in.heads, 1.0f, last.data(), TOKENS, rest);
                for (int64_t h = 0; h < in.heads; h++)
                    std::copy_n(&last[h * TOKENS], index.count - at, to + h * in.count);
            }
        }
    });
}

template <class T, int L> void products_of(const void* q, const Rows& in, float* out) {
    auto typed = (const typename T::Element*)q;
    in.row_bytes % LINE ? products<T, L, true>(typed, in, out) : products<T, L, false>(typed, in, out);
}

template <class T> void products_of(const void* q, const Rows& in, float* out) {
    switch ((in.row_bytes + LINE - 1) / LINE) {
        case 1: return products_of<T, 1>(q, in, out);
        case 2: return products_of<T, 2>(q, in, out);
        case 3: return products_of<T, 3>(q, in, out);
        case 4: return products_of<T, 4>(q, in, out);
        case 6: return products_of<T, 6>(q, in, out);
        case 8: return products_of<T, 8>(q, in, out);
        case 16: return products_of<T, 16>(q, in, out);
    }
}

constexpr int MOST_COLUMNS = 16;

// Does the same on tiles: rows are loaded in place unless they end inside a line. W heads; those past the last are
// zero.
template <int W> void products_by_tiles(const uint32_t* q, const Rows& in, float* out) {
    int64_t chunks = (in.count + CHUNK - 1) / CHUNK, steps = (in.row_bytes + LINE - 1) / LINE;
    int64_t pairs = in.batch * in.groups;
    each_task(pairs * chunks, pairs * in.count > 2048, [&](int64_t task) {
        int64_t pair = task / chunks, first = task % chunks * CHUNK;
        Index index(in, pair);
        int64_t last = std::min(first + CHUNK, index.count);
        if (first >= last) return;
        Buffer<uint32_t> columns(steps * 16 * W);
        for (int64_t h = 0; h < in.heads; h++)
            for (int64_t w = 0; w < steps * 16; w++) columns[w * W + h] = q[(pair * in.heads + h) * steps * 16 + w];
        Buffer<char> copies(TOKENS * steps * LINE);
        alignas(LINE) float sums[TOKENS * W];
        Tiles tiles(true, W);
        for (int64_t at = first; at < last; at += TOKENS) {
            int64_t n = std::min<int64_t>(TOKENS, last - at), stride = index.row;
            const char* rows = index.first + at * index.row;
            const char* ahead = rows + std::min<int64_t>(2 * TOKENS, index.count - 1 - at) * index.row;
            for (int64_t i = 0; i < TOKENS * in.row_bytes; i += LINE) __builtin_prefetch(ahead + i, 0, 2);
            if (n < TOKENS || in.row_bytes % LINE) {
                stride = steps * LINE;
                for (int64_t t = 0; t < n; t++) copy_row(&copies[t * stride], rows + t * index.row, in.row_bytes);
                rows = copies.data();
            }
            multiply_narrow(rows, stride, columns.data(), sums, W, steps);
            float* to = out + pair * in.heads * in.count + at;
            for (int64_t t = 0; t < n; t += LANES) {
                f32 heads[4];
                if (W == 4 && t + LANES <= n) {
                    heads_apart(sums + t * W, heads);
                    for (int64_t h = 0; h < in.heads; h++) store(to + h * in.count + t, heads[h]);
                } else {
                    for (int64_t h = 0; h < in.heads; h++)
                        for (int64_t i = t; i < std::min(t + LANES, n); i++) to[h * in.count + i] = sums[i * W + h];
                }
            }
        }
    });
}

void products_by_tiles(const void* q, const Rows& in, float* out) {
    auto words = (const uint32_t*)q;
    in.heads <= 4   ? products_by_tiles<4>(words, in, out)
    : in.heads <= 8 ? products_by_tiles<8>(words, in, out)
                    : products_by_tiles<16>(words, in, out);
}

}  // namespace

EXPORT void row_scores(const RowScores& in) {
    if (in.is_bf16 && in.heads <= MOST_COLUMNS && amx_allowed()) return products_by_tiles(in.q, in, in.out);
    in.is_bf16 ? products_of<BF16>(in.q, in, in.out) : products_of<F32>(in.q, in, in.out);
}
