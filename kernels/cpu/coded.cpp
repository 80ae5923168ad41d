// Attends from one token to keys and values that are codes, and decodes chosen rows of them. Both read a row once, for all
// heads of its group. A key's range belongs to a channel of a whole block, so the queries take it over: q . (least + code *
// step) = q . least + (q * step) . code. A value's belongs to a token, so its weight does.
#include <array>

#include "calls.hpp"
#include "codes.hpp"
#include "softmax.hpp"

namespace {

constexpr int HEADS = 8;                     // heads of a group that are taken at once
constexpr int64_t TASKS = 64, FEWEST = 512;  // parts that all tokens are cut into; the fewest tokens of a part
constexpr int64_t ROWS = 32;                 // rows that are decoded at once
constexpr int MOST_DIM = 256, MOST_RANGES = 16;

// Holds the memory of a thread: the queries that took over a block's range, and a tile's weights.
struct Scratch {
    alignas(LINE) float q[HEADS][MOST_DIM], constant[HEADS];
    alignas(LINE) float weights[HEADS][TOKENS];                      // logits at first
    alignas(LINE) float of_range[MOST_RANGES][HEADS][TOKENS];        // weights times the steps of a range
    alignas(LINE) float ranges[2 * MOST_RANGES][TOKENS];
};

// Returns how many sums a head has: one for each channel, and a vector for each range of a value.
inline int64_t sums_per_head(const CodedAttention& in) { return in.dim + in.ranges * LANES; }

// Names a tile: up to TOKENS tokens of one block.
struct Tile {
    const char *k, *v, *v_range;
    int count;
};

// Prefetches a row of the coming phase: a tile's values while its logits are computed, the next tile's keys while the values
// are summed. What lies behind the last tile is not read.
inline void fetch(const char* row, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += LINE) __builtin_prefetch(row + i, 0, 2);
}

// Gives H queries the range of a block's keys.
template <int H> void take_over(int dim, const float* q, const char* range, float (*to)[MOST_DIM], float* constant) {
    f32 constants[H] = {};
    for (int c = 0; c < dim; c += LANES) {
        f32 least = load_halves(range + 2 * c), step = load_halves(range + 2 * (dim + c));
        UNROLL for (int h = 0; h < H; h++) {
            f32 query = load<f32>(q + h * dim + c);
            constants[h] += query * least;
            store(to[h] + c, query * step);
        }
    }
    for (int h = 0; h < H; h++) constant[h] = sum(constants[h]);
}

// Computes the logits of H heads, R tokens at a time. Past the end the last token repeats.
template <int BITS, int H>
void add_logits(const CodedAttention& in, const Tile& tile, const float (*q)[MOST_DIM], const float* constant,
                float (*logits)[TOKENS]) {
    constexpr int R = LANES / H, P = PLACES<BITS>;
    const int64_t width = in.dim * BITS / 8;
    f32 constants;
    for (int i = 0; i < LANES; i++) constants[i] = constant[i / R];
    for (int at = 0; at < tile.count; at += R) {
        const char* rows[R];
        for (int t = 0; t < R; t++) rows[t] = tile.k + std::min(at + t, tile.count - 1) * in.k_token;
        for (int t = at; t < at + R; t++) fetch(tile.v + t * in.v_token, width);
        fetch(tile.v_range + (TOKENS + at) * in.v_range_token, R * in.v_range_token);
        f32 acc[LANES] = {};
        for (int64_t i = 0; i < width; i += LANES) {
            u32 words[R];
            UNROLL for (int t = 0; t < R; t++) words[t] = words_of(rows[t] + i);
            UNROLL for (int p = 0; p < P; p++) {
                UNROLL for (int h = 0; h < H; h++) {
                    f32 query = load<f32>(q[h] + p * width + i);
                    UNROLL for (int t = 0; t < R; t++) acc[h * R + t] += codes_at<BITS>(words[t], p) * query;
                }
            }
        }
        alignas(LINE) float sums[LANES];
        store(sums, sums_of(acc) + constants);
        for (int h = 0; h < H; h++) std::memcpy(logits[h] + at, sums + h * R, R * sizeof(float));
    }
}

