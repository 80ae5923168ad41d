// Multiplies a group's queries with every row of an index; in bf16 on AMX tiles where there are any.
#include "amx.hpp"
#include "calls.hpp"
#include "rows.hpp"

namespace {

using Rows = RowScores;

// Rows follow each other, which the processor finds out: it reads them a sixth faster if nothing else asks for them.
// But while longer ones are multiplied with one head after the other, memory would wait, as it does for AVX2 with any.
constexpr int FETCHED = 5;  // lines of the shortest such rows
constexpr PassInto<2> NO_FETCH{0, TOKENS + 1, nullptr};

// Returns the log-sum-exp of x[count] times `scale`.
WITHOUT_CALLS float log_sum_exp(const float* x, int64_t count, float scale) {
    scale *= (float)M_LOG2E;
    f32 best = splat(-INFINITY), total = {};
    f32 last = splat(-INFINITY);
    const int64_t whole = count / LANES * LANES;
    std::memcpy(&last, x + whole, (count - whole) * sizeof *x);
    auto over = [&](auto f) {
        for (int64_t at = 0; at < whole; at += LANES) f(load<f32>(x + at));
        f(last);
    };
    over([&](f32 part) { best = maximum(best, part); });
    const float top = largest(best) * scale;
    over([&](f32 part) { total += exp2(part * scale - top); });
    return (top + std::log2(sum(total))) * (float)M_LN2;
}

// Multiplies TOKENS rows of L lines, `row` bytes apart, on tiles with the queries of `heads` heads. These are
// transposed: each of their words in turn, of all heads, which are filled up to `filled`.
template <int L>
void products_on_tiles(const uint32_t* queries, int64_t filled, int64_t heads, const char* rows, int64_t row,
                       float* out, int64_t stride) {
    for (int64_t first = 0; first < heads; first += LANES) {
        u32 sums[TOKENS];
        SETTLE_MEMORY;
        TILE_ZERO(0);
        TILE_ZERO(1);
        for (int c = 0; c < L; c++) {
            TILE_LOAD(4, queries + c * LANES * filled + first, 4 * filled);
            TILE_LOAD(2, rows + c * LINE, row);
            TILE_DOT(0, 2, 4);
            TILE_LOAD(3, rows + LANES * row + c * LINE, row);
            TILE_DOT(1, 3, 4);
        }
        TILE_STORE(0, sums, LINE);
        TILE_STORE(1, sums + LANES, LINE);
        for (int t = 0; t < TOKENS; t += LANES) {
            transpose(sums + t);
            for (int64_t h = first; h < std::min(first + LANES, heads); h++)
                store(out + h * stride + t, sums[t + h - first]);
        }
    }
}

// Multiplies every query of a group with every row of x [B G S C].
template <class T, int L, bool PART>
void products(const typename T::Element* q, const Rows& in, float* out) {
    int64_t chunks = (in.count + in.part - 1) / in.part, pairs = in.batch * in.groups;
    int rest = in.row_bytes - (L - 1) * LINE;
    Buffer<float> room;
    const auto* wide = queries<T>(q, pairs * in.heads * L * T::WIDTH, room);
    each_task(pairs * chunks, pairs * in.count > 2048, [&](int64_t task) {
        int64_t pair = task / chunks, first = task % chunks * in.part;
        int64_t sequence = pair / in.groups, count = in.counts ? in.counts[sequence] : in.count;
        HeadRows index(in.x, in.x_batch, in.x_group, in.x_row, in.table, sequence, pair % in.groups);
        const auto* of_pair = wide + pair * in.heads * L * T::WIDTH;
        const bool by_tiles = !PART && uses_tiles<T>();
        const int64_t filled = (in.heads + LANES - 1) / LANES * LANES;
        std::vector<const char*> each(in.heads);
        for (int64_t h = 0; h < in.heads; h++) each[h] = (const char*)(q + (pair * in.heads + h) * L * T::WIDTH);
        Buffer<uint32_t> words(by_tiles ? L * LANES * filled : 0);
        if (by_tiles) transpose(each.data(), in.heads, L * LANES, words.data(), filled);
        Tiles tiles(by_tiles);
        for (int64_t at = first; at < std::min(first + in.part, count); at += TOKENS) {
            const char *rows[TOKENS], *ahead[TOKENS];
            for (int t = 0; t < TOKENS; t++) rows[t] = index[std::min(at + t, count - 1)];
            for (int t = 0; t < TOKENS; t++) ahead[t] = index[std::min(at + TOKENS + t, count - 1)];
            auto multiply = [&](float* logits, int64_t stride) {
                in_steps<HEADS_AT_ONCE<L>>(in.heads, [&](int h, auto n) {
                    const auto* of_heads = of_pair + h * L * T::WIDTH;
                    const bool fetches = in.heads > 1 && (WIDENS ? h == 0 : L >= FETCHED);
                    auto pass = fetches ? PassInto<2>{h, WIDENS ? 1 : (int)in.heads, ahead} : NO_FETCH;
                    add_logits<T, L, n, PART>(of_heads, rows, rest, pass, 1.0f, logits + h * stride, stride);
                });
            };
            float* to = out + pair * in.heads * in.count + at;
            if (by_tiles && at + TOKENS <= count) {
                products_on_tiles<L>(words.data(), filled, in.heads, rows[0], index.row, to, in.count);
            } else if (at + TOKENS <= count) {
                multiply(to, in.count);
            } else {
                Buffer<float> last(in.heads * TOKENS);
                multiply(last.data(), TOKENS);
                for (int64_t h = 0; h < in.heads; h++)
                    std::copy_n(&last[h * TOKENS], count - at, to + h * in.count);
            }
        }
        for (int64_t h = 0; in.lses && h < in.heads; h++) {
            const float* scores = out + (pair * in.heads + h) * in.count + first;
            in.lses[(pair * in.heads + h) * chunks + task % chunks] =
                log_sum_exp(scores, std::min(in.part, count - first), (float)in.scale);
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

}  // namespace

EXPORT void row_scores(const RowScores& in) {
    in.is_bf16 ? products_of<BF16>(in.q, in, in.out) : products_of<F32>(in.q, in, in.out);
}
EXPORT int64_t is_on_tiles() { return has_tiles(); }
