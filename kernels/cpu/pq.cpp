// Product quantisation (PQCache): the products of a query with all coded keys, from a small table.
//
// A table row belongs to a centroid and holds its products with the query heads of the group side by side, so that one
// read per code serves all of them.
#include "simd.hpp"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

struct Call {
    const void *q, *centroids, *codes;  // [P g m d'], [P m C d'], [P S m]
    float* out;
    int64_t is_bf16, code_bytes, pairs, heads, parts, clusters, width, count;
};

// W floats: the heads of a group, and zeros behind them.
template <int W> struct Lanes;
template <> struct Lanes<4> { typedef float Vector __attribute__((vector_size(16))); };
template <> struct Lanes<8> { typedef float Vector __attribute__((vector_size(32))); };
template <> struct Lanes<16> { typedef float Vector __attribute__((vector_size(64))); };

template <int W> using Wide = typename Lanes<W>::Vector;

// The table of one KV head, [m C] rows.
template <int W> struct Table {
    Buffer<float> rows;
    int64_t parts, clusters;

    Table(const Call& call, int64_t pair) : rows(call.parts * call.clusters * W), parts(call.parts), clusters(call.clusters) {
        call.is_bf16 ? build((const bf16*)call.q, (const bf16*)call.centroids, call, pair)
                     : build((const float*)call.q, (const float*)call.centroids, call, pair);
    }

    template <class E> void build(const E* q, const E* centroids, const Call& call, int64_t pair) {
        Buffer<float> columns(call.width * W);
        q += pair * call.heads * parts * call.width;
        for (int64_t part = 0; part < parts; part++) {
            for (int64_t d = 0; d < call.width; d++)
                for (int64_t h = 0; h < call.heads; h++)
                    columns[d * W + h] = to_float(q[(h * parts + part) * call.width + d]);
            const E* own = centroids + (pair * parts + part) * clusters * call.width;
            for (int64_t first = 0; first < clusters; first += 8) {
                Wide<W> acc[8] = {};
                const E* row[8];
                for (int i = 0; i < 8; i++) row[i] = own + std::min(first + i, clusters - 1) * call.width;
                for (int64_t d = 0; d < call.width; d++)
                    UNROLL for (int i = 0; i < 8; i++) acc[i] += to_float(row[i][d]) * load<Wide<W>>(&columns[d * W]);
                for (int64_t i = 0; i < std::min<int64_t>(8, clusters - first); i++)
                    store(&rows[(part * clusters + first + i) * W], acc[i]);
            }
        }
    }

    template <class Code> Wide<W> sum(const Code* code) const {
        Wide<W> sum = load<Wide<W>>(&rows[code[0] * W]);
        for (int64_t part = 1; part < parts; part++) sum += load<Wide<W>>(&rows[(part * clusters + code[part]) * W]);
        return sum;
    }

    // Sixteen tokens, of which n exist, to W vectors: token by token, W heads each.
    template <class Code> void sums(const Code* code, int64_t n, float* out) const {
        for (int64_t t = 0; t < n; t++) store(out + t * W, sum(code + t * parts));
    }

    // At least as large as any token's sum.
    Wide<W> bound() const {
        Wide<W> total = {};
        for (int64_t part = 0; part < parts; part++) {
            Wide<W> best = load<Wide<W>>(&rows[part * clusters * W]);
            for (int64_t c = 1; c < clusters; c++) {
                Wide<W> row = load<Wide<W>>(&rows[(part * clusters + c) * W]);
                best = row > best ? row : best;
            }
            total += best;
        }
        return total;
    }
};

// Scores [g S] of one KV head's tokens [first, last).
template <int W, class Code> void score(const Call& call, int64_t pair, int64_t first, int64_t last) {
    Table<W> table(call, pair);
    alignas(LINE) float sums[LANES * W];
    float* out = call.out + pair * call.heads * call.count;
    const Code* codes = (const Code*)call.codes + pair * call.count * call.parts;
    for (int64_t at = first; at < last; at += LANES) {
        int64_t n = std::min<int64_t>(LANES, last - at);
        table.sums(codes + at * call.parts, n, sums);
        if (W == 4 && n == LANES) {
            f32 heads[4];
            heads_apart(sums, heads);
            for (int64_t h = 0; h < call.heads; h++) store(out + h * call.count + at, heads[h]);
        } else {
            for (int64_t h = 0; h < call.heads; h++)
                for (int64_t t = 0; t < n; t++) out[h * call.count + at + t] = sums[t * W + h];
        }
    }
}