// Multiplies a tile's weights with the ranges of its values. What their least numbers add is the same in all channels of a
// range, so its sums, per lane, stand behind those of the channels.
void weigh_ranges(const CodedAttention& in, const Tile& tile, Scratch& s, int heads, State* state) {
    const int ranges = in.ranges;
    alignas(LINE) uint16_t halves[2 * MOST_RANGES][TOKENS];
    for (int t = 0; t < TOKENS; t++) {
        auto from = (const uint16_t*)(tile.v_range + std::min(t, tile.count - 1) * in.v_range_token);
        for (int c = 0; c < 2 * ranges; c++) halves[c][t] = from[c];
    }
    for (int c = 0; c < ranges; c++) {
        f32 least[2], step[2];
        for (int i = 0; i < 2; i++) {
            least[i] = load_halves(halves[c] + i * LANES);
            step[i] = load_halves(halves[ranges + c] + i * LANES);
        }
        for (int h = 0; h < heads; h++) {
            f32 first = load<f32>(s.weights[h]), second = load<f32>(s.weights[h] + LANES);
            store(s.of_range[c][h], first * step[0]);
            store(s.of_range[c][h] + LANES, second * step[1]);
            float* sums = state[h].acc + in.dim + c * LANES;
            store(sums, load<f32>(sums) + first * least[0] + second * least[1]);
        }
    }
}

// Adds the values of H heads from J * LANES bytes of each row, from byte i on.
template <int BITS, int H, int J>
void add_values(const CodedAttention& in, const Tile& tile, const Scratch& s, int first, int64_t i, State* state) {
    constexpr int P = PLACES<BITS>;
    const int64_t bytes = in.dim * BITS / 8, per_range = in.dim / in.ranges;
    const float* weights[P * J];
    f32 acc[H][P * J] = {};
    UNROLL for (int n = 0; n < P * J; n++) weights[n] = s.of_range[(n / J * bytes + i + n % J * LANES) / per_range][first];
    const char* row = tile.v + i;
    for (int t = 0; t < tile.count; t++, row += in.v_token) {
        if (i % LINE == 0) fetch(tile.k + (TOKENS + t) * in.k_token + i, J * LANES);
        UNROLL for (int j = 0; j < J; j++) {
            u32 words = words_of(row + j * LANES);
            UNROLL for (int p = 0; p < P; p++) {
                f32 codes = codes_at<BITS>(words, p);
                UNROLL for (int h = 0; h < H; h++) acc[h][p * J + j] += codes * weights[p * J + j][h * TOKENS + t];
            }
        }
    }
    UNROLL for (int n = 0; n < P * J; n++) {
        UNROLL for (int h = 0; h < H; h++) {
            float* to = state[h].acc + n / J * bytes + i + n % J * LANES;
            store(to, load<f32>(to) + acc[h][n]);
        }
    }
}

template <int BITS> void attend(const CodedAttention& in, const Tile& tile, Scratch& s, int heads, State* state) {
    in_steps<4>(heads, [&](int h, auto n) {
        add_logits<BITS, n>(in, tile, s.q + h, s.constant + h, s.weights + h);
    });
    for (int h = 0; h < heads; h++) {
        for (int t = tile.count; t < TOKENS; t++) s.weights[h][t] = -INFINITY;
        weigh(s.weights[h], state[h], sums_per_head(in));
    }
    weigh_ranges(in, tile, s, heads, state);
    constexpr int J = BITS / 2;
    const int64_t bytes = in.dim * BITS / 8;
    int64_t i = 0;
    for (; i + J * LANES <= bytes; i += J * LANES)
        in_steps<4>(heads, [&](int h, auto n) { add_values<BITS, n, J>(in, tile, s, h, i, state + h); });
    for (; i < bytes; i += LANES)
        in_steps<4>(heads, [&](int h, auto n) { add_values<BITS, n, 1>(in, tile, s, h, i, state + h); });
}

// Returns a call as that of its sequence b alone, whose tensors begin where the call's tables say, if it has some.
template <class Call> Call of_sequence(const Call& in, int64_t b) {
    Call one = in;
    auto place = [&](const void*& x, int64_t batch, int64_t& group, int64_t& row, const int64_t* table) {
        x = table ? (const void*)table[3 * b] : (const char*)x + b * batch;
        if (table) group = table[3 * b + 1], row = table[3 * b + 2];
    };
    place(one.k, in.k_batch, one.k_group, one.k_token, in.k_table);
    place(one.v, in.v_batch, one.v_group, one.v_token, in.v_table);
    place(one.k_range, in.k_range_batch, one.k_range_group, one.k_range_block, in.k_range_table);
    place(one.v_range, in.v_range_batch, one.v_range_group, one.v_range_token, in.v_range_table);
    return one;
}

