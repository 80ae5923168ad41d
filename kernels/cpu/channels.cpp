// Multiplies a group's queries with all keys over a few channels (SparQ, RocketKV). Keys are stored one channel per row,
// so other channels are never touched.
#include "calls.hpp"
#include "rows.hpp"

namespace {

using Call = ChannelProducts;

constexpr int WIDE = 2 * LANES;  // tokens per block
constexpr int AHEAD = 8 * LINE;  // bytes: each row is a stream of its own, too many for the processor to foresee all
constexpr int MOST_HEADS = 16;

// Loads WIDE tokens of a row as two vectors: the first and second half or, in bf16, the even and the odd tokens.
inline void split(const float* x, f32* halves) { halves[0] = load<f32>(x), halves[1] = load<f32>(x + LANES); }
inline void split(const bf16* x, f32* halves) {
    u32 words = load<u32>(x);
    halves[0] = even(words), halves[1] = odd(words);
}

// Puts two such vectors back in token order.
inline void join(const float*, f32*) {}
inline void join(const bf16*, f32* halves) {
    f32 a = halves[0], b = halves[1];
    halves[0] = shuffle<0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23>(a, b);
    halves[1] = shuffle<8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31>(a, b);
}

#if defined(__AVX2__) && !defined(__AVX512F__)
using Part = f32::Register;

// Multiplies H heads with LANES tokens of every channel: two parts, as they are split, since registers hold no more sums.
template <int H, class E>
INLINE void multiply(const E* const* rows, int64_t first, int64_t channels, const float* q, Part (&sums)[H][2]) {
    Part acc[H][2] = {};
    for (int64_t c = 0; c < channels; c++) {
        const E* row = rows[c] + first;
        __builtin_prefetch((const char*)row + AHEAD);
        Part x[2];
        if constexpr (sizeof(E) == 4)
            x[0] = load<Part>(row), x[1] = load<Part>(row + f32::EACH);
        else
            BF16::widen_part(load<u32::Register>(row), x);
        UNROLL for (int i = 0; i < 2 * H; i++) acc[i / 2][i % 2] += q[i / 2 * channels + c] * x[i % 2];
    }
    UNROLL for (int i = 0; i < 2 * H; i++) sums[i / 2][i % 2] = acc[i / 2][i % 2];
}
#endif

using Block = f32[MOST_HEADS][2];  // the logits of WIDE tokens, split as above

// Reads tokens of one KV head block by block.
template <class E> struct Reader {
    const Call& call;
    int64_t pair;
    std::vector<const E*> channels;  // the first token of each
    std::vector<const E*> at;
    Buffer<E> rest;  // whole copies of rows that end inside a block

    Reader(const Call& call, int64_t pair)
        : call(call), pair(pair), channels(call.num_channels), at(call.num_channels), rest(WIDE * call.num_channels) {
        int64_t sequence = pair / call.groups;
        HeadRows x(call.x, call.x_batch, call.x_group, call.x_channel, call.table, sequence, pair % call.groups);
        for (int64_t c = 0; c < call.num_channels; c++)
            channels[c] = (const E*)x[call.channels[pair * call.num_channels + c]];
    }

    void read(int64_t first, int64_t count, Block& logits) {
        for (int64_t c = 0; c < call.num_channels; c++) {
            at[c] = channels[c] + first;
            if (count < WIDE) at[c] = std::copy_n(at[c], count, &rest[c * WIDE]) - count;
        }
        in_steps<4>(call.heads, [&](int h, auto heads) {
            constexpr int H = heads;
            const float* q = call.q + (pair * call.heads + h) * call.num_channels;
#if defined(__AVX2__) && !defined(__AVX512F__)
            for (int half = 0; half < 2; half++) {
                Part sums[H][2];
                multiply<H>(at.data(), half * LANES, call.num_channels, q, sums);
                for (int i = 0; i < 2 * H; i++) {
                    f32* to = logits[h + i / 2];
                    (sizeof(E) == 4 ? to[half].part[i % 2] : to[i % 2].part[half]) = sums[i / 2][i % 2];
                }
            }
#else
            f32 acc[H][2] = {};
            for (int64_t c = 0; c < call.num_channels; c++) {
                __builtin_prefetch((const char*)at[c] + AHEAD);
                f32 x[2];
                split(at[c], x);
                UNROLL for (int i = 0; i < H; i++) {
                    acc[i][0] += q[i * call.num_channels + c] * x[0];
                    acc[i][1] += q[i * call.num_channels + c] * x[1];
                }
            }
            std::memcpy(logits[h], acc, sizeof acc);
#endif
        });
    }
};

// Keeps a running sum of exponentials, relative to the largest exponent so far.
template <int DEGREE> struct Total {
    float top = -INFINITY;
    f32 sums = {};

    void add(f32 x) {
        if (any(x > top)) {
            float higher = largest(x);
            sums *= std::exp2(top - higher);
            top = higher;
        }
        sums += exp2<DEGREE>(x - top);
    }
#if defined(__AVX2__) && !defined(__AVX512F__)

    // From here on `top` is a whole number: then one rounding takes it off and finds the power of two.
    static constexpr float SHIFT = 12582912, LOG2E = M_LOG2E;  // sums with SHIFT are whole
    float limit = -INFINITY, shift = 0;  // the largest logit that `add_logits` takes
    f32 lowest = {};                     // which stands for smaller ones: 2^-126

    void raise(f32 logits) {
        float higher = std::max(top, std::ceil(largest(logits) * LOG2E));
        sums *= std::exp2(top - higher);
        top = higher, limit = top / LOG2E, shift = SHIFT - top, lowest = splat((top - 126) / LOG2E);
    }
    INLINE void add_logits(f32 x) {
        x = maximum(lowest, x);
        f32 power = x * LOG2E + shift, f = x * LOG2E + (shift - power);
        f32 y = splat(DEGREE == 5 ? 1.327647196e-3f : 5.517137717e-2f);  // of f from -0.5 to 0.5, as precise as `exp2`
        if (DEGREE == 5) {
            y = y * f + 9.675547325e-3f;
            y = y * f + 5.550713323e-2f;
        }
        y = y * f + (DEGREE == 5 ? 2.402211962e-1f : 2.426112114e-1f);
        y = y * f + (DEGREE == 5 ? 6.931469670e-1f : 6.932610306e-1f);
        y = y * f + (DEGREE == 5 ? 1.000000072f : 9.999280695e-1f);
        sums += (f32)((i32)y + ((i32)power << 23));
    }
#endif
    float log() const { return (top + std::log2(sum(sums))) * (float)M_LN2; }
};

// Calls f(reader, pair, part, first token, last) for each part of the tokens of each KV head, in parallel.
template <class E, class F> void each_part(const Call& call, F f) {
    each_task(call.batch * call.groups * call.parts, call.batch * call.groups * call.count > 2048, [&](int64_t task) {
        int64_t pair = task / call.parts, part = task % call.parts, first = part * call.part_size;
        int64_t count = call.counts ? call.counts[pair / call.groups] : call.count;
        Reader<E> reader(call, pair);
        f(reader, pair, part, first, std::min(first + call.part_size, count));
    });
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// Adds up the heads' logits of whole vectors of tokens, which stay in registers; returns the first token of the rest.
template <int DEGREE, class E>
WITHOUT_CALLS int64_t sums_of_whole(const Reader<E>& reader, int64_t first, int64_t last, float* out,
                                    Total<DEGREE>* totals) {
    const Call& call = reader.call;
    for (; first + LANES <= last; first += LANES) {
        f32 sum = {};
        in_steps<4>(call.heads, [&](int h, auto heads) {
            constexpr int H = heads;
            const float* q = call.q + (reader.pair * call.heads + h) * call.num_channels;
            Part logits[H][2];
            multiply<H>(reader.channels.data(), first, call.num_channels, q, logits);
            f32 x[H];
            i32 above = {};
            UNROLL for (int i = 0; i < H; i++) {
                x[i] = {{logits[i][0], logits[i][1]}};
                sum += x[i];
                above |= x[i] > totals[h + i].limit;
            }
            if (any(above))
                for (int i = 0; i < H; i++) totals[h + i].raise(x[i]);
            UNROLL for (int i = 0; i < H; i++) totals[h + i].add_logits(x[i]);
        });
        if (sizeof(E) == 2) {
            const auto low = _mm256_unpacklo_ps((__m256)sum.part[0], (__m256)sum.part[1]);
            const auto high = _mm256_unpackhi_ps((__m256)sum.part[0], (__m256)sum.part[1]);
            sum = {{(Part)_mm256_permute2f128_ps(low, high, 0x20), (Part)_mm256_permute2f128_ps(low, high, 0x31)}};
        }
        store(out + first, sum);
    }
    return first;
}
#endif

// Computes the sums over the heads, and each head's log-sum-exp of each part of the tokens.
template <class E> void sums(const Call& call) {
    constexpr int DEGREE = sizeof(E) == 4 ? 5 : 3;
    each_part<E>(call, [&](Reader<E>& reader, int64_t pair, int64_t part, int64_t first, int64_t last) {
        Block logits;
        Total<DEGREE> totals[MOST_HEADS];
        int64_t at = first;
#if defined(__AVX2__) && !defined(__AVX512F__)
        at = sums_of_whole(reader, first, last, call.sums + pair * call.count, totals);
#endif
        for (; at < last; at += WIDE) {
            int64_t n = std::min<int64_t>(WIDE, last - at);
            reader.read(at, n, logits);
            f32 sum[2] = {};
            for (int64_t h = 0; h < call.heads; h++) {
                if (n < WIDE) join((const E*)nullptr, logits[h]);
                for (int64_t t = n; t < WIDE; t++) logits[h][t / LANES][t % LANES] = -INFINITY;
                for (int i = 0; i < 2; i++) sum[i] += logits[h][i], totals[h].add(logits[h][i] * (float)M_LOG2E);
            }
            if (n == WIDE) join((const E*)nullptr, sum);
            std::memcpy(call.sums + pair * call.count + at, sum, n * sizeof(float));
        }
        for (int64_t h = 0; h < call.heads; h++)
            call.lse[(pair * call.heads + h) * call.parts + part] = first < last ? totals[h].log() : -INFINITY;
    });
}

template <class E> void scores(const Call& call) {
    each_part<E>(call, [&](Reader<E>& reader, int64_t pair, int64_t, int64_t first, int64_t last) {
        Block logits;
        for (int64_t at = first; at < last; at += WIDE) {
            int64_t n = std::min<int64_t>(WIDE, last - at);
            reader.read(at, n, logits);
            for (int64_t h = 0; h < call.heads; h++) {
                join((const E*)nullptr, logits[h]);
                std::memcpy(call.scores + (pair * call.heads + h) * call.count + at, logits[h], n * sizeof(float));
            }
        }
    });
}

}  // namespace

// Writes the sums and their log-sum-exps, or each head's scores, where these are asked for.
EXPORT void channel_products(const ChannelProducts& call) {
    if (call.scores)
        call.is_bf16 ? scores<bf16>(call) : scores<float>(call);
    else
        call.is_bf16 ? sums<bf16>(call) : sums<float>(call);
}
