// Multiplies a group's queries with all keys over a few channels (SparQ). Keys are stored one channel per row, so other
// channels are never touched.
#include "calls.hpp"
#include "rows.hpp"

namespace {

constexpr int WIDE = 2 * LANES;   // tokens per block
constexpr int64_t CHUNK = 4096;   // tokens per task
constexpr int MOST_HEADS = 16;

using Call = ChannelSums;

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
    halves[0] = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    halves[1] = __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}

using Block = f32[MOST_HEADS][2];

// Reads tokens [first, last) of one KV head block by block.
template <class E> struct Reader {
    const Call& call;
    int64_t pair;
    std::vector<const E*> rows;
    Buffer<E> rest;  // whole copies of rows that end inside a block

    Reader(const Call& call, int64_t pair)
        : call(call), pair(pair), rows(call.num_channels), rest(WIDE * call.num_channels) {}

    void read(int64_t at, int64_t n, Block& logits) {
        int64_t sequence = pair / call.groups, group = pair % call.groups, channel = call.x_channel;
        const char* base = (const char*)call.x + sequence * call.x_batch + group * call.x_group;
        if (const int64_t* table = call.table ? call.table + 3 * sequence : nullptr)
            base = (const char*)table[0] + group * table[1], channel = table[2];
        for (int64_t c = 0; c < call.num_channels; c++) {
            rows[c] = (const E*)(base + call.channels[pair * call.num_channels + c] * channel) + at;
            if (n < WIDE) rows[c] = std::copy_n(rows[c], n, &rest[c * WIDE]) - n;
        }
        in_steps<4>(call.heads, [&](int h, auto heads) {
            constexpr int H = heads;
            const float* q = call.q + (pair * call.heads + h) * call.num_channels;
            f32 acc[H][2] = {};
            for (int64_t c = 0; c < call.num_channels; c++) {
                __builtin_prefetch((const char*)rows[c] + 8 * LINE);
                f32 x[2];
                split(rows[c], x);
                UNROLL for (int i = 0; i < H; i++) {
                    acc[i][0] += q[i * call.num_channels + c] * x[0];
                    acc[i][1] += q[i * call.num_channels + c] * x[1];
                }
            }
            std::memcpy(logits[h], acc, sizeof acc);
        });
    }
};

// Calls f(reader, pair, chunk, first token, last) for every task, in parallel.
template <class E, class F> void tasks(const Call& call, F f) {
    int64_t chunks = (call.count + CHUNK - 1) / CHUNK;
    int64_t pairs = call.batch * call.groups;
    each_task(pairs * chunks, pairs * call.count > CHUNK, [&](int64_t task) {
        int64_t chunk = task % chunks;
        Reader<E> reader(call, task / chunks);
        int64_t pair = task / chunks, count = call.counts ? call.counts[pair / call.groups] : call.count;
        f(reader, pair, chunk, chunk * CHUNK, std::min((chunk + 1) * CHUNK, count));
    });
}

// Keeps a running sum of exponentials, relative to the largest exponent so far.
struct Total {
    float top = -INFINITY;
    f32 sums = {};

    void add(f32 x) {
        if (any(x > top)) {
            float higher = largest(x);
            sums *= std::exp2(top - higher);
            top = higher;
        }
        sums += exp2(x - top);
    }
    float log2() const { return top + std::log2(sum(sums)); }
};

// Computes the sums over the heads, and each head's log-sum-exp.
template <class E> void sums(const Call& call) {
    int64_t chunks = (call.count + CHUNK - 1) / CHUNK, pairs = call.batch * call.groups;
    Buffer<float> logs(pairs * chunks * call.heads);
    tasks<E>(call, [&](Reader<E>& reader, int64_t pair, int64_t chunk, int64_t first, int64_t last) {
        Block logits;
        Total totals[MOST_HEADS];
        for (int64_t at = first; at < last; at += WIDE) {
            int64_t n = std::min<int64_t>(WIDE, last - at);
            reader.read(at, n, logits);
            f32 sum[2] = {};
            for (int64_t h = 0; h < call.heads; h++) {
                if (n < WIDE) join((const E*)nullptr, logits[h]);
                for (int64_t t = n; t < WIDE; t++) logits[h][t / LANES][t % LANES] = -INFINITY;
                for (int i = 0; i < 2; i++) sum[i] += logits[h][i], totals[h].add(logits[h][i] * (float)M_LOG2E);
            }
            if (n == WIDE) join((const E*)nullptr, sum);
            std::memcpy(call.out + pair * call.count + at, sum, n * sizeof(float));
        }
        for (int64_t h = 0; h < call.heads; h++) logs[(pair * chunks + chunk) * call.heads + h] = totals[h].log2();
    });
    for (int64_t i = 0; i < pairs * call.heads; i++) {
        const float* log = &logs[i / call.heads * chunks * call.heads + i % call.heads];
        float top = -INFINITY, total = 0;
        for (int64_t chunk = 0; chunk < chunks; chunk++) top = std::max(top, log[chunk * call.heads]);
        for (int64_t chunk = 0; chunk < chunks; chunk++) total += std::exp2(log[chunk * call.heads] - top);
        call.lse[i] = (top + std::log2(total)) * (float)M_LN2;
    }
}

// Stores each head's scores.
template <class E> void scores(const Call& call) {
    tasks<E>(call, [&](Reader<E>& reader, int64_t pair, int64_t, int64_t first, int64_t last) {
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

EXPORT void channel_scores(const ChannelSums& call) { call.is_bf16 ? scores<bf16>(call) : scores<float>(call); }
EXPORT void channel_sums(const ChannelSums& call) { call.is_bf16 ? sums<bf16>(call) : sums<float>(call); }