// Attends from the heads of group g of a sequence to its blocks `first` up to `end`.
template <int BITS>
void attend_blocks(const CodedAttention& in, const float* q, int64_t g, int64_t first, int64_t end, State* state) {
    const char *k = (const char*)in.k + g * in.k_group, *v = (const char*)in.v + g * in.v_group;
    const char *k_range = (const char*)in.k_range + g * in.k_range_group;
    const char *v_range = (const char*)in.v_range + g * in.v_range_group;
    auto scratch = std::make_unique<Scratch>();
    for (int64_t block = first; block < end; block++)
        for (int64_t h = 0; h < in.heads; h += HEADS) {
            int heads = std::min<int64_t>(HEADS, in.heads - h);
            if (block + 1 < end) fetch(k_range + (block + 1) * in.k_range_block, 4 * in.dim);
            in_steps<4>(heads, [&](int i, auto n) {
                take_over<n>(in.dim, q + (h + i) * in.dim, k_range + block * in.k_range_block, scratch->q + i,
                             scratch->constant + i);
            });
            for (int64_t t = block * in.block; t < (block + 1) * in.block; t += TOKENS) {
                int count = std::min<int64_t>(TOKENS, (block + 1) * in.block - t);
                Tile tile{k + t * in.k_token, v + t * in.v_token, v_range + t * in.v_range_token, count};
                attend<BITS>(in, tile, *scratch, heads, state + h);
            }
        }
}

// Returns the queries as floats, times the scale.
template <class T> Buffer<float> scaled(const CodedAttention& in) {
    Buffer<float> q(in.batch * in.groups * in.heads * in.dim);
    for (size_t i = 0; i < q.size(); i++) q[i] = to_float(((const T*)in.q)[i]) * (float)(in.scale * M_LOG2E);
    return q;
}

// Names a sequence's call, and how its blocks are cut: into parts of so many, which are tasks from `task` on.
struct Share {
    CodedAttention call;
    int64_t blocks, parts, length, task;
};

template <int BITS, class T> void run(const CodedAttention& in) {
    Buffer<float> q = scaled<T>(in);
    const int64_t size = in.heads * in.dim;
    std::vector<Share> shares;
    std::vector<int64_t> sequence_of;  // of each task
    int64_t work = 0;
    for (int64_t b = 0; b < in.batch; b++) {
        int64_t count = in.counts ? std::min(in.counts[b], in.count) : in.count, blocks = count / in.block;
        // The shape of a sequence alone sets this: neither threads nor neighbours change its result.
        int64_t parts = std::min(std::max<int64_t>(TASKS / in.groups, 1), (count + FEWEST - 1) / FEWEST);
        parts = std::max<int64_t>(parts, 1);
        shares.push_back({of_sequence(in, b), blocks, parts, (blocks + parts - 1) / parts, (int64_t)sequence_of.size()});
        sequence_of.insert(sequence_of.end(), in.groups * parts, b);
        work += count * in.groups * in.heads;
    }
    const int64_t tasks = sequence_of.size();
    Buffer<float> sums(tasks * in.heads * sums_per_head(in));
    std::vector<State> states(tasks * in.heads);
    for (size_t i = 0; i < states.size(); i++) states[i] = {-INFINITY, f32{}, sums.data() + i * sums_per_head(in)};
    each_task(tasks, work > 1024, [&](int64_t task) {
        const int64_t b = sequence_of[task];
        const Share& share = shares[b];
        int64_t g = (task - share.task) / share.parts;
        int64_t first = std::min((task - share.task) % share.parts * share.length, share.blocks);
        attend_blocks<BITS>(share.call, q.data() + (b * in.groups + g) * size, g, first,
                            std::min(first + share.length, share.blocks), states.data() + task * in.heads);
    });
    for (int64_t i = 0; i < in.batch * in.groups * in.heads; i++) {
        const int64_t pair = i / in.heads;
        const Share& share = shares[pair / in.groups];
        T* out = (T*)in.out + i * in.dim;
        if (!share.blocks) {  // no codes: they take no part in a softmax with other tokens
            for (int64_t c = 0; c < in.dim; c++) put(out + c, 0);
            in.lse[i] = -INFINITY;
            continue;
        }
        State* state = states.data() + (share.task + pair % in.groups * share.parts) * in.heads + i % in.heads;
        float total = join(state, share.parts, in.heads, sums_per_head(in), in.lse + i);
        for (int64_t c = 0; c < in.dim; c++) {
            float least = sum(load<f32>(state->acc + in.dim + c / (in.dim / in.ranges) * LANES));
            put(out + c, (state->acc[c] + least) / total);
        }
    }
}

template <int BITS> void run(const CodedAttention& in) { in.is_bf16 ? run<BITS, bf16>(in) : run<BITS, float>(in); }

