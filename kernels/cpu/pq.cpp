// Multiplies a query with all product-quantised keys (PQCache), looking the products up in a small table.
//
// A table row holds one centroid's products with all query heads of the group: one read per code serves them all.
#include "calls.hpp"
#include "simd.hpp"

namespace {

using Call = PQWeights;

// Holds W floats: the heads of a group, zero-padded.
template <int W> struct Lanes;
template <> struct Lanes<4> { typedef float Vector __attribute__((vector_size(16))); };
template <> struct Lanes<8> { typedef float Vector __attribute__((vector_size(32))); };
template <> struct Lanes<16> { typedef f32 Vector; };

template <int W> using Wide = typename Lanes<W>::Vector;

template <class V> V larger(V a, V b) {
    if constexpr (std::is_same_v<V, f32>)
        return maximum(a, b);
    else
        return a > b ? a : b;
}

// Holds the table of one KV head, in [m C] rows.
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
            const E* of_part = centroids + (pair * parts + part) * clusters * call.width;
            for (int64_t first = 0; first < clusters; first += 8) {
                Wide<W> acc[8] = {};
                const E* row[8];
                for (int i = 0; i < 8; i++) row[i] = of_part + std::min(first + i, clusters - 1) * call.width;
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

    Wide<W> largest(int64_t part) const {
        Wide<W> best = load<Wide<W>>(&rows[part * clusters * W]);
        for (int64_t c = 1; c < clusters; c++) {
            Wide<W> row = load<Wide<W>>(&rows[(part * clusters + c) * W]);
            best = larger(best, row);
        }
        return best;
    }
};

// Turns four heads of sixteen tokens from token-major to head-major.
inline void heads_apart(const float* sums, f32* heads) {
    f32 x = load<f32>(sums), y = load<f32>(sums + 16), z = load<f32>(sums + 32), w = load<f32>(sums + 48);
    f32 even_heads[] = {evens(x, y), evens(z, w)}, odd_heads[] = {odds(x, y), odds(z, w)};
    heads[0] = evens(even_heads[0], even_heads[1]), heads[2] = odds(even_heads[0], even_heads[1]);
    heads[1] = evens(odd_heads[0], odd_heads[1]), heads[3] = odds(odd_heads[0], odd_heads[1]);
}

// Multiplies a token's rows; PARTS is 0 if their number is not known at compile time.
template <int PARTS, int W, class Code> struct Product {
    const float* rows;
    int64_t parts, stride;

    Wide<W> operator()(const Code* code) const {
        Wide<W> all = load<Wide<W>>(rows + code[0] * W);
        for (int64_t part = 1; part < (PARTS ? PARTS : parts); part++)
            all *= load<Wide<W>>(rows + part * stride + code[part] * W);
        return all;
    }
};

// Computes the softmax of each head over all tokens, summed over the heads: [S] of one KV head. A token's exponential
// is the product of its centroids' exponentials, so few are computed.
template <int W, class Code> struct Weights {
    const Call& call;
    Table<W> table;
    const Code* codes;
    float scale;
    Buffer<float> powers = Buffer<float>(table.rows.size());  // e^row, relative to the largest row of each part

    void raise() {
        for (int64_t part = 0; part < table.parts; part++) {
            Wide<W> top = table.largest(part);
            for (int64_t at = part * table.clusters * W; at < (part + 1) * table.clusters * W; at += W)
                store(&powers[at], power(load<Wide<W>>(&table.rows[at]) - top));
        }
    }

    Wide<W> power(Wide<W> x) const {
        f32 all = {};
        std::memcpy(&all, &x, sizeof x);
        all = exp2(all * scale);
        return load<Wide<W>>(&all);
    }

    // Sums `weight` of every token over the heads.
    template <class F> void write(float* out, F weight) const {
        const int64_t parts = call.parts;
        for (int64_t at = 0; at < call.count; at += LANES) {
            int64_t n = std::min<int64_t>(LANES, call.count - at);
            alignas(LINE) float part[LANES * W] = {};
            const Code* code = codes + at * parts;
            for (int64_t t = 0; t < n; t++) store(part + t * W, weight(code + t * parts));
            f32 sum = {};
            if (W == 4) {
                f32 heads[4];
                heads_apart(part, heads);
                sum = heads[0] + heads[1] + heads[2] + heads[3];
            } else {
                for (int t = 0; t < LANES; t++)
                    for (int h = 0; h < W; h++) sum[t] += part[t * W + h];
            }
            std::memcpy(out + at, &sum, n * sizeof(float));
        }
    }

    template <class F> Wide<W> total(F weight) const {
        Wide<W> partial[4] = {};  // independent sums, so that none waits for another
        const int64_t parts = call.parts;
        int64_t t = 0;
        for (const Code* code = codes; t + 4 <= call.count; t += 4, code += 4 * parts)
            UNROLL for (int i = 0; i < 4; i++) partial[i] += weight(code + i * parts);
        for (; t < call.count; t++) partial[0] += weight(codes + t * parts);
        return (partial[0] + partial[1]) + (partial[2] + partial[3]);
    }

    // Computes 1 / total of each head; sets `far` if one of the totals underflows.
    Wide<W> shares(Wide<W> totals, bool& far) const {
        Wide<W> all = {};
        for (int64_t h = 0; h < call.heads; h++) far |= !(totals[h] > 0x1p-80f), all[h] = 1 / totals[h];
        return all;
    }

    // The sum of each part's maximum bounds the largest logit from above. It rarely exceeds it by so much that all
    // weights underflow; then the largest logit itself is needed, and an exponential per token.
    void run(float* out) {
        call.parts == 2 ? run_by_product<2>(out) : run_by_product<0>(out);
    }

    template <int PARTS> void run_by_product(float* out) {
        Product<PARTS, W, Code> product{powers.data(), table.parts, table.clusters * W};
        bool far = false;
        raise();
        Wide<W> share = shares(total(product), far);
        if (far) return run_far(out);
        for (int64_t at = 0; at < table.clusters * W; at += W)
            store(&powers[at], load<Wide<W>>(&powers[at]) * share);
        write(out, product);
    }

    void run_far(float* out) const {
        Wide<W> top = table.sum(codes);
        for (int64_t t = 1; t < call.count; t++) {
            Wide<W> sum = table.sum(codes + t * call.parts);
            top = larger(top, sum);
        }
        bool far = false;
        auto alone = [&](const Code* code) { return power(table.sum(code) - top); };
        Wide<W> share = shares(total(alone), far);
        write(out, [&](const Code* code) { return alone(code) * share; });
    }
};

// Returns the call of the one sequence that a pair belongs to.
Call of_sequence(const Call& call, int64_t sequence) {
    int64_t of_heads = call.groups * call.heads * call.parts * call.width, size = call.is_bf16 ? 2 : 4;
    Call one = call;
    one.q = (const char*)call.q + sequence * of_heads * size;
    if (call.counts) {
        one.centroids = (const void*)call.of_centroids[3 * sequence], one.clusters = call.sizes[sequence];
        one.codes = (const void*)call.of_codes[3 * sequence], one.count = call.counts[sequence];
    } else {
        one.centroids = (const char*)call.centroids + sequence * call.groups * call.parts * call.clusters * call.width * size;
        one.codes = (const char*)call.codes + sequence * call.groups * call.count * call.parts * call.code_bytes;
    }
    return one;
}

template <int W, class Code> void weights(const Call& call, float scale) {
    each_task(call.pairs, call.pairs * call.count > 4096, [&](int64_t pair) {
        Call one = of_sequence(call, pair / call.groups);
        if (!one.count) return;  // a free slot, which has no centroids either
        int64_t group = pair % call.groups;
        auto codes = (const Code*)one.codes + group * one.count * one.parts;
        Weights<W, Code>{one, Table<W>(one, group), codes, scale}.run(call.out + pair * call.count);
    });
}

// Calls f with the width W and an example of a code.
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

EXPORT void pq_weights(const PQWeights& call) {
    float scale = (float)call.scale * (float)M_LOG2E;
    choose(call, [&](auto w, auto code) { weights<w, decltype(code)>(call, scale); });
}