// Softmax of each head over all tokens, summed over the heads: [S] of one KV head. The exponentials are kept, token by
// token, until their total is known.
template <int W, class Code> struct Weights {
    const Call& call;
    Table<W> table;
    const Code* codes;
    Buffer<float>& kept;  // [S W]
    float scale;
    f32 totals = {};  // by lane: heads repeat every W lanes

    static f32 repeated(Wide<W> v) {
        f32 all;
        for (int i = 0; i < LANES; i++) all[i] = v[i % W];
        return all;
    }

    void exponentials(Wide<W> top) {
        f32 tops = repeated(top) * scale;
        totals = f32{};
        for (int64_t at = 0; at < call.count; at += LANES) {
            int64_t n = std::min<int64_t>(LANES, call.count - at);
            float* to = &kept[at * W];
            table.sums(codes + at * call.parts, n, to);
            UNROLL for (int i = 0; i < W; i++) {
                f32 e = exp2(load<f32>(to + i * LANES) * scale - tops);
                if (n < LANES)
                    for (int lane = 0; lane < LANES; lane++)
                        if ((i * LANES + lane) / W >= n) e[lane] = 0;
                totals += e;
                store(to + i * LANES, e);
            }
        }
    }

    Wide<W> largest() const {
        Wide<W> best = table.sum(codes);
        for (int64_t t = 1; t < call.count; t++) {
            Wide<W> sum = table.sum(codes + t * call.parts);
            best = sum > best ? sum : best;
        }
        return best;
    }

    Wide<W> total() const {
        Wide<W> all = {};
        for (int i = 0; i < LANES; i++) all[i % W] += totals[i];
        return all;
    }

    // The bound is above the largest logit, seldom by so much that nothing is left; then the maximum itself is needed.
    void run(float* out) {
        exponentials(table.bound());
        Wide<W> all = total();
        for (int64_t h = 0; h < call.heads; h++)
            if (!(all[h] > 0x1p-100f)) {
                exponentials(largest());
                all = total();
                break;
            }
        Wide<W> share = {};
        for (int64_t h = 0; h < call.heads; h++) share[h] = 1 / all[h];
        f32 shares = repeated(share);
        for (int64_t at = 0; at < call.count; at += LANES) {
            alignas(LINE) float part[LANES * W];
            for (int i = 0; i < W; i++) store(part + i * LANES, load<f32>(&kept[at * W + i * LANES]) * shares);
            f32 sum = {};
            if (W == 4) {
                f32 heads[4];
                heads_apart(part, heads);
                sum = heads[0] + heads[1] + heads[2] + heads[3];
            } else {
                for (int t = 0; t < LANES; t++)
                    for (int h = 0; h < W; h++) sum[t] += part[t * W + h];
            }
            std::memcpy(out + at, &sum, std::min<int64_t>(LANES, call.count - at) * sizeof(float));
        }
    }
};

template <int W, class Code> void scores(const Call& call) {
    int64_t threads = omp_get_max_threads(), splits = threads / std::gcd(call.pairs, threads);
    int64_t length = (call.count + splits - 1) / splits;
#pragma omp parallel for schedule(static) if (call.pairs * call.count > 4096)
    for (int64_t task = 0; task < call.pairs * splits; task++)
        score<W, Code>(call, task / splits, task % splits * length,
                       std::min((task % splits + 1) * length, call.count));
}

template <int W, class Code> void weights(const Call& call, float scale) {
#pragma omp parallel for schedule(dynamic) if (call.pairs * call.count > 4096)
    for (int64_t pair = 0; pair < call.pairs; pair++) {
        static thread_local Buffer<float> kept;
        kept.resize(std::max<size_t>(kept.size(), (call.count + LANES) * W));
        auto codes = (const Code*)call.codes + pair * call.count * call.parts;
        Weights<W, Code>{call, Table<W>(call, pair), codes, kept, scale}.run(call.out + pair * call.count);
    }
}

// Calls f(W, an example of a code).
template <class F> void choose(const Call& call, F f) {
    auto with_width = [&](auto code) {
        if (call.heads <= 4)
            f(std::integral_constant<int, 4>{}, code);
        else if (call.heads <= 8)
            f(std::integral_constant<int, 8>{}, code);
        else
            f(std::integral_constant<int, 16>{}, code);
    };
    call.code_bytes == 1 ? with_width(uint8_t{}) : with_width(int32_t{});
}

}  // namespace

// Numbers as in struct Call. out [P g S]
EXPORT void pq_scores(const int64_t* numbers) {
    Call call;
    std::memcpy(&call, numbers, sizeof call);
    choose(call, [&](auto w, auto code) { scores<w, decltype(code)>(call); });
}

// out [P S]
EXPORT void pq_weights(const int64_t* numbers, float scale) {
    Call call;
    std::memcpy(&call, numbers, sizeof call);
    choose(call, [&](auto w, auto code) { weights<w, decltype(code)>(call, scale * (float)M_LOG2E); });
}
