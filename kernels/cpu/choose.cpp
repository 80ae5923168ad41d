// From logits to the tokens a step reads: softmax over the candidates, one weight per KV head, the largest of them.
#include "simd.hpp"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

inline f32 tail(const float* x, int64_t n, float filler) {
    f32 v = splat(filler);
    std::memcpy(&v, x, n * sizeof *x);
    return v;
}

// Calls f(at, vector) for all of x[count], the last vector filled up.
template <class F> inline void over(const float* x, int64_t count, float filler, F f) {
    int64_t at = 0;
    for (; at + LANES <= count; at += LANES) f(at, load<f32>(x + at));
    if (at < count) f(at, tail(x + at, count - at, filler));
}

struct Softmax {
    float scale, top, inverse;
    float log() const { return (top - std::log2(inverse)) * (float)M_LN2; }  // of the sum of exponentials
    f32 weights(f32 logits) const { return exp2(logits * scale - top) * inverse; }
};

Softmax softmax(const float* x, int64_t count, float scale) {
    f32 best = splat(-INFINITY), total = {};
    over(x, count, -INFINITY, [&](int64_t, f32 v) { best = maximum(best, v); });
    float top = largest(best) * scale;
    over(x, count, -INFINITY, [&](int64_t, f32 v) { total += exp2(v * scale - top); });
    return {scale, top, 1 / sum(total)};
}

template <bool LARGEST> void weigh(const float* x, float* out, int heads, int64_t count, float scale) {
    std::vector<Softmax> head(heads);
    for (int h = 0; h < heads; h++) head[h] = softmax(x + h * count, count, scale);
    for (int64_t at = 0; at < count; at += LANES) {
        int64_t n = std::min<int64_t>(LANES, count - at);
        f32 all = {};
        for (int h = 0; h < heads; h++) {
            const float* from = x + h * count + at;
            f32 w = head[h].weights(n == LANES ? load<f32>(from) : tail(from, n, -INFINITY));
            all = LARGEST ? maximum(all, w) : all + w;
        }
        std::memcpy(out + at, &all, n * sizeof(float));
    }
}

// A float as a number that orders like it; NaN comes above all.
inline u32 order(u32 bits) { return bits ^ ((u32)((i32)bits >> 31) | 0x80000000u); }
inline uint32_t order(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits ^ ((uint32_t)((int32_t)bits >> 31) | 0x80000000u);
}

struct Found {
    uint32_t key;
    int32_t index;
};

// Appends the indices and keys of x[count] with key >= least.
void collect(const float* x, int64_t count, uint32_t least, std::vector<Found>& found) {
    for (int64_t at = 0; at < count; at += LANES) {
        int n = std::min<int64_t>(LANES, count - at);
        u32 keys = order((u32)(n == LANES ? load<f32>(x + at) : tail(x + at, n, 0)));
        i32 hits = keys >= least;
        if (!any(hits)) continue;
        for (int i = 0; i < n; i++)
            if (hits[i]) found.push_back({keys[i], (int32_t)(at + i)});
    }
}

// The k largest of x: a histogram of the keys' upper bits tells which of them can be among these.
void largest_of(const float* x, int64_t count, int64_t k, int64_t* out) {
    constexpr int BITS = 11, BINS = 1 << BITS;
    uint32_t bins[4][BINS] = {};  // four, so that equal neighbours do not wait for each other
    int64_t at = 0;
    for (; at + LANES <= count; at += LANES) {
        u32 keys = order((u32)load<f32>(x + at)) >> (32 - BITS);
        UNROLL for (int i = 0; i < LANES; i++) bins[i % 4][keys[i]]++;
    }
    for (; at < count; at++) bins[0][order(x[at]) >> (32 - BITS)]++;
    int64_t above = 0, bin = BINS;
    while (above < k) {
        bin--;
        above += bins[0][bin] + bins[1][bin] + bins[2][bin] + bins[3][bin];
    }
    std::vector<Found> found;
    found.reserve(above);
    collect(x, count, (uint32_t)bin << (32 - BITS), found);
    std::nth_element(found.begin(), found.begin() + k - 1, found.end(), [](Found a, Found b) {
        return a.key > b.key || (a.key == b.key && a.index < b.index);
    });
    for (int64_t i = 0; i < k; i++) out[i] = found[i].index;
}

}  // namespace

// The log of the sum of exponentials of each row
EXPORT void log_sum_exp(const float* logits, float* out, int64_t rows, int64_t count, float scale) {
#pragma omp parallel for schedule(dynamic) if (rows * count > 4096)
    for (int64_t row = 0; row < rows; row++)
        out[row] = softmax(logits + row * count, count, scale * (float)M_LOG2E).log();
}

// logits [P g S] -> weights [P S]
EXPORT void group_weights(const float* logits, float* out, int64_t pairs, int64_t heads, int64_t count, float scale,
                          int largest) {
#pragma omp parallel for schedule(dynamic) if (pairs * heads * count > 4096)
    for (int64_t pair = 0; pair < pairs; pair++)
        (largest ? weigh<true> : weigh<false>)(logits + pair * heads * count, out + pair * count, heads, count,
                                               scale * (float)M_LOG2E);
}

// Rows of scores `stride` apart -> indices [rows k], in no order
EXPORT void top_k(const float* scores, int64_t* out, int64_t rows, int64_t count, int64_t stride, int64_t k) {
#pragma omp parallel for schedule(dynamic) if (rows * count > 8192)
    for (int64_t row = 0; row < rows; row++) largest_of(scores + row * stride, count, k, out + row * k);
}
