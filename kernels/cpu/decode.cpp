// Attends from one token to segments of keys and values: every row is read once, in place, for all heads of its group.
// Memory is the limit, so the design is about the order and pace of reads. Blocks of rows fit L1; a block's values are
// prefetched while its logits are computed, the next block's keys while the values are summed. (Prefetching both in the
// same phase, or in bursts, reaches half the bandwidth.)
#include "calls.hpp"
#include "rows.hpp"

namespace {

constexpr int HEADS = 8;    // heads of a group that are taken at once
constexpr int64_t TASKS = 64, FEWEST = 512;  // parts that all rows are cut into; the fewest rows of a part

struct Call {
    const PackedSegment* segments;
    int64_t num_segments, batch, groups, heads, dim;  // groups: each reads one choice of rows; heads: of a group
    float scale;                                      // times log2(e)
    bool weighted;                                    // whether any segment has log-weights
};

// Returns how many rows of a segment are there for a sequence.
inline int64_t rows_of(const PackedSegment& segment, int64_t sequence) {
    return segment.live ? std::min(segment.live[sequence], segment.count) : segment.count;
}

struct Block {
    const char *k[TOKENS], *v[TOKENS];
    float added[TOKENS];  // log-weights, times log2(e)
    int count;
};

// Hands out the rows of one group, segment after segment, in blocks.
struct Rows {
    const Call& call;
    int64_t pair, left, at, row_bytes;  // at: the place in the current segment
    const PackedSegment* segment;

    Rows(const Call& call, int64_t pair, int64_t first, int64_t count, int64_t row_bytes)
        : call(call), pair(pair), left(count), at(first), row_bytes(row_bytes), segment(call.segments) {
        for (; left && at >= there(); segment++) at -= there();
    }

    int64_t there() const { return rows_of(*segment, pair / call.groups); }

    // Chosen rows are scattered, so each costs a page walk and a memory access: they are prefetched a block ahead into
    // L2, which tracks three times as many outstanding lines as L1.
    void fetch(const char* row) const {
        for (int64_t i = 0; i < row_bytes; i += LINE) __builtin_prefetch(row + i, 0, 2);
    }

