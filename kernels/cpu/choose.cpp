// Turns logits into the tokens that a step reads: softmax over the candidates, one weight per KV head, then top-k.
#include "calls.hpp"
#include "simd.hpp"

namespace {

inline f32 tail(const float* x, int64_t n, float filler) {
    f32 v = splat(filler);
    std::memcpy(&v, x, n * sizeof *x);
    return v;
}

// Writes the first n lanes.
inline void put(float* to, f32 v, int64_t n) { n == LANES ? store(to, v) : (void)std::memcpy(to, &v, n * sizeof *to); }

// Calls f(at, vector) for all of x[count]; the last vector is padded.
template <class F> inline void over(const float* x, int64_t count, float filler, F f) {
    int64_t at = 0;
    for (; at + LANES <= count; at += LANES) f(at, load<f32>(x + at));
    if (at < count) f(at, tail(x + at, count - at, filler));
}

struct Softmax {
    float scale, top, inverse;
    f32 weights(f32 logits) const { return exp2(logits * scale - top) * inverse; }
};

WITHOUT_CALLS Softmax softmax(const float* x, int64_t count, float scale) {
    f32 best = splat(-INFINITY), total = {};
    over(x, count, -INFINITY, [&](int64_t, f32 v) { best = maximum(best, v); });
    float top = largest(best) * scale;
    over(x, count, -INFINITY, [&](int64_t, f32 v) { total += exp2(v * scale - top); });
    return {scale, top, 1 / sum(total)};
}

// A head's logits are `row` entries apart from the next one's, and `count` of them are there.
template <bool LARGEST>
WITHOUT_CALLS void weigh(const float* x, float* out, int heads, int64_t row, int64_t count, float scale) {
    std::vector<Softmax> head(heads);
    for (int h = 0; h < heads; h++) head[h] = softmax(x + h * row, count, scale);
    for (int64_t at = 0; at < count; at += LANES) {
        int64_t n = std::min<int64_t>(LANES, count - at);
        f32 all = {};
        for (int h = 0; h < heads; h++) {
            const float* from = x + h * row + at;
            f32 w = head[h].weights(n == LANES ? load<f32>(from) : tail(from, n, -INFINITY));
            all = LARGEST ? maximum(all, w) : all + w;
        }
        put(out + at, all, n);
    }
}

// Computes how far each of the first `candidates` lies below a head's largest logit; returns how many lie within
// `reach`.
WITHOUT_CALLS int64_t margins(const float* x, float* out, int heads, int64_t count, int64_t candidates, float reach) {
    std::vector<float> top(heads);
    for (int h = 0; h < heads; h++) {
        f32 best = splat(-INFINITY);
        over(x + h * count, count, -INFINITY, [&](int64_t, f32 v) { best = maximum(best, v); });
        top[h] = largest(best);
    }
    i32 hits = {};
    for (int64_t at = 0; at < candidates; at += LANES) {
        int64_t n = std::min<int64_t>(LANES, candidates - at);
        f32 nearest = splat(-INFINITY);
        for (int h = 0; h < heads; h++) {
            const float* from = x + h * count + at;
            nearest = maximum(nearest, (n == LANES ? load<f32>(from) : tail(from, n, NAN)) - top[h]);
        }
        hits -= nearest >= -reach;
        put(out + at, nearest, n);
    }
    int64_t total = 0;
    for (int i = 0; i < LANES; i++) total += hits[i];
    return total;
}

// Maps a float to an integer of the same order, both zeros to the same; NaN sorts above everything.
inline u32 order(f32 x) {
    u32 bits = (u32)(x + 0.0f);
    return bits ^ ((u32)((i32)bits >> 31) | 0x80000000u);
}
inline uint32_t order(float x) {
    uint32_t bits;
    x += 0.0f;
    std::memcpy(&bits, &x, 4);
    return bits ^ ((uint32_t)((int32_t)bits >> 31) | 0x80000000u);
}

// From here on little branches on data: half of the branches would be mispredicted.

#if defined(__AVX2__) && !defined(__AVX512F__)
// Holds the numbers of the lanes that each pattern of eight bits selects.
struct SelectedLanes {
    uint8_t lanes[256][8];
    constexpr SelectedLanes() : lanes() {
        for (int bits = 0; bits < 256; bits++)
            for (int i = 0, n = 0; i < 8; i++)
                if (bits >> i & 1) lanes[bits][n++] = i;
    }
};
constexpr SelectedLanes LANES_OF;
#endif

// Stores the lanes of v that `bits` selects, one behind the other; what follows them to a whole vector is overwritten.
inline void store_packed(void* to, u32 v, int bits) {
#if defined(__AVX512F__)
    store(to, (u32)_mm512_maskz_compress_epi32(bits, (__m512i)v));
#elif defined(__AVX2__)
    for (int i = 0; i < 2; i++, bits >>= 8) {
        const __m256i lanes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)LANES_OF.lanes[bits & 0xff]));
        _mm256_storeu_si256((__m256i*)to, _mm256_permutevar8x32_epi32((__m256i)v.part[i], lanes));
        to = (uint32_t*)to + __builtin_popcount(bits & 0xff);
    }
#else
    for (auto at = (uint32_t*)to; bits; bits &= bits - 1) *at++ = v[__builtin_ctz(bits)];
#endif
}

