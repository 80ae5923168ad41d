// Computes causal attention of a prompt, whole or within a window, and the attention that each key receives (H2O).
//
// Keys and values of a KV head are packed once into blocks of 64; tasks of 32 queries then pass over the blocks up to
// the diagonal with a running softmax, in bf16 on AMX tiles where there are any. For column sums a task keeps its
// weights until its maxima and totals are known, so nothing is computed twice and memory is linear in the stored tokens.
#include "amx.hpp"
#include "calls.hpp"

namespace {

constexpr int QUERIES = 32;  // queries of a task: with a block of keys and values they fit L1
constexpr int KEYS = 64;     // keys of a block
constexpr int VECTORS = KEYS / LANES;
constexpr float SLACK = 8;   // weights may grow to 2^8 before the sums are rescaled

// Whether numbers of type E are multiplied as words of T after they are widened.
template <class T, class E> constexpr bool WIDENED = !std::is_same_v<typename T::Element, E>;

struct Call : PrefillAttention {
    float log2_scale;  // softmax in powers of two
    bool by_tiles;     // AMX
    int64_t wide;      // channels with those that fill tiles up, which are zero: D in what follows
};

// Holds one KV head's keys and values of type E in blocks: keys [words of D][64], values [words of 64][D].
template <class T, class E> struct Packed {
    int64_t dim, wide, block_words;
    Buffer<uint32_t> k, v;

    Packed(const Call& call)
        : dim(call.dim), wide(call.wide), block_words(KEYS * wide / T::PER_WORD),
          k((call.stored + KEYS - 1) / KEYS * block_words), v(call.v ? k.size() : 0) {}

    void pack(const Call& call, const char* keys, const char* values, int64_t block) {
        const char* rows[KEYS];
        int64_t first = block * KEYS;
        int count = std::min<int64_t>(KEYS, call.stored - first);
        Buffer<float> wide(WIDENED<T, E> ? KEYS * dim : 0);
        auto read = [&](const char* from, int64_t stride) {
            for (int i = 0; i < count; i++) {
                rows[i] = from + (first + i) * stride;
                if (WIDENED<T, E>) rows[i] = (const char*)widened((const E*)rows[i], dim, &wide[i * dim]);
            }
        };
        read(keys, call.k_token);
        transpose(rows, count, dim / T::PER_WORD, &k[block * block_words], KEYS);
        if (!call.v) return;
        read(values, call.v_token);
        mix(rows, count, &v[block * block_words], T{});
    }

    void mix(const char* const* rows, int count, uint32_t* out, F32) {
        for (int i = 0; i < KEYS; i++)
            if (i < count)
                std::memcpy(out + i * wide, rows[i], 4 * dim);
            else
                std::fill_n(out + i * wide, dim, 0);
    }
    void mix(const char* const* rows, int count, uint32_t* out, BF16) {
        std::vector<bf16> none(dim);
        for (int i = 0; i < KEYS; i += 2) {
            const bf16* even_row = i < count ? (const bf16*)rows[i] : none.data();
            const bf16* odd_row = i + 1 < count ? (const bf16*)rows[i + 1] : none.data();
            for (int c = 0; c < dim; c++) out[i / 2 * wide + c] = even_row[c] | (uint32_t)odd_row[c] << 16;
        }
    }
};

// Holds what one thread needs for a task.
template <class T, class E> struct Task {
    static constexpr bool ON_TILES = std::is_same_v<T, BF16>;  // so that nothing of it is built for fp32
    const Call& call;
    const Packed<T, E>& packed;
    int64_t dim, wide, words;
    Buffer<uint32_t> q;                  // [QUERIES][words]
    Buffer<float> acc;                   // [QUERIES][D]
    Buffer<uint32_t> kept;               // [blocks][QUERIES][words of KEYS]; one block unless column sums are wanted
    uint32_t* weights;                   // the weights of the current block
    Buffer<float> tops;                  // [blocks][QUERIES], the maxima that weights are relative to
    alignas(LINE) float logits[QUERIES][KEYS];
    alignas(LINE) f32 totals[QUERIES];  // per lane: summed only at the end
    float top[QUERIES];
    static constexpr int WEIGHT_WORDS = KEYS / T::PER_WORD, BLOCK_WORDS = QUERIES * WEIGHT_WORDS;

    Task(const Call& call, const Packed<T, E>& packed)
        : call(call), packed(packed), dim(call.dim), wide(call.wide), words(wide / T::PER_WORD), q(QUERIES * words),
          acc(QUERIES * wide) {
        int64_t blocks = call.sums ? packed.k.size() / packed.block_words : 1;
        kept.resize(blocks * BLOCK_WORDS);
        tops.resize(blocks * QUERIES);
    }

    // Runs `count` queries of one head, from query `first` of those at `from`; `row` is its place in lse.
    void run(const char* from, char* to, float* sums, int64_t row, int64_t first, int count) {
        std::fill(q.begin(), q.end(), 0);
        std::fill(acc.begin(), acc.end(), 0.0f);
        for (int m = 0; m < count; m++) {
            const E* row = (const E*)(from + (first + m) * call.q_token);
            if (WIDENED<T, E>)
                widened(row, dim, (float*)&q[m * words]);
            else
                std::memcpy(&q[m * words], row, dim * sizeof(E));
        }
        std::fill_n(top, QUERIES, -INFINITY);
        std::fill_n(totals, QUERIES, f32{});
        int64_t place = call.first + first, end = std::clamp<int64_t>(place + count, 0, call.stored);
        int64_t begin = std::clamp<int64_t>(place - call.window + 1, 0, end) / KEYS, blocks = (end + KEYS - 1) / KEYS;
        for (int64_t block = begin; block < blocks; block++) {
            int seen = std::min<int64_t>(KEYS, (end - block * KEYS + LANES - 1) / LANES * LANES);  // by any query
            multiply_keys(&packed.k[block * packed.block_words], seen);
            int64_t last = std::min<int64_t>(KEYS, call.stored - block * KEYS) - 1;
            int64_t open = place - block * KEYS, hidden = open - call.window;  // the first query sees those between
            weights = &kept[call.sums ? block * BLOCK_WORDS : 0];
            if (std::min(open, last) < KEYS - 1 || hidden + QUERIES > 0)
                for (int m = 0; m < QUERIES; m++) weigh<true>(m, std::min(open + m, last), hidden + m);
            else
                for (int m = 0; m < QUERIES; m++) weigh<false>(m, 0, 0);
            if (call.sums) std::copy_n(top, QUERIES, &tops[block * QUERIES]);
            if (call.v) add_values(&packed.v[block * packed.block_words], seen);
        }
        for (int m = 0; m < count && call.v; m++) {
            auto to_row = (E*)(to + (first + m) * call.out_token);
            float total = sum(totals[m]), share = total > 0 ? 1 / total : 0;
            for (int64_t c = 0; c < dim; c++) put(to_row + c, acc[m * wide + c] * share);
        }
        for (int m = 0; m < count && call.lse; m++)
            call.lse[row + m] = (top[m] + std::log2(sum(totals[m]))) * (float)M_LN2;
        if (call.sums) add_sums(sums, begin, blocks, count);
    }

    // Multiplies the queries with at least the first `seen` keys of a block.
    void multiply_keys(const uint32_t* keys, int seen) {
        if (ON_TILES && call.by_tiles) {
            for (int n = 0; n < KEYS; n += 32)
                multiply_tiles<false>(q.data(), words, keys + n, KEYS, logits[0] + n, KEYS, words / LANES);
            return;
        }
        if (HELD == 8)
            return multiply_columns<T, false>(q.data(), words, QUERIES, keys, KEYS, words, logits[0], KEYS, seen);
        for (int m = 0; m < QUERIES; m += TILE_ROWS) {
            const uint32_t* rows[TILE_ROWS];
            f32 tile[TILE_ROWS][VECTORS] = {};
            for (int r = 0; r < TILE_ROWS; r++) rows[r] = &q[(m + r) * words];
            multiply<T, VECTORS>(rows, keys, KEYS, words, tile);
            for (int r = 0; r < TILE_ROWS; r++)
                for (int i = 0; i < VECTORS; i++) store(logits[m + r] + i * LANES, tile[r][i]);
        }
    }

    // Turns the logits of query m into weights; if MASKED, it sees the keys past `hidden` up to `open`.
    template <bool MASKED> void weigh(int m, int64_t open, int64_t hidden) {
        int32_t first = std::clamp<int64_t>(hidden, -1, KEYS) + 1, end = std::clamp<int64_t>(open, -1, KEYS);
        f32 x[VECTORS], best = splat(-INFINITY);
        UNROLL for (int i = 0; i < VECTORS; i++) {
            x[i] = load<f32>(logits[m] + i * LANES);
            i32 key = numbers() + i * LANES;
            if (MASKED) x[i] = select((key > end) | (key < first), splat(-INFINITY), x[i]);
            best = maximum(best, x[i]);
        }
        if (any(best * call.log2_scale > top[m] + SLACK)) raise(m, largest(best) * call.log2_scale);
        float shift = MASKED && top[m] == -INFINITY ? 0 : top[m];  // a query that has seen no key yet
        f32 sum_of = {};
        UNROLL for (int i = 0; i < VECTORS; i++) {
            x[i] = exp2<sizeof(E) == 2 ? 3 : 5>(x[i] * call.log2_scale - shift);
            sum_of += x[i];
        }
        totals[m] += sum_of;
        set_weights(x, weights + m * WEIGHT_WORDS, T{});
    }
    static void set_weights(const f32* x, uint32_t* out, F32) {
        for (int i = 0; i < VECTORS; i++) store(out + i * LANES, x[i]);
    }
    static void set_weights(const f32* x, uint32_t* out, BF16) {
        for (int i = 0; i < VECTORS; i += 2) store(out + i / 2 * LANES, pack_neighbours(x[i], x[i + 1]));
    }

    void raise(int m, float best) {
        float shrink = std::exp2(top[m] - best);
        for (int64_t c = 0; c < dim; c += LANES) store(&acc[m * wide + c], load<f32>(&acc[m * wide + c]) * shrink);
        totals[m] *= shrink;
        top[m] = best;
    }

    void add_values(const uint32_t* values, int seen) {
        if (ON_TILES && call.by_tiles) {
            for (int64_t n = 0; n < wide; n += 32)
                multiply_tiles<true>(weights, WEIGHT_WORDS, values + n, wide, &acc[n], wide, WEIGHT_WORDS / LANES);
            return;
        }
        if (HELD == 8)
            return multiply_columns<T, true>(weights, WEIGHT_WORDS, QUERIES, values, wide, seen / T::PER_WORD, acc.data(),
                                             wide, dim);
        int64_t c = 0;
        for (; c + 4 * LANES <= dim; c += 4 * LANES) add_channels<4>(values, c);
        for (; c < dim; c += LANES) add_channels<1>(values, c);
    }
    template <int V> void add_channels(const uint32_t* values, int64_t c) {
        for (int m = 0; m < QUERIES; m += TILE_ROWS) {
            const uint32_t* rows[TILE_ROWS];
            f32 tile[TILE_ROWS][V];
            for (int r = 0; r < TILE_ROWS; r++) {
                rows[r] = weights + (m + r) * WEIGHT_WORDS;
                for (int i = 0; i < V; i++) tile[r][i] = load<f32>(&acc[(m + r) * wide + c + i * LANES]);
            }
            multiply<T, V>(rows, values + c, wide, WEIGHT_WORDS, tile);
            for (int r = 0; r < TILE_ROWS; r++)
                for (int i = 0; i < V; i++) store(&acc[(m + r) * wide + c + i * LANES], tile[r][i]);
        }
    }

    void add_sums(float* sums, int64_t begin, int64_t blocks, int count) {
        float wholes[QUERIES];  // logarithms of what divides the weights
        for (int m = 0; m < count; m++)
            wholes[m] = top[m] + std::log2(sum(totals[m]));
        for (int64_t block = begin; block < blocks; block++) {
            f32 columns[VECTORS] = {};
            for (int m = 0; m < count; m++) {
                if (tops[block * QUERIES + m] == -INFINITY) continue;  // has seen no key yet
                float share = std::exp2(tops[block * QUERIES + m] - wholes[m]);
                add_weights(&kept[block * BLOCK_WORDS + m * WEIGHT_WORDS], share, columns, T{});
            }
            alignas(LINE) float column[KEYS];
            in_order(columns, column, T{});
            int n = std::min<int64_t>(KEYS, call.stored - block * KEYS);
            for (int j = 0; j < n; j++) sums[block * KEYS + j] += column[j];
        }
    }
    static void add_weights(const uint32_t* words, float share, f32* columns, F32) {
        UNROLL for (int i = 0; i < VECTORS; i++) columns[i] += load<f32>(words + i * LANES) * share;
    }
    static void add_weights(const uint32_t* words, float share, f32* columns, BF16) {  // even, odd keys
        UNROLL for (int i = 0; i < VECTORS; i += 2) {
            u32 both = load<u32>(words + i / 2 * LANES);
            columns[i] += even(both) * share, columns[i + 1] += odd(both) * share;
        }
    }
    static void in_order(const f32* columns, float* out, F32) {
        for (int i = 0; i < VECTORS; i++) store(out + i * LANES, columns[i]);
    }
    static void in_order(const f32* columns, float* out, BF16) {
        for (int i = 0; i < VECTORS; i += 2)
            for (int lane = 0; lane < LANES; lane++)
                for (int half = 0; half < 2; half++) out[i * LANES + 2 * lane + half] = columns[i + half][lane];
    }
};

template <class T, class E> void run_head(const Call& call, Packed<T, E>& packed, int64_t b, int64_t g) {
    const char* keys = (const char*)call.k + b * call.k_batch + g * call.k_group;
    const char* values = (const char*)call.v + b * call.v_batch + g * call.v_group;
    int64_t blocks = packed.k.size() / packed.block_words, parts = (call.fresh + QUERIES - 1) / QUERIES;
    int64_t tasks = parts * call.heads, threads = omp_get_max_threads(), sums_size = call.heads * call.stored;
    Buffer<float> sums(call.sums ? threads * sums_size : 0);  // one for each thread, added in a fixed order
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int64_t block = 0; block < blocks; block++) packed.pack(call, keys, values, block);
        auto task = std::make_unique<Task<T, E>>(call, packed);
        Tiles tiles(call.by_tiles);
        float* thread_sums = call.sums ? &sums[omp_get_thread_num() * sums_size] : nullptr;
#pragma omp for schedule(static, 1)
        for (int64_t i = tasks - 1; i >= 0; i--) {  // the longest first
            int64_t h = i % call.heads, first = i / call.heads * QUERIES, head = g * call.heads + h;
            task->run((const char*)call.q + b * call.q_batch + head * call.q_head,
                      (char*)call.out + b * call.out_batch + head * call.out_head,
                      thread_sums ? thread_sums + h * call.stored : nullptr,
                      (b * call.groups * call.heads + head) * call.fresh + first, first,
                      std::min<int64_t>(QUERIES, call.fresh - first));
        }
    }
    float* to = call.sums ? call.sums + (b * call.groups + g) * sums_size : nullptr;
    for (size_t i = 0; i < sums.size(); i++) to[i % sums_size] += sums[i];
}