    // Past the end the last row repeats, with weight 0. Rows with a log-weight of minus infinity are left out.
    template <bool WEIGHTED> void fill(Block& block) {
        int count = 0;
        int64_t sequence = pair / call.groups;
        while (count < TOKENS && left) {
            const PackedSegment& s = *segment;
            int64_t size = there(), n = std::min({int64_t{TOKENS - count}, left, size - at});
            int64_t group = pair % call.groups / s.k_share;
            HeadRows k(s.k, s.k_batch, s.k_group, s.k_token, s.k_table, sequence, group);
            HeadRows v(s.v, s.v_batch, s.v_group, s.v_token, s.v_table, sequence, group);
            int64_t list = pair / s.rows_share * s.count + at;
            const int64_t* rows = s.rows + list;
            int n_read = 0;
            for (int i = 0; i < n; i++) {
                if (WEIGHTED) {
                    float added = s.log_weights ? s.log_weights[list + i] : 0;
                    if (added == -INFINITY) continue;
                    block.added[count + n_read] = added * (float)M_LOG2E;
                }
                int64_t row = s.rows ? rows[i] : at + i;
                block.k[count + n_read] = k[row];
                block.v[count + n_read] = v[row];
                if (s.rows) fetch(block.k[count + n_read]), fetch(block.v[count + n_read]);
                n_read++;
            }
            count += n_read, at += n, left -= n;
            if (at == size) segment++, at = 0;
        }
        block.count = count;
        for (int i = std::max(count, 1); i < TOKENS; i++) block.k[i] = block.k[i - 1], block.v[i] = block.v[i - 1];
    }
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

template <int L, int H>
void add_values(F32, const Block& block, Pass pass, const float (*weights)[TOKENS], State* state) {
    f32 acc[H][L] = {};
    for (int t = 0; t < TOKENS; t++) {
        pass.fetch(t, t + 1, L);
        UNROLL for (int c = 0; c < L; c++) {
            f32 v = load<f32>(block.v[t] + c * LINE);
            UNROLL for (int h = 0; h < H; h++) acc[h][c] += weights[h][t] * v;
        }
    }
    for (int h = 0; h < H; h++)
        for (int c = 0; c < L; c++) {
            float* to = state[h].acc + c * LANES;
            store(to, load<f32>(to) + acc[h][c]);
        }
}

// Takes two tokens at a time, interleaved so that each word holds one channel of both.
template <int L, int H>
void add_values(BF16, const Block& block, Pass pass, const float (*weights)[TOKENS], State* state) {
    alignas(LINE) uint32_t pairs[H][TOKENS / 2];
    for (int h = 0; h < H; h++)
        for (int t = 0; t < TOKENS; t += 2 * LANES) {
            f32 a = load<f32>(weights[h] + t), b = load<f32>(weights[h] + t + LANES);
            f32 first = __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
            f32 second = __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
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

template <class T, int L, bool WEIGHTED>
void attend(const Block& block, const Block& next, const typename T::Element* q, State* state, int heads, float scale) {
    constexpr int DIM = L * T::WIDTH, AT_ONCE = power_of_two_below(16 * LANES / DIM);
    alignas(LINE) float logits[HEADS][TOKENS];
    block_logits<T, L>(q, block.k, block.v, heads, scale, logits[0], TOKENS);
    for (int h = 0; h < heads; h++) {
        for (int t = 0; WEIGHTED && t < block.count; t++) logits[h][t] += block.added[t];
        for (int t = block.count; t < TOKENS; t++) logits[h][t] = -INFINITY;
        weigh(logits[h], state[h], DIM);
    }
    Pass pass{0, 0, next.k};
    in_steps<AT_ONCE>(heads, [&](int, auto) { pass.count++; });
    in_steps<AT_ONCE>(heads, [&](int h, auto n) {
        add_values<L, n>(T{}, block, pass, logits + h, state + h);
        pass.index++;
    });
}

// flatten: two callers would else share functions that are faster inlined
template <class T, bool WEIGHTED, int L>
__attribute__((flatten)) void attend_rows(const Call& call, Rows rows, const typename T::Element* q, State* state) {
    Block blocks[2];
    rows.fill<WEIGHTED>(blocks[0]);
    for (int i = 0; blocks[i].count; i ^= 1) {
        blocks[i ^ 1] = blocks[i];  // nothing follows the last block: prefetch it again
        rows.fill<WEIGHTED>(blocks[i ^ 1]);
        for (int h = 0; h < call.heads; h += HEADS)
            attend<T, L, WEIGHTED>(blocks[i], blocks[i ^ 1], q + h * call.dim, state + h,
                                   std::min<int>(HEADS, call.heads - h), call.scale);
    }
}

template <class T, bool WEIGHTED>
void attend_rows(const Call& call, Rows rows, const typename T::Element* q, State* state) {
    switch (call.dim / T::WIDTH) {
        case 1: return attend_rows<T, WEIGHTED, 1>(call, rows, q, state);
        case 2: return attend_rows<T, WEIGHTED, 2>(call, rows, q, state);
        case 3: return attend_rows<T, WEIGHTED, 3>(call, rows, q, state);
        case 4: return attend_rows<T, WEIGHTED, 4>(call, rows, q, state);
        case 6: return attend_rows<T, WEIGHTED, 6>(call, rows, q, state);
        case 8: return attend_rows<T, WEIGHTED, 8>(call, rows, q, state);
    }
}

// Says how the rows of one sequence are cut: into parts of so many tokens, which are tasks from `task` on.
struct Share {
    int64_t tokens, parts, length, task;
};

template <class T> void run(const Call& call, const typename T::Element* q, typename T::Element* out, float* lse) {
    std::vector<Share> shares(call.batch);
    std::vector<int64_t> sequence_of;  // of each task
    int64_t work = 0;
    for (int64_t b = 0; b < call.batch; b++) {
        int64_t tokens = 0;
        for (int64_t i = 0; i < call.num_segments; i++) tokens += rows_of(call.segments[i], b);
        // A sequence's own shape alone sets this: neither threads nor neighbours change its result.
        int64_t parts = std::min(std::max<int64_t>(TASKS / call.groups, 1), (tokens + FEWEST - 1) / FEWEST);
        parts = std::max<int64_t>(parts, 1);
        shares[b] = {tokens, parts, (tokens + parts - 1) / parts, (int64_t)sequence_of.size()};
        sequence_of.insert(sequence_of.end(), call.groups * parts, b);
        work += tokens * call.groups * call.heads;
    }
    int64_t tasks = sequence_of.size();
    Buffer<float> sums(tasks * call.heads * call.dim);
    std::vector<State> states(tasks * call.heads);
    for (size_t i = 0; i < states.size(); i++) states[i] = {-INFINITY, f32{}, sums.data() + i * call.dim};
    each_task(tasks, work > 1024, [&](int64_t task) {
        int64_t b = sequence_of[task];
        const Share& share = shares[b];
        int64_t pair = b * call.groups + (task - share.task) / share.parts;
        int64_t first = std::min((task - share.task) % share.parts * share.length, share.tokens);
        Rows rows(call, pair, first, std::min(share.length, share.tokens - first), call.dim * sizeof(*q));
        auto* attend = call.weighted ? attend_rows<T, true> : attend_rows<T, false>;
        attend(call, rows, q + pair * call.heads * call.dim, states.data() + task * call.heads);
    });
    for (int64_t i = 0; i < call.batch * call.groups * call.heads; i++) {
        int64_t pair = i / call.heads, b = pair / call.groups, parts = shares[b].parts;
        int64_t task = shares[b].task + pair % call.groups * parts;
        State* state = states.data() + task * call.heads + i % call.heads;
        float total = join(state, parts, call.heads, call.dim, lse ? lse + i : nullptr);
        float divisor = total == 0 ? 1 : total;  // no row was read
        for (int64_t c = 0; c < call.dim; c++) put(out + i * call.dim + c, state->acc[channel(T{}, c)] / divisor);
    }
}

}  // namespace

EXPORT void segment_attention(const PackedSegment& segments, const SegmentAttention& in) {
    bool weighted = std::any_of(&segments, &segments + in.num_segments, [](auto& s) { return s.log_weights; });
    float scale = (float)in.scale * (float)M_LOG2E;
    Call call{&segments, in.num_segments, in.batch, in.groups, in.heads, in.dim, scale, weighted};
    if (in.is_bf16)
        run<BF16>(call, (const bf16*)in.q, (bf16*)in.out, in.lse);
    else
        run<F32>(call, (const float*)in.q, (float*)in.out, in.lse);
}