// Finds the k-th largest of keys[count] bit by bit from the top; needs room for a vector of zeros past the end.
uint32_t kth_largest(uint32_t* keys, int64_t count, int64_t k) {
    std::fill_n(keys + count, LANES, 0);
    uint32_t kth = 0;
    for (uint32_t bit = 1u << 31; bit; bit >>= 1) {
        i32 reached = {};
        for (int64_t i = 0; i < count; i += LANES) reached -= load<u32>(keys + i) >= (kth | bit);
        int64_t total = 0;
        for (int i = 0; i < LANES; i++) total += reached[i];
        if (total >= k) kth |= bit;
    }
    return kth;
}

// Collects the keys of x[count] that are at least `least`, with their positions; returns how many there are.
int64_t collect(const float* x, int64_t count, uint32_t least, uint32_t* keys, int32_t* places) {
    int64_t kept = 0;
    const u32 place = (u32)numbers();
    over(x, count, 0, [&](int64_t at, f32 v) {
        u32 key = order(v);
        uint32_t hits = bits_of(key >= least);
        if (at + LANES > count) hits &= (1 << (count - at)) - 1;
        store_packed(keys + kept, key, hits);
        store_packed(places + kept, place + (uint32_t)at, hits);
        kept += __builtin_popcount(hits);
    });
    return kept;
}

// Estimates a lower bound on the k-th largest key from a sample of x; 0 where k is too large a share for that.
uint32_t guess(const float* x, int64_t count, int64_t k) {
    int64_t size = std::min<int64_t>(1024, count / 8), stride = size ? count / size : 0;
    double expected = (double)k / count * size;
    int64_t rank = expected + 3 * std::sqrt(expected) + 2;
    if (rank >= size) return 0;
    uint32_t sample[1024 + LANES];
    for (int64_t i = 0; i < size; i++) sample[i] = order(x[i * stride + (i * 7919) % stride]);
    return kth_largest(sample, size, rank + 1);
}

// Holds a thread's scratch space, which is kept between calls.
struct Candidates {
    Buffer<uint32_t> keys;
    Buffer<int32_t> places, chosen;

    void fit(size_t count) {
        if (keys.size() < count) keys.resize(count), places.resize(count), chosen.resize(count);
    }
};

// Finds the k largest of x; of equal ones the earlier.
void largest_of(const float* x, int64_t count, int64_t k, int64_t* out) {
    static thread_local Candidates all;
    all.fit(count + LANES);  // a whole vector may be written past the end
    uint32_t* keys = all.keys.data();
    int32_t *places = all.places.data(), *chosen = all.chosen.data();
    int64_t size = collect(x, count, guess(x, count, k), keys, places);
    if (size < k) size = collect(x, count, 0, keys, places);
    uint32_t last = kth_largest(keys, size, k);
    int64_t filled = 0;
    for (int64_t i = 0; i < size; i++) chosen[filled] = places[i], filled += keys[i] > last;
    for (int64_t i = 0; filled < k; i++) chosen[filled] = places[i], filled += keys[i] == last;
    for (int64_t i = 0; i < k; i++) out[i] = chosen[i];
}

// Finds for each of x[count] the place of the first that equals it, by a table of places.
void first_of_equals(const int64_t* x, int64_t count, int64_t* out) {
    static thread_local std::vector<int32_t> table;
    int bits = 1;
    while (1ll << bits < 2 * count) bits++;
    table.assign(1ll << bits, -1);
    for (int64_t i = 0; i < count; i++) {
        uint64_t at = (uint64_t)x[i] * 0x9E3779B97F4A7C15u >> (64 - bits);
        while (table[at] >= 0 && x[table[at]] != x[i]) at = (at + 1) & (table.size() - 1);
        if (table[at] < 0) table[at] = i;
        out[i] = table[at];
    }
}

}  // namespace

EXPORT void first_places(const FirstPlaces& call) {
    each_task(call.lists, call.lists * call.count > 4096, [&](int64_t list) {
        first_of_equals(call.rows + list * call.count, call.count, call.out + list * call.count);
    });
}

EXPORT void group_weights(const GroupWeights& call) {
    float scale = (float)call.scale * (float)M_LOG2E;
    int64_t of_pair = call.heads * call.count;
    each_task(call.pairs, call.pairs * of_pair > 4096, [&](int64_t pair) {
        int64_t count = call.counts ? call.counts[pair / call.groups] : call.count;
        (call.largest ? weigh<true> : weigh<false>)(call.logits + pair * of_pair, call.out + pair * call.count,
                                                    call.heads, call.count, count, scale);
    });
}

EXPORT void group_margins(const GroupMargins& call) {
    int64_t of_pair = call.heads * call.count;
    each_task(call.pairs, call.pairs * of_pair > 4096, [&](int64_t pair) {
        int64_t candidates = call.of_each ? call.of_each[pair / call.groups] : call.candidates;
        call.counts[pair] = margins(call.logits + pair * of_pair, call.out + pair * call.candidates, call.heads,
                                    call.count, candidates, call.reach);
    });
}

// Finds the k largest of each row, in no particular order.
EXPORT void top_k(const TopK& call) {
    each_task(call.rows, call.rows * call.count > 8192, [&](int64_t row) {
        int64_t sequence = row / call.lists;
        int64_t count = call.counts ? call.counts[sequence] : call.count, k = call.ks ? call.ks[sequence] : call.k;
        if (k > 0) largest_of(call.scores + row * call.stride, count, k, call.out + row * call.k);
        std::fill(call.out + row * call.k + k, call.out + (row + 1) * call.k, 0);
    });
}
