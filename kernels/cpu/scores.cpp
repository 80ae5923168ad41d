// Scores of an index: what a step looks at to choose the tokens it will read. All are fp32, [B G g S].
#include "rows.hpp"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

struct Rows {  // strides in bytes
    const char* x;
    int64_t batch, groups, heads, count, row_bytes, x_batch, x_group, x_row;
};

// Every query of a group with every row of x [B G S C].
template <class T, int L, bool PART>
void products(const typename T::Element* q, const Rows& in, float* out) {
    int64_t blocks = (in.count + TOKENS - 1) / TOKENS, tasks = in.batch * in.groups * blocks;
    int rest = in.row_bytes - (L - 1) * LINE;
#pragma omp parallel for schedule(static) if (tasks > 64)
    for (int64_t task = 0; task < tasks; task++) {
        int64_t pair = task / blocks, first = task % blocks * TOKENS;
        const char* base = in.x + pair / in.groups * in.x_batch + pair % in.groups * in.x_group;
        const char *rows[TOKENS], *ahead[TOKENS];
        for (int t = 0; t < TOKENS; t++) {
            rows[t] = base + std::min(first + t, in.count - 1) * in.x_row;
            ahead[t] = base + std::min(first + t + 2 * TOKENS, in.count - 1) * in.x_row;
        }
        const auto* own = q + pair * in.heads * L * T::WIDTH;
        float* to = out + pair * in.heads * in.count + first;
        if (first + TOKENS <= in.count) {
            block_logits<T, L, PART>(own, rows, ahead, in.heads, 1.0f, to, in.count, rest);
        } else {
            Buffer<float> last(in.heads * TOKENS);
            block_logits<T, L, PART>(own, rows, ahead, in.heads, 1.0f, last.data(), TOKENS, rest);
            for (int64_t h = 0; h < in.heads; h++)
                std::copy_n(&last[h * TOKENS], in.count - first, to + h * in.count);
        }
    }
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

typedef uint16_t u16 __attribute__((vector_size(32)));

// Sixteen values of a channel's row, as fp32.
inline f32 values(const float* x) { return load<f32>(x); }
inline f32 values(const bf16* x) { return (f32)(__builtin_convertvector(load<u16>(x), u32) << 16); }

constexpr int WIDE = 2 * LANES;  // tokens at a time

// H heads with the first 32 tokens of the chosen channels' rows.
template <class E, int H>
void channel_block(const float* q, const E* const* rows, int64_t channels, float* out, int64_t stride) {
    f32 acc[H][2] = {};
    for (int64_t c = 0; c < channels; c++) {
        __builtin_prefetch((const char*)rows[c] + 8 * LINE);
        f32 a = values(rows[c]), b = values(rows[c] + LANES);
        UNROLL for (int h = 0; h < H; h++) {
            acc[h][0] += q[h * channels + c] * a;
            acc[h][1] += q[h * channels + c] * b;
        }
    }
    for (int h = 0; h < H; h++) std::memcpy(out + h * stride, acc[h], sizeof acc[h]);
}

template <class E>
void by_channel(const float* q, const E* x, const int64_t* channels, float* out, int64_t batch, int64_t groups,
                int heads, int64_t count, int64_t num_channels, int64_t x_batch, int64_t x_group, int64_t x_row) {
    int64_t chunk = 4096, chunks = (count + chunk - 1) / chunk;
#pragma omp parallel for schedule(static) if (batch * groups * count > 4096)
    for (int64_t task = 0; task < batch * groups * chunks; task++) {
        int64_t pair = task / chunks, first = task % chunks * chunk, last = std::min(first + chunk, count);
        const E* base = x + pair / groups * x_batch + pair % groups * x_group;
        const int64_t* chosen = channels + pair * num_channels;
        const float* own = q + pair * heads * num_channels;
        std::vector<const E*> rows(num_channels);
        Buffer<E> rest;
        Buffer<float> end(WIDE * heads);
        for (int64_t at = first; at < last; at += WIDE) {
            bool whole = at + WIDE <= last;
            if (!whole) rest.assign(WIDE * num_channels, 0);  // the rows end here: copies of full length
            for (int64_t c = 0; c < num_channels; c++) {
                rows[c] = base + chosen[c] * x_row + at;
                if (!whole) rows[c] = std::copy_n(rows[c], last - at, &rest[c * WIDE]) - (last - at);
            }
            float* to = whole ? out + pair * heads * count + at : end.data();
            int64_t stride = whole ? count : WIDE;
            in_steps<4>(heads, [&](int h, auto n) {
                channel_block<E, n>(own + h * num_channels, rows.data(), num_channels, to + h * stride, stride);
            });
            if (!whole)
                for (int h = 0; h < heads; h++)
                    std::copy_n(&end[h * WIDE], last - at, out + (pair * heads + h) * count + at);
        }
    }
}

template <int W> struct Lanes;
template <> struct Lanes<4> { typedef float Vector __attribute__((vector_size(16))); };
template <> struct Lanes<8> { typedef float Vector __attribute__((vector_size(32))); };
template <> struct Lanes<16> { typedef float Vector __attribute__((vector_size(64))); };

// A table row per centroid, W heads wide: its products with the heads' sub-vectors.
template <int W, class E> void pq_table(const E* q, const E* centroids, int heads, int parts, int clusters, int width,
                                        float* table) {
    using Wide = typename Lanes<W>::Vector;
    for (int part = 0; part < parts; part++) {
        Buffer<float> columns(width * W);
        for (int d = 0; d < width; d++)
            for (int h = 0; h < heads; h++) columns[d * W + h] = to_float(q[(h * parts + part) * width + d]);
        for (int first = 0; first < clusters; first += 8) {
            Wide acc[8] = {};
            const E* rows[8];
            for (int i = 0; i < 8; i++) rows[i] = centroids + (part * clusters + std::min(first + i, clusters - 1)) * width;
            for (int d = 0; d < width; d++)
                UNROLL for (int i = 0; i < 8; i++) acc[i] += to_float(rows[i][d]) * load<Wide>(&columns[d * W]);
            for (int i = 0; i < std::min(8, clusters - first); i++)
                store(table + (part * clusters + first + i) * W, acc[i]);
        }
    }
}

// Sixteen tokens, W sums each, to a row per head.
template <int W> void spread(const float* sums, float* out, int heads, int64_t stride, int n) {
    if (W == 4 && n == LANES) {
        f32 x = load<f32>(sums), y = load<f32>(sums + 16), z = load<f32>(sums + 32), w = load<f32>(sums + 48);
#define PAIR(a, b, h) \
    __builtin_shufflevector(a, b, h, h + 4, h + 8, h + 12, h + 16, h + 20, h + 24, h + 28, h + 1, h + 5, h + 9, h + 13, \
                            h + 17, h + 21, h + 25, h + 29)
        f32 low[2] = {PAIR(x, y, 0), PAIR(z, w, 0)}, high[2] = {PAIR(x, y, 2), PAIR(z, w, 2)};
#undef PAIR
        for (int h = 0; h < heads; h++) {
            f32 a = h < 2 ? low[0] : high[0], b = h < 2 ? low[1] : high[1];
            store(out + h * stride,
                  h % 2 ? __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31)
                        : __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23));
        }
        return;
    }
    for (int h = 0; h < heads; h++)
        for (int t = 0; t < n; t++) out[h * stride + t] = sums[t * W + h];
}

