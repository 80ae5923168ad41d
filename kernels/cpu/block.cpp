// Computes a decoder block without its attention. For one new token of each sequence, matrix-vector products read each
// matrix once; for a prompt, matrices are packed (products.hpp).
#include "products.hpp"
#include "rows.hpp"

namespace {

// Returns the stride of cos and sin between sequences; 0 if all share them.
inline int64_t angles_apart(const BlockInputs& in) { return in.angles > 1 ? in.tokens * in.turned : 0; }

template <class E> inline float round_to(float x) {
    E y;
    put(&y, x);
    return to_float(y);
}

// Computes y = weight * (x / root mean square), rounded where the model's own norm rounds; zero-padded up to `padded`.
template <class E> void rms_norm(const E* x, const E* weight, int64_t count, double eps, E* y, int64_t padded) {
    float total = 0;
#pragma omp simd reduction(+ : total)
    for (int64_t i = 0; i < count; i++) total += to_float(x[i]) * to_float(x[i]);
    float share = 1 / std::sqrt(total / count + (float)eps);
#pragma omp simd
    for (int64_t i = 0; i < count; i++) put(y + i, to_float(weight[i]) * round_to<E>(to_float(x[i]) * share));
    for (int64_t i = count; i < padded; i++) y[i] = 0;
}

// Norms one head and rotates its first `turned` channels, in place.
template <class E>
void finish_head(E* x, int64_t dim, const E* norm, double eps, const E* cos, const E* sin, int64_t turned) {
    if (norm) rms_norm(x, norm, dim, eps, x, dim);
    int64_t half = turned / 2;
    for (int64_t i = 0; i < half; i++) {
        float a = to_float(x[i]), b = to_float(x[i + half]);
        put(x + i, a * to_float(cos[i]) - b * to_float(sin[i]));
        put(x + i + half, b * to_float(cos[i + half]) + a * to_float(sin[i + half]));
    }
}

// Rounds a and b as if they were stored as E and read back.
template <class E> inline void round_both(f32& a, f32& b) {
    if (std::is_same_v<E, float>) return;
#if defined(__AVX512F__)
    typedef uint16_t Words __attribute__((vector_size(64)));
    Words both = (Words)pack_neighbours(a, b);
    Half first = __builtin_shufflevector(both, both, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    Half last = __builtin_shufflevector(both, both, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31);
    a = (f32)(convert<u32>(first) << 16), b = (f32)(convert<u32>(last) << 16);
#else
    a = (f32)(rounded(a) & 0xffff0000u), b = (f32)(rounded(b) & 0xffff0000u);
#endif
}

// Computes x / (1 + e^-x), as exactly as E needs.
template <class E> INLINE f32 silu(f32 x) {
#if defined(__AVX512F__)
    if (std::is_same_v<E, bf16>)
        return x * (f32)_mm512_rcp14_ps((__m512)(exp2<3>(x * -(float)M_LOG2E) + 1.0f));
#endif
    return x / (exp2(x * -(float)M_LOG2E) + 1.0f);
}

// Computes silu(gate) * up, rounded in between as in torch; `out` may be `gate`.
template <class E> void gated(const E* gate, const E* up, int64_t count, E* out) {
    for (int64_t at = 0; at < count; at += LANES) {
        int64_t n = std::min<int64_t>(LANES, count - at);
        E part[2][LANES] = {};
        const E *g = gate + at, *u = up + at;
        if (n < LANES) {
            std::memcpy(part[0], g, n * sizeof(E));
            std::memcpy(part[1], u, n * sizeof(E));
            g = part[0], u = part[1];
        }
        f32 x = widen(g);
        E active[LANES], y[LANES];
        narrow(active, silu<E>(x));
        narrow(y, widen(active) * widen(u));
        std::memcpy(out + at, y, n * sizeof(E));
    }
}

constexpr int ROWS = 8;  // weight rows at a time
constexpr int64_t LEAST_FOR_TILES = 3;  // sequences, below which tiles are mostly empty

// Multiplies `n` <= ROWS rows, starting at `w`, with x, which is zero-padded past `count`.
template <class T, bool PART>
f32 dots(const typename T::Element* w, int64_t n, int64_t count, const typename T::Element* x) {
    using V = typename T::Vector;
    constexpr int W = T::WIDTH;
    constexpr int SUMS = std::max(1, HELD / (2 * ROWS)), AT_ONCE = std::min(ROWS, HELD / 2);  // of a row; rows at once
    f32 all[2 * ROWS] = {};
    const typename T::Element* row[ROWS];
    for (int r = 0; r < ROWS; r++) row[r] = w + std::min<int64_t>(r, n - 1) * count;
    for (int from = 0; from < ROWS; from += AT_ONCE) {
        f32 acc[AT_ONCE][SUMS] = {};
        int64_t at = 0, ahead = ROWS * count;
        for (; at + SUMS * W <= count; at += SUMS * W) {
            V part[SUMS];
            UNROLL for (int i = 0; i < SUMS; i++) part[i] = load<V>(x + at + i * W);
            UNROLL for (int r = 0; r < AT_ONCE; r++) {
                const auto* of_row = row[from + r] + at;
                UNROLL for (int i = 0; i < SUMS; i++) __builtin_prefetch(of_row + ahead + i * W);
                UNROLL for (int i = 0; i < SUMS; i++) acc[r][i] = T::dot(acc[r][i], load<V>(of_row + i * W), part[i]);
            }
        }
        for (; at < count; at += W) {
            V part = load<V>(x + at);
            int bytes = std::min<int64_t>(LINE, (count - at) * sizeof(*w));
            UNROLL for (int r = 0; r < AT_ONCE; r++) {
                const auto* of_row = row[from + r] + at;
                acc[r][0] = T::dot(acc[r][0], PART ? load_part<V>(of_row, bytes) : load<V>(of_row), part);
            }
        }
        UNROLL for (int i = 0; i < AT_ONCE * SUMS; i++) all[2 * (from + i / SUMS) + i % SUMS] = acc[i / SUMS][i % SUMS];
    }
    return sums_of(all);  // adjacent sums belong to one row
}

// Calls emit(row, sequence, 32 products) for the rows from `row` on that make up whole tiles, and returns the first of
// the others. Rows are tiles as they lie in memory; what they are multiplied with, x [batch][count], is transposed.
template <class T, class F>
int64_t tile_products(const Weights& by, int64_t row, int64_t last, int64_t count, const typename T::Element* x,
                      int64_t batch, F emit) {
    static thread_local Buffer<uint32_t> columns_room;
    int64_t words = count / T::PER_WORD;
    uint32_t* columns = room(columns_room, whole_lines(batch, WIDE) * words);
    const char* sequences[WIDE];
    for (int64_t b = 0; b < batch; b += WIDE) {
        int64_t n = std::min<int64_t>(WIDE, batch - b);
        for (int64_t i = 0; i < n; i++) sequences[i] = (const char*)(x + (b + i) * count);
        transpose(sequences, n, words, columns + b * words, WIDE);
    }
    Tiles tiles(true);
    for (; row + TALL <= last; row += TALL) {
        const uint32_t* weight = (const uint32_t*)by.weight + row * words;
        for (int64_t b = 0; b < batch; b += WIDE) {
            alignas(LINE) float sums[TALL * WIDE], of_sequence[TALL * WIDE];
            multiply_tiles<false, true>(weight, words, columns + b * words, WIDE, sums, WIDE, words / LANES);
            for (int r = 0; r < TALL; r++) sequences[r] = (const char*)(sums + r * WIDE);
            transpose(sequences, TALL, WIDE, (uint32_t*)of_sequence, TALL);
            for (int i = 0; i < std::min<int64_t>(WIDE, batch - b); i++) emit(row, b + i, of_sequence + i * TALL, TALL);
        }
    }
    return row;
}

// Calls emit(row, sequence, products, n), for n rows from `row` on, for this thread's share of the `all` rows. x
// [batch][padded]
template <class T, class F>
void products(const Weights& by, int64_t all, int64_t count, const typename T::Element* x, int64_t batch, F emit) {
    using E = typename T::Element;
    const E *weight = (const E*)by.weight, *bias = (const E*)by.bias;
    bool by_tiles = uses_tiles<T>() && batch >= LEAST_FOR_TILES && count % T::WIDTH == 0;
    int64_t together = by_tiles ? TALL : ROWS;
    int64_t padded = whole_lines(count, T::WIDTH), blocks = (all + together - 1) / together;
    int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
    int64_t row = blocks * thread / threads * together, last = std::min(all, blocks * (thread + 1) / threads * together);
    auto add_bias = [&](int64_t row, int64_t b, float* y, int64_t n) {
        for (int64_t r = 0; bias && r < n; r++) y[r] += to_float(bias[row + r]);
        emit(row, b, y, n);
    };
    if (by_tiles) row = tile_products<T>(by, row, last, count, x, batch, add_bias);
    for (; row < last; row += ROWS) {
        int64_t n = std::min<int64_t>(ROWS, last - row);
        for (int64_t b = 0; b < batch; b++) {
            const E* w = weight + row * count;
            f32 sums = count == padded ? dots<T, false>(w, n, count, x + b * padded)
                                       : dots<T, true>(w, n, count, x + b * padded);
            float y[ROWS];
            for (int64_t r = 0; r < ROWS; r++) y[r] = sums[2 * r] + sums[2 * r + 1];
            add_bias(row, b, y, n);
        }
    }
}

// Returns what writes products behind each other, `width` to a sequence.
template <class E> auto put_in(E* out, int64_t width) {
    return [=](int64_t row, int64_t b, const float* y, int64_t n) {
        for (int64_t r = 0; r < n; r++) put(out + b * width + row + r, y[r]);
    };
}

// Does so with the sums of the products, rounded, and of `to`.
template <class E> auto put_sums_in(E* out, const E* to, int64_t width) {
    return [=](int64_t row, int64_t b, const float* y, int64_t n) {
        for (int64_t r = 0, at = b * width + row; r < n; r++, at++) put(out + at, to_float(to[at]) + round_to<E>(y[r]));
    };
}

template <class T> void attention_inputs(const BlockWeights& block, const BlockInputs& in) {
    using E = typename T::Element;
    int64_t width = block.channels, padded = whole_lines(width, T::WIDTH), dim = block.head_dim;
    int64_t outs[] = {block.heads * dim, block.kv_heads * dim, block.kv_heads * dim};
    const Weights* weights[] = {&block.q, &block.k, &block.v};
    E* to[] = {(E*)in.q, (E*)in.k, (E*)in.v};
    Team team;
#pragma omp parallel num_threads(team.threads)
    {
        Member member(team);
        static thread_local Buffer<E> normed_room;
        E* normed = room(normed_room, in.batch * padded);
        for (int64_t b = 0; b < in.batch; b++) {
            rms_norm((const E*)in.x + b * width, (const E*)block.norm, width, block.eps, normed + b * padded, padded);
            if (omp_get_thread_num() == 0)
                std::memcpy((E*)in.normed + b * width, normed + b * padded, width * sizeof(E));
        }
        for (int part = 0; part < 3; part++)
            products<T>(*weights[part], outs[part], width, normed, in.batch, put_in(to[part], outs[part]));
#pragma omp barrier
#pragma omp for schedule(static) nowait
        for (int64_t head = 0; head < in.batch * (block.heads + block.kv_heads); head++) {
            bool is_q = head < in.batch * block.heads;
            int64_t at = is_q ? head : head - in.batch * block.heads;
            int64_t b = at / (is_q ? block.heads : block.kv_heads);
            finish_head((is_q ? to[0] : to[1]) + at * dim, dim, (const E*)(is_q ? block.q_norm : block.k_norm),
                        block.eps, (const E*)in.cos + b * angles_apart(in), (const E*)in.sin + b * angles_apart(in),
                        in.turned);
        }
    }
}

template <class T> void block_output(const BlockWeights& block, const BlockOutput& in) {
    using E = typename T::Element;
    const int64_t batch = in.rows;
    int64_t width = block.channels, padded = whole_lines(width, T::WIDTH), inner = block.inner;
    int64_t from = block.heads * block.head_dim, from_padded = whole_lines(from, T::WIDTH);
    int64_t inner_padded = whole_lines(inner, T::WIDTH);
    static thread_local Buffer<E> heads_room, middle_room, inner_room;
    static thread_local Buffer<E> gate_room, up_room;
    E *heads = room(heads_room, batch * from_padded), *middle = room(middle_room, batch * width);
    E* active = room(inner_room, batch * inner_padded);
    E *gate = room(gate_room, batch * inner), *up = room(up_room, batch * inner);
    for (int64_t b = 0; b < batch; b++) {
        std::memcpy(heads + b * from_padded, (const E*)in.attended + b * from, from * sizeof(E));
        std::fill(heads + b * from_padded + from, heads + (b + 1) * from_padded, E(0));
        std::fill(active + b * inner_padded + inner, active + (b + 1) * inner_padded, E(0));
    }
    const E* x = (const E*)in.x;
    Team team;
#pragma omp parallel num_threads(team.threads)
    {
        Member member(team);
        static thread_local Buffer<E> normed_room;
        products<T>(block.o, width, from, heads, batch, put_sums_in(middle, x, width));
#pragma omp barrier
        E* normed = room(normed_room, batch * padded);
        for (int64_t b = 0; b < batch; b++)
            rms_norm(middle + b * width, (const E*)block.mlp_norm, width, block.eps, normed + b * padded, padded);
        int64_t first = inner, last = 0;  // the rows of this thread
        auto put_gate = put_in(gate, inner);
        products<T>(block.gate, inner, width, normed, batch, [&](int64_t row, int64_t b, const float* y, int64_t n) {
            put_gate(row, b, y, n);
            first = std::min(first, row), last = std::max(last, row + n);
        });
        products<T>(block.up, inner, width, normed, batch, put_in(up, inner));
        for (int64_t b = 0; b < batch && first < last; b++)
            gated(gate + b * inner + first, up + b * inner + first, last - first, active + b * inner_padded + first);
#pragma omp barrier
        products<T>(block.down, width, inner, active, batch, put_sums_in((E*)in.out, middle, width));
    }
}

template <class T> void token_logits(const HeadWeights& head, const TokenLogits& in) {
    using E = typename T::Element;
    const int64_t batch = in.batch;
    int64_t padded = whole_lines(head.channels, T::WIDTH);
    Team team;
#pragma omp parallel num_threads(team.threads)
    {
        Member member(team);
        static thread_local Buffer<E> normed_room;
        E* normed = room(normed_room, batch * padded);
        for (int64_t b = 0; b < batch; b++)
            rms_norm((const E*)in.x + b * head.channels, (const E*)head.norm, head.channels, head.eps,
                     normed + b * padded, padded);
        products<T>(head.weights, head.rows, head.channels, normed, batch, put_in((E*)in.out, head.rows));
    }
}

inline void narrow_apart(float* first, float* second, f32 a, f32 b) { store(first, a), store(second, b); }
inline void narrow_apart(bf16* first, bf16* second, f32 a, f32 b) {
    u32 both = pack_neighbours(a, b);
    std::memcpy(first, &both, LINE / 2);
    std::memcpy(second, (const char*)&both + LINE / 2, LINE / 2);
}

template <class T> void prompt_inputs(const BlockWeights& block, const BlockInputs& in) {
    using E = typename T::Element;
    int64_t width = block.channels, dim = block.head_dim, heads[] = {block.heads, block.kv_heads, block.kv_heads};
    const void* norms[] = {block.q_norm, block.k_norm, nullptr};
    void* to[] = {in.q, in.k, in.v};
    Panels<T> panels(width);
    for (int part = 0; part < 3; part++) panels.add_all((&block.q)[part], heads[part] * dim);
    in_slabs<T, 1>({&panels}, in.batch * in.tokens, [&](int64_t first, int64_t rows, bool by_tiles) {
        static thread_local Buffer<E> normed_room, out_room;
        Rows<E> normed(normed_room, rows, width), out(out_room, rows, panels.count() * WIDE);
        for (int64_t r = 0; r < rows; r++) {
            rms_norm((const E*)in.x + (first + r) * width, (const E*)block.norm, width, block.eps, normed[r], width);
            std::memcpy((E*)in.normed + (first + r) * width, normed[r], width * sizeof(E));
        }
        products<T>(normed, rows, panels, by_tiles, [&](int64_t row, int64_t panel, const float* sums) {
            for (int r = 0; r < 2; r++)
                narrow(out[row + r] + panel * WIDE, load<f32>(sums + r * WIDE), load<f32>(sums + r * WIDE + LANES));
        });
        for (int64_t r = 0; r < rows; r++) {
            int64_t b = (first + r) / in.tokens, t = (first + r) % in.tokens;
            int64_t at = b * angles_apart(in) + t * in.turned;
            const E* x = out[r];
            for (int part = 0; part < 3; part++)
                for (int64_t h = 0; h < heads[part]; h++, x += dim) {
                    E* head = (E*)to[part] + ((b * heads[part] + h) * in.tokens + t) * dim;
                    std::memcpy(head, x, dim * sizeof(E));
                    if (part < 2)
                        finish_head(head, dim, (const E*)norms[part], block.eps, (const E*)in.cos + at,
                                    (const E*)in.sin + at, in.turned);
                }
        }
    });
}

template <class T> void prompt_output(const BlockWeights& block, const BlockOutput& in) {
    using E = typename T::Element;
    int64_t width = block.channels, inner = block.inner, from = block.heads * block.head_dim;
    Panels<T> o(from), gate_up(width), down(inner);
    o.add_all(block.o, width);
    down.add_all(block.down, width);
    for (int64_t row = 0; row < inner; row += LANES) gate_up.add(block.gate, row), gate_up.add(block.up, row);
    in_slabs<T, 3>({&o, &gate_up, &down}, in.rows, [&](int64_t first, int64_t count, bool by_tiles) {
        static thread_local Buffer<E> middle_room, attended_room, normed_room, active_room;
        Rows<E> middle(middle_room, count, width), normed(normed_room, count, width);
        Rows<E> heads(attended_room, count, from), active(active_room, count, inner);
        auto add_to = [&](const E* x, int64_t x_stride, E* y, int64_t y_stride) {
            return [=](int64_t row, int64_t panel, const float* sums) {
                for (int64_t r = row; r < row + 2 && r < count; r++, sums += WIDE) {
                    const E* at = x + r * x_stride + panel * WIDE;
                    f32 a = load<f32>(sums), b = load<f32>(sums + LANES);
                    round_both<E>(a, b);
                    narrow(y + r * y_stride + panel * WIDE, widen(at) + a, widen(at + LANES) + b);
                }
            };
        };
        for (int64_t r = 0; r < count; r++)
            std::memcpy(heads[r], (const E*)in.attended + (first + r) * from, from * sizeof(E));
        const E* x = (const E*)in.x + first * width;
        products<T>(heads, count, o, by_tiles, add_to(x, width, middle[0], middle.stride));
        for (int64_t r = 0; r < count; r++)
            rms_norm(middle[r], (const E*)block.mlp_norm, width, block.eps, normed[r], width);
        products<T>(normed, count, gate_up, by_tiles, [&](int64_t row, int64_t panel, const float* sums) {
            f32 gate[2], up[2];
            for (int r = 0; r < 2; r++) {
                gate[r] = load<f32>(sums + r * WIDE), up[r] = load<f32>(sums + r * WIDE + LANES);
                round_both<E>(gate[r], up[r]);
                gate[r] = silu<E>(gate[r]);
            }
            round_both<E>(gate[0], gate[1]);
            E *first_row = active[row] + panel * LANES, *second_row = first_row + active.stride;
            narrow_apart(first_row, second_row, gate[0] * up[0], gate[1] * up[1]);
        });
        E* y = (E*)in.out + first * width;
        products<T>(active, count, down, by_tiles, add_to(middle[0], middle.stride, y, width));
    });
}

}  // namespace

EXPORT void attention_inputs(const BlockWeights& block, const BlockInputs& in) {
    in.is_bf16 ? attention_inputs<BF16>(block, in) : attention_inputs<F32>(block, in);
}

EXPORT void block_output(const BlockWeights& block, const BlockOutput& in) {
    in.is_bf16 ? block_output<BF16>(block, in) : block_output<F32>(block, in);
}

EXPORT void token_logits(const HeadWeights& head, const TokenLogits& in) {
    in.is_bf16 ? token_logits<BF16>(head, in) : token_logits<F32>(head, in);
}

EXPORT void prompt_inputs(const BlockWeights& block, const BlockInputs& in) {
    in.is_bf16 ? prompt_inputs<BF16>(block, in) : prompt_inputs<F32>(block, in);
}

EXPORT void prompt_output(const BlockWeights& block, const BlockOutput& in) {
    in.is_bf16 ? prompt_output<BF16>(block, in) : prompt_output<F32>(block, in);
}

// Says whether our products suit this processor: with narrower vectors torch's are faster. In bf16 torch multiplies number by
// number without AVX-512; but tiles that only torch has are faster.
EXPORT int64_t is_fast_in_float32() {
#if defined(__AVX2__)
    return 1;
#else
    return 0;
#endif
}
EXPORT int64_t is_fast_in_bfloat16() {
#if defined(__AVX2__)
    return has_tiles() || !torch_alone_has_tiles("ONEDNN_MAX_CPU_ISA");
#else
    return has_tiles();
#endif
}

// Says whether the products of many sequences in bf16 run on tiles.
EXPORT int64_t is_on_tiles() { return has_tiles(); }
