// Attends from one token to blocks of rows under a running softmax: what reads rows in place (decode.cpp) and what decodes
// them first (coded.cpp) share. The tokens of a sequence are cut into parts, which threads take one by one.
#pragma once
#include "rows.hpp"

namespace {

constexpr int HEADS = 8;                     // heads of a group that are taken at once
constexpr int64_t TASKS = 64, FEWEST = 512;  // parts that all rows are cut into; the fewest rows of a part

struct Block {
    const char *k[TOKENS], *v[TOKENS];
    float added[TOKENS];  // log-weights, times log2(e)
    int count;
};

// Keeps the running softmax of a head: its output is acc / sum(totals).
struct State {
    float top;   // the largest logit
    f32 totals;  // sum of the weights, per lane
    float* acc;  // [D], in an order of the reader's own
};

// Raises the largest logit, which is rare after the first blocks.
__attribute__((noinline)) inline void raise(const float* logits, State& state, int dim) {
    f32 best = load<f32>(logits);
    for (int t = LANES; t < TOKENS; t += LANES) best = maximum(best, load<f32>(logits + t));
    float top = largest(best), shrink = exp2(splat(state.top - top))[0];
    state.top = top;
    state.totals *= shrink;
    for (int c = 0; c < dim; c += LANES) store(state.acc + c, load<f32>(state.acc + c) * shrink);
}

// Turns the logits of a block into weights.
inline void weigh(float* logits, State& state, int dim) {
    i32 above = {};
    for (int t = 0; t < TOKENS; t += LANES) above |= load<f32>(logits + t) > state.top;
    if (any(above)) raise(logits, state, dim);
    for (int t = 0; t < TOKENS; t += LANES) {
        f32 w = exp2(load<f32>(logits + t) - state.top);
        state.totals += w;
        store(logits + t, w);
    }
}

// Merges the parts of one head, `stride` states apart, into the first. Returns the sum that its values are to be divided
// by, and writes the log-sum-exp where one is wanted.
inline float join(State* state, int64_t parts, int64_t stride, int64_t dim, float* lse) {
    float top = -INFINITY, total = 0;
    for (int64_t i = 0; i < parts; i++) top = std::max(top, state[i * stride].top);
    for (int64_t i = 0; i < parts; i++) {
        State& part = state[i * stride];
        float share = part.top == -INFINITY ? 0 : std::exp2(part.top - top);
        total += share * sum(part.totals);
        for (int64_t c = 0; c < dim; c += LANES) {
            f32 scaled = load<f32>(part.acc + c) * share;
            store(state->acc + c, i ? load<f32>(state->acc + c) + scaled : scaled);
        }
    }
    if (lse) *lse = (top + std::log2(total)) * (float)M_LN2;
    return total;
}

#if !defined(__AVX512F__)
template <class T, int L, int H>
void add_values(const Block& block, Pass pass, const float (*weights)[TOKENS], State* state) {
    constexpr int N = T::PER_WORD, PARTS = f32::PARTS, ALL = L * PARTS;
    constexpr int AT_ONCE = std::gcd(SUMS / (N * H), ALL);  // parts of a row whose sums registers hold
    for (int from = 0; from < ALL; from += AT_ONCE) {
        Part acc[AT_ONCE][H][N] = {};
        for (int t = 0; t < TOKENS; t++) {
            if (pass.index == 0) Pass{from / AT_ONCE, ALL / AT_ONCE, pass.ahead}.fetch(t, t + 1, L);
            UNROLL for (int c = 0; c < AT_ONCE; c++) {
                Part v[N];
                T::widen_part(load<u32::Register>(block.v[t] + (from + c) * REGISTER), v);
                UNROLL for (int h = 0; h < H; h++)
                    UNROLL for (int i = 0; i < N; i++) acc[c][h][i] += weights[h][t] * v[i];
            }
        }
        for (int c = 0; c < AT_ONCE; c++)
            for (int h = 0; h < H; h++)
                for (int i = 0; i < N; i++) {
                    float* to = state[h].acc + ((from + c) / PARTS * N + i) * LANES + (from + c) % PARTS * f32::EACH;
                    store(to, load<Part>(to) + acc[c][h][i]);
                }
    }
}
#else
template <class T, int L, int H>
void add_values(const Block& block, Pass pass, const float (*weights)[TOKENS], State* state) {
    constexpr int N = T::PER_WORD, MOST = std::clamp(HELD / (2 * N * H), 1, L);  // lines whose sums registers hold
    constexpr int AT_ONCE = L % MOST ? 1 : MOST;
    for (int from = 0; from < L; from += AT_ONCE) {
        f32 acc[H][AT_ONCE][N] = {};
        for (int t = 0; t < TOKENS; t++) {
            if (from == 0) pass.fetch(t, t + 1, L);
            UNROLL for (int c = 0; c < AT_ONCE; c++) {
                f32 v[N];
                T::widen(block.v[t] + (from + c) * LINE, v);
                UNROLL for (int h = 0; h < H; h++)
                    UNROLL for (int i = 0; i < N; i++) acc[h][c][i] += weights[h][t] * v[i];
            }
        }
        for (int h = 0; h < H; h++)
            for (int c = 0; c < AT_ONCE; c++)
                for (int i = 0; i < N; i++) {
                    float* to = state[h].acc + ((from + c) * N + i) * LANES;
                    store(to, load<f32>(to) + acc[h][c][i]);
                }
    }
}
#endif

// Takes two tokens at a time, interleaved so that each word holds one channel of both.
template <int L, int H>
void add_value_pairs(const Block& block, Pass pass, const float (*weights)[TOKENS], State* state) {
    alignas(LINE) uint32_t pairs[H][TOKENS / 2];
    for (int h = 0; h < H; h++)
        for (int t = 0; t < TOKENS; t += 2 * LANES) {
            f32 a = load<f32>(weights[h] + t), b = load<f32>(weights[h] + t + LANES);
            f32 first = evens(a, b);
            f32 second = odds(a, b);
            store(pairs[h] + t / 2, pack(first, second));
        }
    f32 acc[H][L][2] = {};
    for (int t = 0; t < TOKENS; t += 2) {
        pass.fetch(t, t + 2, L);
        UNROLL for (int c = 0; c < L; c++) {
            u32 a = load<u32>(block.v[t] + c * LINE), b = load<u32>(block.v[t + 1] + c * LINE);
            u32 evens = (a & 0xffffu) | (b << 16), odds = (a >> 16) | (b & 0xffff0000u);
            UNROLL for (int h = 0; h < H; h++) {
                u32 w = splat(pairs[h][t / 2]);
                acc[h][c][0] = dot_pairs(acc[h][c][0], evens, w);
                acc[h][c][1] = dot_pairs(acc[h][c][1], odds, w);
            }
        }
    }
    for (int h = 0; h < H; h++)
        for (int c = 0; c < 2 * L; c++) {
            float* to = state[h].acc + c * LANES;
            store(to, load<f32>(to) + acc[h][c / 2][c % 2]);
        }
}

// Returns the place of channel c in a head's sums: in bf16 the sixteen even channels of a vector come before the odd.
inline int64_t channel(F32, int64_t c) { return c; }
inline int64_t channel(BF16, int64_t c) { return c / 32 * 32 + c % 2 * LANES + c % 32 / 2; }

// Adds a block's values to the sums of up to HEADS heads whose logits are known. `ahead`: the rows that are read next.
template <class T, int L, bool WEIGHTED>
void attend_logits(const Block& block, const char* const* ahead, float (*logits)[TOKENS], State* state, int heads) {
    constexpr int DIM = L * T::WIDTH, AT_ONCE = WIDENS ? 4 : power_of_two_below(std::min(16 * LANES / DIM, HELD / 4));
    for (int h = 0; h < heads; h++) {
        for (int t = 0; WEIGHTED && t < block.count; t++) logits[h][t] += block.added[t];
        for (int t = block.count; t < TOKENS; t++) logits[h][t] = -INFINITY;
        weigh(logits[h], state[h], DIM);
    }
    Pass pass{0, 0, ahead};
    in_steps<AT_ONCE>(heads, [&](int, auto) { pass.count++; });
    in_steps<AT_ONCE>(heads, [&](int h, auto n) {
        if constexpr (DOTS_PAIRS && std::is_same_v<T, BF16>)
            add_value_pairs<L, n>(block, pass, logits + h, state + h);
        else
            add_values<T, L, n>(block, pass, logits + h, state + h);
        pass.index++;
    });
}

// Says how the tokens of one sequence are cut: into parts of `length`, which are tasks from `task` on.
struct Share {
    int64_t tokens, parts, length, task;
};

// Gives the sizes of a call. groups: each reads one choice of rows; heads: of a group; width: numbers of a head's sums, of
// which the first `dim` are its output; block: tokens that are not cut.
struct Sizes {
    int64_t batch, groups, heads, dim, width, block;
};

// Calls attend(sequence, group, first token, tokens, states of the group's heads) for all parts of the tokens_of(sequence)
// tokens, in parallel, and joins the parts.
template <class T, class Tokens, class Attend>
void in_parts(const Sizes& in, Tokens tokens_of, Attend attend, typename T::Element* out, float* lse) {
    std::vector<Share> shares(in.batch);
    std::vector<int64_t> sequence_of;  // of each task
    int64_t work = 0;
    for (int64_t b = 0; b < in.batch; b++) {
        int64_t tokens = tokens_of(b), blocks = (tokens + in.block - 1) / in.block;
        // A sequence's own shape alone sets this: neither threads nor neighbours change its result.
        int64_t parts = std::min(std::max<int64_t>(TASKS / in.groups, 1), (tokens + FEWEST - 1) / FEWEST);
        parts = std::max<int64_t>(parts, 1);
        shares[b] = {tokens, parts, (blocks + parts - 1) / parts * in.block, (int64_t)sequence_of.size()};
        sequence_of.insert(sequence_of.end(), in.groups * parts, b);
        work += tokens * in.groups * in.heads;
    }
    int64_t tasks = sequence_of.size();
    Buffer<float> sums(tasks * in.heads * in.width);
    std::vector<State> states(tasks * in.heads);
    for (size_t i = 0; i < states.size(); i++) states[i] = {-INFINITY, f32{}, sums.data() + i * in.width};
    each_task(tasks, work > 1024, [&](int64_t task) {
        int64_t b = sequence_of[task];
        const Share& share = shares[b];
        int64_t first = std::min((task - share.task) % share.parts * share.length, share.tokens);
        attend(b, (task - share.task) / share.parts, first, std::min(share.length, share.tokens - first),
               states.data() + task * in.heads);
    });
    for (int64_t i = 0; i < in.batch * in.groups * in.heads; i++) {
        int64_t pair = i / in.heads, b = pair / in.groups, parts = shares[b].parts;
        int64_t task = shares[b].task + pair % in.groups * parts;
        State* state = states.data() + task * in.heads + i % in.heads;
        float total = join(state, parts, in.heads, in.width, lse ? lse + i : nullptr);
        float divisor = total == 0 ? 1 : total;  // no row was read
        for (int64_t c = 0; c < in.dim; c++) put(out + i * in.dim + c, state->acc[channel(T{}, c)] / divisor);
    }
}

}  // namespace