template <int W, class E, class Code>
void pq_pair(const E* q, const E* centroids, const Code* codes, float* out, int heads, int parts, int clusters,
             int width, int64_t first, int64_t last, int64_t count) {
    using Wide = typename Lanes<W>::Vector;
    Buffer<float> table(parts * clusters * W);
    pq_table<W>(q, centroids, heads, parts, clusters, width, table.data());
    alignas(LINE) float sums[LANES * W];
    for (int64_t at = first; at < last; at += LANES) {
        int n = std::min<int64_t>(LANES, last - at);
        const Code* code = codes + at * parts;
        for (int t = 0; t < n; t++, code += parts) {
            Wide sum = load<Wide>(table.data() + code[0] * W);
            for (int part = 1; part < parts; part++)
                sum += load<Wide>(table.data() + (part * clusters + code[part]) * W);
            store(sums + t * W, sum);
        }
        spread<W>(sums, out + at, heads, count, n);
    }
}

template <int W, class E, class Code>
void pq(const E* q, const E* centroids, const Code* codes, float* out, int64_t pairs, int heads, int parts,
        int clusters, int width, int64_t count) {
    int64_t splits = omp_get_max_threads() / std::gcd(pairs, (int64_t)omp_get_max_threads());
    int64_t length = (count + splits - 1) / splits;
#pragma omp parallel for schedule(static) if (pairs * count > 4096)
    for (int64_t task = 0; task < pairs * splits; task++) {
        int64_t pair = task / splits, first = task % splits * length;
        pq_pair<W>(q + pair * heads * parts * width, centroids + pair * parts * clusters * width,
                   codes + pair * count * parts, out + pair * heads * count, heads, parts, clusters, width, first,
                   std::min(first + length, count), count);
    }
}