// Writes the numbers of one row. `steps` come behind the least numbers in `range`, each for `per_range` channels, or for one.
template <int BITS, class T>
void decode_row(const char* row, const char* range, int64_t dim, int64_t ranges, T* out) {
    alignas(LINE) float numbers[MOST_DIM];
    const int64_t width = dim * BITS / 8, per_range = dim / ranges;
    alignas(LINE) float of_range[2 * MOST_DIM];
    if (per_range > 1) {
        uint16_t halves[2 * MOST_RANGES + LANES] = {};
        std::memcpy(halves, range, 4 * ranges);
        alignas(LINE) float few[2 * MOST_RANGES + LANES];
        for (int64_t i = 0; i < 2 * ranges; i += LANES) store(few + i, load_halves(halves + i));
        for (int64_t c = 0; c < dim; c += LANES) {
            store(of_range + c, splat(few[c / per_range]));
            store(of_range + dim + c, splat(few[ranges + c / per_range]));
        }
    } else
        for (int64_t c = 0; c < 2 * dim; c += LANES) store(of_range + c, load_halves(range + 2 * c));
    for (int64_t i = 0; i < width; i += LANES) {
        u32 words = words_of(row + i);
        UNROLL for (int p = 0; p < PLACES<BITS>; p++) {
            int64_t c = p * width + i;
            store(numbers + c, load<f32>(of_range + c) + codes_at<BITS>(words, p) * load<f32>(of_range + dim + c));
        }
    }
    for (int64_t c = 0; c < dim; c++) put(out + c, numbers[c]);
}

// Calls f(call of its sequence, number, head, row) for all rows to decode, in parallel.
template <class F> void each_row(const DecodeRows& in, F f) {
    const int64_t total = in.pairs * in.count, tasks = (total + ROWS - 1) / ROWS;
    std::vector<DecodeRows> calls;
    for (int64_t b = 0; b < in.pairs / in.groups; b++) calls.push_back(of_sequence(in, b));
    each_task(tasks, total > 2 * ROWS, [&](int64_t task) {
        for (int64_t i = task * ROWS; i < std::min(total, (task + 1) * ROWS); i++) {
            const int64_t g = i / in.count % in.groups, row = in.rows ? in.rows[i] : i % in.count;
            const int64_t b = i / in.count / in.groups;
            if (in.counts && row >= in.counts[b]) continue;
            f(calls[b], i, g, row);
        }
    });
}

template <int BITS, class T> void decode(const DecodeRows& in) {
    each_row(in, [&](const DecodeRows& one, int64_t i, int64_t g, int64_t row) {
        const char* k = (const char*)one.k + g * one.k_group + row * one.k_token;
        const char* v = (const char*)one.v + g * one.v_group + row * one.v_token;
        const char* k_range = (const char*)one.k_range + g * one.k_range_group + in.blocks[i] * one.k_range_block;
        const char* v_range = (const char*)one.v_range + g * one.v_range_group + row * one.v_range_token;
        decode_row<BITS>(k, k_range, in.dim, in.dim, (T*)in.k_out + i * in.dim);
        decode_row<BITS>(v, v_range, in.dim, in.ranges, (T*)in.v_out + i * in.dim);
    });
}

// Returns the floats that all codes of 8 bits stand for: a sign, four bits of exponent, three of mantissa.
std::array<float, 256> floats_of_8_bits() {
    std::array<float, 256> table;
    for (int code = 0; code < 256; code++) {
        int exponent = code >> 3 & 15, mantissa = code & 7;
        float size = exponent ? std::ldexp(8.f + mantissa, exponent - 10) : std::ldexp((float)mantissa, -9);
        table[code] = code & 128 ? -size : size;
    }
    return table;
}

// Decodes rows of floats, whose scales, of key and value, stand in the place of a value's ranges.
template <class T> void decode_floats(const DecodeRows& in) {
    static const std::array<float, 256> table = floats_of_8_bits();
    each_row(in, [&](const DecodeRows& one, int64_t i, int64_t g, int64_t row) {
        uint16_t halves[LANES] = {};
        std::memcpy(halves, (const char*)one.v_range + g * one.v_range_group + row * one.v_range_token, 4);
        alignas(LINE) float scales[LANES];
        store(scales, load_halves(halves));
        auto k = (const uint8_t*)one.k + g * one.k_group + row * one.k_token;
        auto v = (const uint8_t*)one.v + g * one.v_group + row * one.v_token;
        for (int64_t c = 0; c < in.dim; c++) {
            put((T*)in.k_out + i * in.dim + c, table[k[c]] * scales[0]);
            put((T*)in.v_out + i * in.dim + c, table[v[c]] * scales[1]);
        }
    });
}

template <int BITS> void decode(const DecodeRows& in) {
    in.is_bf16 ? decode<BITS, bf16>(in) : decode<BITS, float>(in);
}

}  // namespace

EXPORT void coded_attention(const CodedAttention& in) {
    switch (in.bits) {
        case 2: return run<2>(in);
        case 4: return run<4>(in);
        case 8: return run<8>(in);
    }
}
EXPORT void decode_rows(const DecodeRows& in) {
    switch (in.bits) {
        case 0: return in.is_bf16 ? decode_floats<bf16>(in) : decode_floats<float>(in);
        case 2: return decode<2>(in);
        case 4: return decode<4>(in);
        case 8: return decode<8>(in);
    }
}
