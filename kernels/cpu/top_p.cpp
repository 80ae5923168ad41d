// Estimates the weights of chosen tokens by keys in 4 bits, and marks the tokens that carry a share of them.
#include <array>

#include "calls.hpp"
#include "rows.hpp"
#include "codes.hpp"

namespace {

constexpr int64_t AT_ONCE = 512;  // rows of a task

struct Bare {  // leaves a code as it is: in bf16, too, it is exact
    f32 operator()(f32 x, int) const { return x; }
};

constexpr Pass NO_FETCH{0, TOKENS + 1, nullptr};  // the rows are in L1

// Multiplies queries with rows whose decoded codes have L lines. A key is least + code * step, so its product with a query is
// step times the product of the codes, and least times the sum of the query.
template <class T, int L> void estimate(const EstimatedLogits& in) {
    using Element = typename T::Element;
    constexpr int WIDTH = L * T::WIDTH;
    const int64_t tasks = (in.count + AT_ONCE - 1) / AT_ONCE, heads = in.heads / in.lists;  // heads of a list
    Buffer<float> room;
    const auto* wide = queries<T>((const Element*)in.q, in.batch * in.groups * in.heads * WIDTH, room);
    each_task(in.batch * in.groups * in.lists * tasks, in.batch * in.groups * in.lists * in.count > AT_ONCE, [&](int64_t task) {
        const int64_t list = task / tasks, first = task % tasks * AT_ONCE, end = std::min(first + AT_ONCE, in.count);
        const int64_t pair = list / in.lists, sequence = pair / in.groups, group = pair % in.groups;
        const HeadRows codes(in.codes, in.codes_batch, in.codes_group, in.codes_token, in.codes_table, sequence, group);
        const HeadRows ranges(in.ranges, in.ranges_batch, in.ranges_group, in.ranges_token, in.ranges_table, sequence, group);
        const int64_t* rows = in.rows + list * in.count;
        const Element* q = (const Element*)in.q + list * heads * WIDTH;
        const Integers<4>::Table numbers(nullptr);
        alignas(LINE) Element decoded[TOKENS][WIDTH] = {};  // zero past a head's channels
        alignas(LINE) uint32_t halves[TOKENS] = {};
        alignas(LINE) float spans[2 * TOKENS];
        const char* block[TOKENS];
        for (int t = 0; t < TOKENS; t++) block[t] = (const char*)decoded[t];
        Buffer<float> sums(heads), products(heads * TOKENS);
        for (int64_t h = 0; h < heads; h++)
            for (int c = 0; c < WIDTH; c++) sums[h] += to_float(q[h * WIDTH + c]);
        auto fetch = [&](int64_t from) {
            for (int64_t i = from; i < std::min(from + TOKENS, end); i++) {
                for (const char* line : {codes[rows[i]], codes[rows[i]] + in.dim / 2 - 1, ranges[rows[i]]})
                    __builtin_prefetch(line, 0, 2);
            }
            asm volatile("");  // an effect: gcc 12 leaves out calls of what only prefetches
        };
        fetch(first);
        for (int64_t at = first; at < end; at += TOKENS) {
            const int count = std::min<int64_t>(TOKENS, end - at);
            fetch(at + TOKENS);
            for (int t = 0; t < count; t++) {
                decode_row<Integers<4>>(codes[rows[at + t]], in.dim, numbers, Bare{}, decoded[t]);
                std::memcpy(&halves[t], ranges[rows[at + t]], sizeof *halves);
            }
            widen_halves(halves, 2 * TOKENS, spans);
            in_steps<HEADS_AT_ONCE<L>>(heads, [&](int h, auto n) {
                add_logits<T, L, n, false>(wide + (list * heads + h) * WIDTH, block, LINE, NO_FETCH, 1.0f, &products[h * TOKENS], TOKENS);
            });
            for (int64_t h = 0; h < heads; h++) {
                float* out = in.out + (list * heads + h) * in.count + at;
                for (int t = 0; t < count; t++)
                    out[t] = products[h * TOKENS + t] * spans[2 * t + 1] + sums[h] * spans[2 * t];
            }
        }
    });
}

template <class T> void estimate(const EstimatedLogits& in) {
    switch (in.width / T::WIDTH) {
        case 1: return estimate<T, 1>(in);
        case 2: return estimate<T, 2>(in);
        case 3: return estimate<T, 3>(in);
        case 4: return estimate<T, 4>(in);
        case 6: return estimate<T, 6>(in);
        case 8: return estimate<T, 8>(in);
    }
}

inline float number_of(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

// Marks the fewest logits that, with what has the log-sum-exp `always`, carry a share `mass` of the softmax over both. A
// token is among them if it and all that weigh less are more than the others may leave out: sums from the smallest on are
// exact to more digits than what they leave of 1. Weights are sorted by their upper bits, whose order is that of the numbers,
// and then only those of the bits in which the marked ones begin.
void mark(const float* logits, int64_t count, float always, double mass, uint8_t* read) {
    constexpr uint32_t BUCKETS = 1024;
    auto bucket_of = [](uint32_t bits) { return std::min(bits >> 20, BUCKETS - 1); };  // those up to 1 have their own
    static thread_local Buffer<uint32_t> weights;
    weights.resize((count + LANES - 1) / LANES * LANES);
    std::array<double, BUCKETS> sums = {};
    const float top = std::max(always, *std::max_element(logits, logits + count));
    for (int64_t at = 0; at < count; at += LANES) {
        const int n = std::min<int64_t>(LANES, count - at);
        f32 x = splat(-INFINITY);
        std::memcpy(&x, logits + at, n * sizeof(float));
        const f32 w = exp2((x - top) * (float)M_LOG2E);
        store(&weights[at], w);
        for (int i = 0; i < n; i++) sums[bucket_of(weights[at + i])] += w[i];
    }
    const double total = std::accumulate(sums.begin(), sums.end(), (double)exp2(splat((always - top) * (float)M_LOG2E))[0]);
    const double spare = (1 - mass) * total;
    double left = 0;
    uint32_t bucket = 0;
    while (bucket < BUCKETS && !(left + sums[bucket] > spare)) left += sums[bucket++];
    std::vector<uint64_t> between;  // weights and places; of equal ones the last comes first
    for (int64_t i = 0; i < count; i++) {
        const uint32_t of = bucket_of(weights[i]);
        read[i] |= of > bucket;
        if (of == bucket) between.push_back((uint64_t)weights[i] << 32 | (uint32_t)~i);
    }
    std::sort(between.begin(), between.end());
    for (uint64_t each : between) {
        left += number_of(each >> 32);
        read[(uint32_t)~each] |= left > spare;
    }
}

}  // namespace

EXPORT void estimated_logits(const EstimatedLogits& in) { in.is_bf16 ? estimate<BF16>(in) : estimate<F32>(in); }

EXPORT void carrying(const Carrying& in) {
    each_task(in.lists, in.lists * in.heads * in.count > 1024, [&](int64_t list) {
        uint8_t* read = (uint8_t*)in.read + list * in.count;
        std::fill_n(read, in.count, 0);
        for (int64_t head = list * in.heads; head < (list + 1) * in.heads; head++)
            mark(in.logits + head * in.count, in.count, in.always[head], in.mass, read);
    });
}