template <class T, class E = typename T::Element> void run(const PrefillAttention& in) {
    bool by_tiles = uses_tiles<T>();
    Call call{in, (float)in.scale * (float)M_LOG2E, by_tiles, by_tiles ? (in.dim + 31) / 32 * 32 : in.dim};
    Packed<T, E> packed(call);
    for (int64_t pair = 0; pair < call.batch * call.groups; pair++)
        run_head<T, E>(call, packed, pair / call.groups, pair % call.groups);
}

void run_bf16(const PrefillAttention& in) {
    if constexpr (WIDENS)
        if (!uses_tiles<BF16>()) return run<F32, bf16>(in);
    run<BF16>(in);
}

}  // namespace

// Computes attention, and adds what the keys receive to the sums.
EXPORT void prefill_attention(const PrefillAttention& in) {
    in.is_bf16 ? run_bf16(in) : run<F32>(in);
}

// Says whether prompts take less time with this than with torch's attention: with narrower vectors they do not.
EXPORT int64_t is_fast_in_float32() {
#if defined(__AVX2__)
    return 1;
#else
    return 0;
#endif
}
EXPORT int64_t is_fast_in_bfloat16() { return has_tiles() || is_fast_in_float32(); }

// Says whether torch's attention multiplies bf16 on tiles, by MKL, and ours does not.
EXPORT int64_t is_faster_in_torch() { return torch_alone_has_tiles("MKL_ENABLE_INSTRUCTIONS"); }