template <class E, class Code, class... Rest>
void pq(const void* q, const void* centroids, const void* codes, float* out, int64_t pairs, int heads, Rest... rest) {
    auto run = [&](auto w) {
        pq<w>((const E*)q, (const E*)centroids, (const Code*)codes, out, pairs, heads, rest...);
    };
    if (heads <= 4)
        run(std::integral_constant<int, 4>{});
    else if (heads <= 8)
        run(std::integral_constant<int, 8>{});
    else
        run(std::integral_constant<int, 16>{});
}

}  // namespace

// q [B G g C] without gaps, C filled up to whole lines with zeros; numbers as in struct Rows.
EXPORT void row_scores(int is_bf16, const void* q, const int64_t* numbers, float* out) {
    Rows in;
    std::memcpy(&in, numbers, sizeof in);
    is_bf16 ? products_of<BF16>(q, in, out) : products_of<F32>(q, in, out);
}

// q [B G g r] in fp32 without gaps, channels [B G r]; x [B G D S], strides in elements.
EXPORT void channel_scores(int is_bf16, const float* q, const void* x, const int64_t* channels, float* out,
                           int64_t batch, int64_t groups, int64_t heads, int64_t count, int64_t num_channels,
                           int64_t x_batch, int64_t x_group, int64_t x_row) {
    if (is_bf16)
        by_channel(q, (const bf16*)x, channels, out, batch, groups, heads, count, num_channels, x_batch, x_group, x_row);
    else
        by_channel(q, (const float*)x, channels, out, batch, groups, heads, count, num_channels, x_batch, x_group,
                   x_row);
}

// q [B G g m d'], centroids [B G m C d'], codes [B G S m] of one byte or four, all without gaps.
EXPORT void pq_scores(int is_bf16, int code_bytes, const void* q, const void* centroids, const void* codes, float* out,
                      int64_t pairs, int64_t heads, int64_t parts, int64_t clusters, int64_t width, int64_t count) {
    auto run = is_bf16 ? (code_bytes == 1 ? pq<bf16, uint8_t, int, int, int, int64_t>
                                          : pq<bf16, int32_t, int, int, int, int64_t>)
                       : (code_bytes == 1 ? pq<float, uint8_t, int, int, int, int64_t>
                                          : pq<float, int32_t, int, int, int, int64_t>);
    run(q, centroids, codes, out, pairs, heads, parts, clusters, width, count);
}
