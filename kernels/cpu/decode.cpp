// Attention of one token over segments of keys and values: every row read once, in place, for all heads of its group.
#include "simd.hpp"

namespace {

constexpr int TOKENS = 64;    // of a block; its keys and values fit the first cache level
constexpr int MOST_HEADS = 4;  // of a group that share one pass over a block

struct Segment {  // strides in bytes
    const char *k, *v;
    const int64_t* rows;  // null: all
    int64_t count, k_batch, k_group, k_token, v_batch, v_group, v_token;
};

struct Block {
    const char *k[TOKENS], *v[TOKENS];
    int count;
};

// What a head has seen: acc / total is its output, top the largest logit (in powers of two).
struct State {
    float top, total;
    float* acc;
};

struct F32 {
    using Element = float;
    using Vector = f32;
    static constexpr int WIDTH = 16;  // channels of a vector
    static f32 dot(f32 acc, f32 a, f32 b) { return acc + a * b; }
};

struct BF16 {
    using Element = bf16;
    using Vector = u32;
    static constexpr int WIDTH = 32;
    static f32 dot(f32 acc, u32 a, u32 b) { return dot_pairs(acc, a, b); }
};

// Logits of sixteen tokens of a block.
template <class T> f32 logits_of(const typename T::Element* q, const char* const* k, int dim) {
    f32 acc[LANES] = {};
    for (int c = 0; c < dim; c += T::WIDTH) {
        auto part = load<typename T::Vector>(q + c);
        for (int t = 0; t < LANES; t++)
            acc[t] = T::dot(acc[t], part, load<typename T::Vector>(k[t] + c * sizeof(typename T::Element)));
    }
    return sums_of(acc);
}

void fetch(const char* const* rows, int count, int bytes) {
    for (int t = 0; t < count; t++)
        for (int b = 0; b < bytes; b += 64) __builtin_prefetch(rows[t] + b);
}

// Turns logits [TOKENS] into weights under the head's running maximum; returns what its sums so far must shrink by.
float weigh(float* logits, State& state) {
    f32 v[TOKENS / LANES], best = load<f32>(logits);
    for (int i = 1; i < TOKENS / LANES; i++) best = maximum(best, load<f32>(logits + i * LANES));
    float top = std::max(state.top, largest(best));
    float shrink = exp2(splat(state.top - top))[0];
    f32 total = {};
    for (int i = 0; i < TOKENS / LANES; i++) {
        v[i] = exp2(load<f32>(logits + i * LANES) - top);
        total += v[i];
        store(logits + i * LANES, v[i]);
    }
    state.total = state.total * shrink + sum(total);
    state.top = top;
    return shrink;
}

template <int H> void add_values(F32, const Block& block, const float (*weights)[TOKENS], State* state,
                                 const float* shrink, int dim) {
    for (int c = 0; c < dim; c += LANES) {
        f32 acc[2][H] = {};
        for (int t = 0; t < TOKENS; t += 2)
            for (int odd = 0; odd < 2; odd++) {
                f32 v = load<f32>(block.v[t + odd] + c * 4);
                for (int h = 0; h < H; h++) acc[odd][h] += weights[h][t + odd] * v;
            }
        for (int h = 0; h < H; h++) {
            float* out = state[h].acc + c;
            store(out, load<f32>(out) * shrink[h] + acc[0][h] + acc[1][h]);
        }
    }
}

// Two tokens at a time: their words are mixed so that a word holds one channel of both. Within each 32 channels the
// sums of the even ones come first.
template <int H> void add_values(BF16, const Block& block, const float (*weights)[TOKENS], State* state,
                                 const float* shrink, int dim) {
    uint32_t pairs[H][TOKENS / 2];
    for (int h = 0; h < H; h++)
        for (int t = 0; t < TOKENS; t += 2 * LANES) {
            f32 a = load<f32>(weights[h] + t), b = load<f32>(weights[h] + t + LANES);
            f32 first = __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
            f32 second = __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
            store(pairs[h] + t / 2, pack(first, second));
        }
    for (int c = 0; c < dim; c += 32) {
        f32 evens[H] = {}, odds[H] = {};
        for (int t = 0; t < TOKENS; t += 2) {
            u32 a = load<u32>(block.v[t] + c * 2), b = load<u32>(block.v[t + 1] + c * 2);
            u32 low = (a & 0xffffu) | (b << 16), high = (a >> 16) | (b & 0xffff0000u);
            for (int h = 0; h < H; h++) {
                u32 w = splat(pairs[h][t / 2]);
                evens[h] = dot_pairs(evens[h], low, w);
                odds[h] = dot_pairs(odds[h], high, w);
            }
        }
        for (int h = 0; h < H; h++) {
            float* out = state[h].acc + c;
            store(out, load<f32>(out) * shrink[h] + evens[h]);
            store(out + LANES, load<f32>(out + LANES) * shrink[h] + odds[h]);
        }
    }
}

template <class T, int H>
void attend(const Block& block, const typename T::Element* q, State* state, int dim, float scale) {
    alignas(64) float logits[H][TOKENS];
    float shrink[H];
    fetch(block.v, block.count, dim * sizeof(typename T::Element));
    for (int t = 0; t < TOKENS; t += LANES)
        for (int h = 0; h < H; h++) store(logits[h] + t, logits_of<T>(q + h * dim, block.k + t, dim) * scale);
    for (int h = 0; h < H; h++) {
        for (int t = block.count; t < TOKENS; t++) logits[h][t] = NEGATIVE_INFINITY;
        shrink[h] = weigh(logits[h], state[h]);
    }
    add_values<H>(T{}, block, logits, state, shrink, dim);
}

template <class T>
void attend(const Block& block, const typename T::Element* q, State* state, int heads, int dim, float scale) {
    for (int h = 0; h < heads; h += MOST_HEADS) switch (std::min(MOST_HEADS, heads - h)) {
            case 1: attend<T, 1>(block, q + h * dim, state + h, dim, scale); break;
            case 2: attend<T, 2>(block, q + h * dim, state + h, dim, scale); break;
            case 3: attend<T, 3>(block, q + h * dim, state + h, dim, scale); break;
            default: attend<T, 4>(block, q + h * dim, state + h, dim, scale);
        }
}

struct Call {
    const Segment* segments;
    int64_t num_segments, batch, groups, heads, dim;  // heads of a group
    float scale;
};

// Tokens [first, last) of the segments in a row, for one KV head.
template <class T>
void attend_range(const Call& call, const typename T::Element* q, State* state, int64_t pair, int64_t first,
                  int64_t last) {
    int64_t b = pair / call.groups, g = pair % call.groups, begin = 0;
    for (const Segment* s = call.segments; s < call.segments + call.num_segments; begin += s->count, s++) {
        int64_t from = std::max(first - begin, int64_t{0}), to = std::min(last - begin, s->count);
        const char* k = s->k + b * s->k_batch + g * s->k_group;
        const char* v = s->v + b * s->v_batch + g * s->v_group;
        const int64_t* rows = s->rows ? s->rows + pair * s->count : nullptr;
        for (int64_t at = from; at < to; at += TOKENS) {
            Block block;
            block.count = std::min(int64_t{TOKENS}, to - at);
            for (int t = 0; t < TOKENS; t++) {  // past the end the last row again, at weight 0
                int64_t row = std::min(at + t, to - 1);
                if (rows) row = rows[row];
                block.k[t] = k + row * s->k_token;
                block.v[t] = v + row * s->v_token;
            }
            if (rows) fetch(block.k, block.count, call.dim * sizeof(typename T::Element));
            attend<T>(block, q, state, call.heads, call.dim, call.scale);
        }
    }
}

// Where channel c of a head's sums lies, see add_values.
inline int64_t place(F32, int64_t c) { return c; }
inline int64_t place(BF16, int64_t c) { return c / 32 * 32 + c % 2 * LANES + c % 32 / 2; }

inline void put(float* out, float x) { *out = x; }
inline void put(bf16* out, float x) { *out = round_to_upper_half(x) >> 16; }

// Joins the `splits` parts of one head.
template <class T> void finish(const Call& call, const State* state, int64_t splits, int64_t stride,
                               typename T::Element* out, float* lse) {
    float top = NEGATIVE_INFINITY, total = 0, share[64];
    for (int64_t i = 0; i < splits; i++) top = std::max(top, state[i * stride].top);
    for (int64_t i = 0; i < splits; i++) {
        share[i] = state[i * stride].total > 0 ? exp2(splat(state[i * stride].top - top))[0] : 0;
        total += share[i] * state[i * stride].total;
    }
    for (int64_t c = 0; c < call.dim; c++) {
        float x = 0;
        for (int64_t i = 0; i < splits; i++) x += share[i] * state[i * stride].acc[place(T{}, c)];
        put(out + c, x / total);
    }
    *lse = (top + std::log2(total)) * (float)M_LN2;
}

template <class T> void run(const Call& call, const typename T::Element* q, typename T::Element* out, float* lse) {
    int64_t pairs = call.batch * call.groups, threads = omp_get_max_threads(), tokens = 0;
    for (int64_t i = 0; i < call.num_segments; i++) tokens += call.segments[i].count;
    int64_t splits = std::min(threads / std::gcd(pairs, threads), int64_t{64});
    int64_t length = (tokens + splits - 1) / splits, tasks = pairs * splits;
    static thread_local std::vector<float> sums;
    static thread_local std::vector<State> states;
    sums.assign(tasks * call.heads * call.dim, 0.0f);
    states.resize(tasks * call.heads);
    for (int64_t i = 0; i < tasks * call.heads; i++) states[i] = {NEGATIVE_INFINITY, 0, sums.data() + i * call.dim};
    State* state = states.data();
    bool small = pairs * tokens * call.dim < 1 << 15;
#pragma omp parallel for schedule(static) if (!small)
    for (int64_t task = 0; task < tasks; task++) {
        int64_t pair = task / splits, first = task % splits * length;
        attend_range<T>(call, q + pair * call.heads * call.dim, state + task * call.heads, pair, first,
                        std::min(first + length, tokens));
    }
    for (int64_t i = 0; i < pairs * call.heads; i++)
        finish<T>(call, state + i / call.heads * splits * call.heads + i % call.heads, splits, call.heads,
                  out + i * call.dim, lse + i);
}

}  // namespace

// q and out [B H D] in rows, lse [B H]; ten numbers a segment as in struct Segment.
extern "C" void segment_attention(int is_bf16, const void* q, void* out, float* lse, const int64_t* segments,
                                  int64_t num_segments, int64_t batch, int64_t groups, int64_t heads, int64_t dim,
                                  float scale) {
    Call call{(const Segment*)segments, num_segments, batch, groups, heads, dim, scale * (float)M_LOG2E};
    if (is_bf16)
        run<BF16>(call, (const bf16*)q, (bf16*)out, lse);
    else
        run<F32>(call, (const float*)q, (float*)out, lse);
}
